#include "ops/cpu/isa.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(Isa, TheWantedOneOrAnErrorThatNamesTheBest) {
  const Result<Isa> best = detect_isa();
  ASSERT_TRUE(best.ok()) << best.error().message;
  for (const Isa wanted : kAllIsas) {
    const Result<Isa> got = detect_isa(wanted);
    ASSERT_EQ(got.ok(), wanted <= *best) << isa_name(wanted);
    if (got.ok()) {
      EXPECT_EQ(*got, wanted);
    } else {
      EXPECT_EQ(got.error().code, Code::kUnavailable);
      EXPECT_EQ(got.error().message, fmt::format("--cpu-isa {}: the best of this machine is {}; leave it out",
                                                 isa_name(wanted), isa_name(*best)));
    }
  }
}

TEST(Isa, NamesAreParsed) {
  for (const Isa isa : kAllIsas) EXPECT_EQ(*parse_isa(isa_name(isa)), isa);
  for (const char* name : {"", "auto", "AVX2", "avx51"}) {
    const Result<Isa> none = parse_isa(name);
    ASSERT_FALSE(none.ok()) << name;
    EXPECT_EQ(none.error().message, fmt::format("expected avx2, avx512 or amx, found \"{}\"", name));
  }
}

}  // namespace
}  // namespace perigee
