#include "ops/cpu/elementwise_loops.h"

namespace perigee::cpu {

const ElementwiseKernels kElementwiseAvx2 = kLoops;

}  // namespace perigee::cpu
