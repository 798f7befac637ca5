#include "ops/cpu/kda_loops.h"

namespace perigee::cpu {

const KdaKernels kKdaAvx512 = kKdaLoops;

}  // namespace perigee::cpu
