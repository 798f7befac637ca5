#include "base/utf8.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(Excerpt, ValidBoundedAndNeverInsideACharacter) {
  EXPECT_EQ(excerpt("abc", 3), "abc");
  EXPECT_EQ(excerpt("abcd", 3), "abc...");
  EXPECT_EQ(excerpt("", 0), "");
  EXPECT_EQ(excerpt("a\xC3\xA9", 3), "a\xC3\xA9");
  EXPECT_EQ(excerpt("a\xC3\xA9", 2), "a...");
  EXPECT_EQ(excerpt("\xF0\x9F\x98\x80", 3), "...");
  EXPECT_EQ(excerpt("a\xFF"
                    "b\xC3",
                    16),
            "a\xEF\xBF\xBD"
            "b\xEF\xBF\xBD");
  EXPECT_EQ(excerpt(std::string(1000, '\xFF'), 10).size(), 9 + 3u);
}

}  // namespace
}  // namespace perigee
