#include "ops/cpu/full_loops.h"

namespace perigee::cpu {

const FullKernels kFullAvx2 = kLoops;

}  // namespace perigee::cpu
