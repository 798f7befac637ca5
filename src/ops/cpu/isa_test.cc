#include "ops/cpu/isa.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(Isa, OptionsOnlyLowerIt) {
  const Result<Isa> best = detect_isa({});
  if (!best.ok()) GTEST_SKIP() << "no AVX2";
  EXPECT_EQ(*detect_isa({.num_threads = 0, .allow_amx = true, .allow_avx512 = false}), Isa::kAvx2);
  EXPECT_EQ(*detect_isa({.num_threads = 0, .allow_amx = false, .allow_avx512 = true}), std::min(*best, Isa::kAvx512));
  EXPECT_EQ(*detect_isa({}), *best);
}

}  // namespace
}  // namespace perigee
