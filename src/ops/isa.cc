#include "ops/isa.h"

#include <fmt/core.h>

namespace perigee {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAmx: return "amx";
  }
  return "?";
}

Result<Isa> parse_isa(std::string_view name) {
  for (const Isa isa : kAllIsas)
    if (name == isa_name(isa)) return isa;
  return bad_input(fmt::format("expected avx2, avx512 or amx, found \"{}\"", name));
}

}  // namespace perigee
