#include "ops/cpu/full_loops.h"

namespace perigee::cpu {

const FullKernels kFullAvx512 = kLoops;

}  // namespace perigee::cpu
