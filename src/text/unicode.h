// Unicode character classes: what the pre-tokeniser's pattern asks about a code point, and nothing more.
//
// The table is generated from ICU by tools/make_unicode_tables.py.
#pragma once

#include <cstdint>

namespace perigee {

// Bits of unicode_class().
constexpr uint8_t kClassHan = 1;      // script property Han
constexpr uint8_t kClassUpper = 2;    // Lu, Lt, Lm, Lo, M, without Han: the first half of a word
constexpr uint8_t kClassLower = 4;    // Ll, Lm, Lo, M, without Han: the second half of a word
constexpr uint8_t kClassLetter = 8;   // L
constexpr uint8_t kClassNumber = 16;  // N: Nd, Nl, No
constexpr uint8_t kClassSpace = 32;   // White_Space

// Classes of a code point; 0 for U+110000 and above.
uint8_t unicode_class(uint32_t code_point);

// What Python's str.isspace says, which counts U+001C to U+001F too.
inline bool is_python_space(uint32_t code_point) {
  return (unicode_class(code_point) & kClassSpace) != 0 || (code_point >= 0x1C && code_point <= 0x1F);
}

struct UnicodeVersion {
  int major;
  int minor;
};
UnicodeVersion unicode_table_version();

}  // namespace perigee
