#include "text/unicode.h"

#include <gtest/gtest.h>

#include <cstdlib>

#ifdef PERIGEE_TEST_ICU
#include <unicode/uchar.h>
#include <unicode/uscript.h>
#endif

namespace perigee {
namespace {

TEST(Unicode, ClassesOfKnownCharacters) {
  EXPECT_EQ(unicode_class('A'), kClassUpper | kClassLetter);
  EXPECT_EQ(unicode_class('z'), kClassLower | kClassLetter);
  EXPECT_EQ(unicode_class('7'), kClassNumber);
  EXPECT_EQ(unicode_class('_'), 0);
  EXPECT_EQ(unicode_class(0x4F60), kClassHan | kClassLetter);
  EXPECT_EQ(unicode_class(0x3007), kClassHan | kClassNumber);                  // 〇 is a letter number
  EXPECT_EQ(unicode_class(0x2F00), kClassHan);                                 // a radical is a symbol
  EXPECT_EQ(unicode_class(0x0301), kClassUpper | kClassLower);                 // a combining mark is not a letter
  EXPECT_EQ(unicode_class(0x3042), kClassUpper | kClassLower | kClassLetter);  // あ
  EXPECT_EQ(unicode_class(0x3000), kClassSpace);
  EXPECT_EQ(unicode_class(0x1C), 0);
  EXPECT_TRUE(is_python_space(0x1C));
  EXPECT_FALSE(is_python_space(0x200B));
  EXPECT_EQ(unicode_class(0x110000), 0);
  EXPECT_EQ(unicode_class(0xFFFFFFFF), 0);
}

#ifdef PERIGEE_TEST_ICU

uint8_t icu_class(UChar32 code_point) {
  const uint32_t mask = U_GET_GC_MASK(code_point);
  UErrorCode error = U_ZERO_ERROR;
  const bool han = uscript_getScript(code_point, &error) == USCRIPT_HAN;
  uint8_t out = han ? kClassHan : 0;
  const uint32_t both = U_GC_LM_MASK | U_GC_LO_MASK | U_GC_M_MASK;
  if (!han && (mask & (U_GC_LU_MASK | U_GC_LT_MASK | both))) out |= kClassUpper;
  if (!han && (mask & (U_GC_LL_MASK | both))) out |= kClassLower;
  if (mask & U_GC_L_MASK) out |= kClassLetter;
  if (mask & U_GC_N_MASK) out |= kClassNumber;
  if (u_hasBinaryProperty(code_point, UCHAR_WHITE_SPACE)) out |= kClassSpace;
  return out;
}

// Another machine's ICU may know a newer Unicode: code points younger than the table are left out.
TEST(Unicode, TableEqualsIcuForEveryCodePoint) {
  const UnicodeVersion table = unicode_table_version();
  int compared = 0;
  for (UChar32 code_point = 0; code_point < 0x110000; ++code_point) {
    UVersionInfo age;
    u_charAge(code_point, age);
    if (age[0] > table.major || (age[0] == table.major && age[1] > table.minor)) continue;
    ASSERT_EQ(unicode_class(static_cast<uint32_t>(code_point)), icu_class(code_point)) << std::hex << code_point;
    ++compared;
  }
  EXPECT_GT(compared, 0x100000);
}

#else

TEST(Unicode, TableEqualsIcuForEveryCodePoint) {
  if (std::getenv("CI") != nullptr) FAIL() << "built without ICU: libicu-dev is missing";
  GTEST_SKIP() << "built without ICU";
}

#endif

}  // namespace
}  // namespace perigee
