#include "ops/cpu/isa.h"

#include <cpuid.h>
#include <fmt/core.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace perigee {
namespace {

bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1u) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool bf16 = (d >> 22 & 1u) != 0;
  const bool tile = (d >> 24 & 1u) != 0;
  if (!bf16 || !tile) return false;
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, asm/prctl.h of Linux 5.16
  constexpr int kTileData = 18;               // the XSAVE component of the tiles
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

Result<Isa> detect_isa(std::optional<Isa> wanted) {
  if (!has_avx2()) return Error(Code::kUnavailable, "the cpu backend needs a processor with AVX2, FMA and F16C");
  Isa best = Isa::kAvx2;
  if (wanted != Isa::kAvx2 && has_avx512()) best = Isa::kAvx512;
  if (wanted != Isa::kAvx512 && best == Isa::kAvx512 && has_amx()) best = Isa::kAmx;
  if (wanted && *wanted != best)
    return Error(Code::kUnavailable, fmt::format("--cpu-isa {}: the best of this machine is {}; leave it out",
                                                 isa_name(*wanted), isa_name(best)));
  return best;
}

}  // namespace perigee
