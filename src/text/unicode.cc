#include "text/unicode.h"

namespace perigee {
namespace {
#include "text/unicode_tables.inc"
}  // namespace

uint8_t unicode_class(uint32_t code_point) {
  if (code_point >= 0x110000) return 0;
  return kClassBlocks[kClassIndex[code_point >> 7]][code_point & 127];
}

UnicodeVersion unicode_table_version() {
  return {kUnicodeMajor, kUnicodeMinor};
}

}  // namespace perigee
