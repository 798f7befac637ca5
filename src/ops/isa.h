// The instruction sets of the CPU backend, in ascending order: a processor that has one has those before it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/result.h"

namespace perigee {

enum class Isa : uint8_t {
  kAvx2,    // AVX2 + FMA + F16C
  kAvx512,  // AVX-512 F, BW, VL, DQ, BF16 and VNNI
  kAmx,     // the above and AMX bf16 tiles
};
inline constexpr std::array kAllIsas = {Isa::kAvx2, Isa::kAvx512, Isa::kAmx};

const char* isa_name(Isa isa);
Result<Isa> parse_isa(std::string_view name);  // "avx2", "avx512" or "amx"

}  // namespace perigee
