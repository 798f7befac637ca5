// Which instruction sets the tests of the CPU backend run on: all that this machine has, or the one that
// PERIGEE_CPU_ISA in the environment names.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/check.h"
#include "ops/cpu/isa.h"

namespace perigee {

// For tests that run on one. Ends the program where PERIGEE_CPU_ISA is not a known name, or names one that this
// machine lacks.
inline Isa isa_under_test() {
  static const Isa isa = [] {
    const char* name = std::getenv("PERIGEE_CPU_ISA");
    if (name != nullptr && std::string_view(name) == "auto") name = nullptr;
    Result<Isa> wanted = name == nullptr ? detect_isa() : parse_isa(name);
    if (wanted.ok()) wanted = detect_isa(*wanted);
    CHECK(wanted.ok(), "PERIGEE_CPU_ISA=", name == nullptr ? "" : name, ": ", wanted.error().message);
    std::printf("instruction set: %s%s\n", isa_name(*wanted), name == nullptr ? ", the best of this machine" : "");
    std::fflush(stdout);
    return *wanted;
  }();
  return isa;
}

// For tests that run on each; they skip those where the reason is not empty.
inline std::string why_not_on(Isa isa) {
  const Isa best = isa_under_test();
  if (isa == best || (isa < best && std::getenv("PERIGEE_CPU_ISA") == nullptr)) return "";
  return isa < best ? "PERIGEE_CPU_ISA asks for another instruction set"
                    : std::string("this machine, or PERIGEE_CPU_ISA, has no ") + isa_name(isa);
}

inline std::vector<Isa> isas_under_test() {
  std::vector<Isa> isas;
  std::copy_if(kAllIsas.begin(), kAllIsas.end(), std::back_inserter(isas),
               [](Isa isa) { return why_not_on(isa).empty(); });
  return isas;
}

}  // namespace perigee
