#include "ops/cpu/kda_loops.h"

namespace perigee::cpu {

const KdaKernels kKdaAvx2 = kKdaLoops;

}  // namespace perigee::cpu
