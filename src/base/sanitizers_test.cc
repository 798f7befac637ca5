// A sanitizer must end the program at its first finding: where it only prints, the test that found the bug passes.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace perigee {
namespace {

#ifdef __has_feature  // clang's, which the preset asan-fuzz compiles with
#if __has_feature(undefined_behavior_sanitizer)
TEST(SanitizersDeathTest, UndefinedBehaviourEndsTheProgram) {
  volatile int32_t largest = std::numeric_limits<int32_t>::max();
  EXPECT_DEATH(largest = largest + 1, "signed integer overflow");
}
#endif
#if __has_feature(address_sanitizer)
TEST(SanitizersDeathTest, ABadAccessEndsTheProgram) {
  const std::vector<int32_t> two(2);
  const volatile int32_t* data = two.data();
  EXPECT_DEATH(static_cast<void>(data[2]), "heap-buffer-overflow");
}
#endif
#endif

}  // namespace
}  // namespace perigee
