#include "base/utf8.h"

namespace perigee {
namespace {

// Table 3-7 of the Unicode standard: how many bytes a lead byte announces, and the range of the second one.
struct Lead {
  uint8_t length;  // 0: no lead byte
  uint8_t low;
  uint8_t high;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0xC2 || byte > 0xF4) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {4, 0x80, 0xBF};
}

}  // namespace

Utf8Char utf8_slow_at(std::string_view text, size_t pos) {
  const auto first = static_cast<uint8_t>(text[pos]);
  if (first < 0x80) return {first, 1, Utf8Kind::kValid};
  const Lead lead = lead_of(first);
  if (lead.length == 0) return {0xFFFD, 1, Utf8Kind::kInvalid};
  uint32_t code_point = first & (0xFFu >> (lead.length + 1));
  for (uint8_t i = 1; i < lead.length; ++i) {
    if (pos + i >= text.size()) return {0xFFFD, i, Utf8Kind::kTruncated};
    const auto byte = static_cast<uint8_t>(text[pos + i]);
    const uint8_t low = i == 1 ? lead.low : 0x80;
    const uint8_t high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {0xFFFD, i, Utf8Kind::kInvalid};
    code_point = code_point << 6 | (byte & 0x3Fu);
  }
  return {code_point, lead.length, Utf8Kind::kValid};
}

std::string excerpt(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = utf8_at(text, pos);
    const std::string_view piece = c.kind == Utf8Kind::kValid ? text.substr(pos, c.length) : kReplacement;
    if (out.size() + piece.size() > max_bytes) return out + "...";
    out += piece;
    pos += c.length;
  }
  return out;
}

}  // namespace perigee
