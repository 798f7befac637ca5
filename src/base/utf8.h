// UTF-8: one character at a time out of bytes that may be anything.
//
// Ill-formed input is cut into maximal subparts (Unicode 15, section 3.9, "Substitution of Maximal Subparts"): what
// Python's errors="replace" and browsers do, so every layer that counts or replaces bad bytes agrees with them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace perigee {

enum class Utf8Kind : uint8_t {
  kValid,
  kInvalid,    // `length` bytes that can never be part of a character, whatever follows
  kTruncated,  // the text ends inside a character that is good so far; `length` bytes of it are there
};

struct Utf8Char {
  uint32_t code_point;  // kInvalid and kTruncated: U+FFFD
  uint8_t length;       // bytes, at least 1
  Utf8Kind kind;
};

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// The character that begins at text[pos]; requires pos < text.size(). Never reads past the end.
Utf8Char utf8_slow_at(std::string_view text, size_t pos);

inline Utf8Char utf8_at(std::string_view text, size_t pos) {
  const auto first = static_cast<uint8_t>(text[pos]);
  if (first < 0x80) return {first, 1, Utf8Kind::kValid};
  return utf8_slow_at(text, pos);
}

// `text` cut to at most `max_bytes`, for messages, with three dots where something was left out. The result is valid
// UTF-8: invalid bytes become U+FFFD, and no character is split.
std::string excerpt(std::string_view text, size_t max_bytes);

}  // namespace perigee
