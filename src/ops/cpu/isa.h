// Which instruction set the CPU backend runs on, found once at start.
#pragma once

#include "base/result.h"
#include "ops/ops.h"

namespace perigee {

enum class Isa : uint8_t {
  kAvx2,    // AVX2 + FMA + F16C
  kAvx512,  // AVX-512 F, BW, VL, DQ and BF16
  kAmx,     // the above and AMX bf16 tiles
};

const char* isa_name(Isa isa);

// The best one that the processor, the kernel and the options allow; AMX needs AVX-512. Asks Linux for permission to
// use tile data (arch_prctl), which holds for all threads of the process. Unavailable without AVX2 + FMA.
Result<Isa> detect_isa(const CpuOptions& options);

}  // namespace perigee
