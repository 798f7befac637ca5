#include "ops/cpu/elementwise_loops.h"

namespace perigee::cpu {

const ElementwiseKernels kElementwiseAvx512 = kLoops;

}  // namespace perigee::cpu
