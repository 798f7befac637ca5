#include "ops/cpu/isa.h"

#include <cpuid.h>
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
         __builtin_cpu_supports("avx512bf16");
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

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAmx: return "amx";
  }
  return "?";
}

Result<Isa> detect_isa(const CpuOptions& options) {
  if (!has_avx2()) return Error(Code::kUnavailable, "the cpu backend needs a processor with AVX2, FMA and F16C");
  if (!options.allow_avx512 || !has_avx512()) return Isa::kAvx2;
  if (!options.allow_amx || !has_amx()) return Isa::kAvx512;
  return Isa::kAmx;
}

}  // namespace perigee
