#include "text/pretokenizer.h"

#include <array>

#include "base/utf8.h"
#include "text/unicode.h"

namespace perigee {
namespace {

constexpr uint8_t kLetterOrNumber = kClassLetter | kClassNumber;
constexpr uint8_t kSolid = kClassLetter | kClassNumber | kClassSpace;

constexpr std::array<uint8_t, 128> make_ascii_classes() {
  std::array<uint8_t, 128> out{};
  for (int c = 'A'; c <= 'Z'; ++c) out[c] = kClassUpper | kClassLetter;
  for (int c = 'a'; c <= 'z'; ++c) out[c] = kClassLower | kClassLetter;
  for (int c = '0'; c <= '9'; ++c) out[c] = kClassNumber;
  for (int c = 0x09; c <= 0x0D; ++c) out[c] = kClassSpace;
  out[' '] = kClassSpace;
  return out;
}
constexpr std::array<uint8_t, 128> kAsciiClasses = make_ascii_classes();

struct Char {
  uint8_t classes;
  uint8_t length;  // bytes
};

Char char_at(std::string_view text, size_t pos) {
  const auto first = static_cast<uint8_t>(text[pos]);
  if (first < 0x80) return {kAsciiClasses[first], 1};
  const Utf8Char c = utf8_slow_at(text, pos);
  return {c.kind == Utf8Kind::kValid ? unicode_class(c.code_point) : uint8_t{0}, c.length};
}

bool is_newline(char c) {
  return c == '\r' || c == '\n';
}

// The end of the maximal run of characters that have a bit of `any`.
size_t run_end(std::string_view text, size_t pos, uint8_t any) {
  while (pos < text.size()) {
    const Char c = char_at(text, pos);
    if ((c.classes & any) == 0) break;
    pos += c.length;
  }
  return pos;
}

// The end of (?i:'s|'t|'re|'ve|'m|'ll|'d)? at pos. Case folding makes U+017F (ſ) an s.
size_t contraction_end(std::string_view text, size_t pos) {
  const std::string_view rest = text.substr(pos, 3);
  if (rest.size() < 2 || rest[0] != '\'') return pos;
  const char first = static_cast<char>(rest[1] | 0x20);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return pos + 2;
  if (rest.size() < 3) return pos;
  if (rest[1] == '\xC5' && rest[2] == '\xBF') return pos + 3;
  const char second = static_cast<char>(rest[2] | 0x20);
  const bool two =
      (first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l');
  return two ? pos + 3 : pos;
}

struct Word {
  size_t end_with_lower;  // where [Upper]*[Lower]+ ends; the start when it does not match
  size_t end_of_upper;    // where [Upper]+ ends; the start when it does not match
};

// Greedy [Upper]*[Lower]+ from `start`: when nothing follows the Upper run, the regular expression backs up to the
// last of its characters that is Lower too (marks and letters without case are both).
Word match_word(std::string_view text, size_t start) {
  size_t pos = start;
  size_t after_last_both = start;
  while (pos < text.size()) {
    const Char c = char_at(text, pos);
    if ((c.classes & kClassUpper) == 0) break;
    pos += c.length;
    if (c.classes & kClassLower) after_last_both = pos;
  }
  const size_t lower_end = run_end(text, pos, kClassLower);
  return {lower_end > pos ? lower_end : after_last_both, pos};
}

// Both word alternatives; `begin` when neither matches.
size_t word_end(std::string_view text, size_t begin, Char first) {
  const bool can_prefix = (first.classes & kLetterOrNumber) == 0 && !is_newline(text[begin]);
  const size_t after_prefix = begin + first.length;
  const Word with_prefix = can_prefix ? match_word(text, after_prefix) : Word{after_prefix, after_prefix};
  if (with_prefix.end_with_lower > after_prefix) return contraction_end(text, with_prefix.end_with_lower);
  const Word bare = match_word(text, begin);
  if (bare.end_with_lower > begin) return contraction_end(text, bare.end_with_lower);
  if (with_prefix.end_of_upper > after_prefix) return contraction_end(text, with_prefix.end_of_upper);
  return bare.end_of_upper > begin ? contraction_end(text, bare.end_of_upper) : begin;
}

size_t number_end(std::string_view text, size_t begin) {
  size_t pos = begin;
  for (int digits = 0; digits < 3 && pos < text.size(); ++digits) {
    const Char c = char_at(text, pos);
    if ((c.classes & kClassNumber) == 0) break;
    pos += c.length;
  }
  return pos;
}

// ` ?[^\s\p{L}\p{N}]+[\r\n]*`; `begin` when it does not match.
size_t symbol_end(std::string_view text, size_t begin) {
  const size_t start = text[begin] == ' ' ? begin + 1 : begin;
  size_t pos = start;
  while (pos < text.size()) {
    const Char c = char_at(text, pos);
    if (c.classes & kSolid) break;
    pos += c.length;
  }
  if (pos == start) return begin;
  while (pos < text.size() && is_newline(text[pos])) ++pos;
  return pos;
}

// `\s*[\r\n]+`, `\s+(?!\S)`, `\s+`; the character at begin is white space.
size_t space_end(std::string_view text, size_t begin) {
  size_t pos = begin;
  size_t last_start = begin;
  size_t after_newline = begin;
  while (pos < text.size()) {
    const Char c = char_at(text, pos);
    if ((c.classes & kClassSpace) == 0) break;
    last_start = pos;
    pos += c.length;
    if (is_newline(text[last_start])) after_newline = pos;
  }
  if (after_newline > begin) return after_newline;
  if (pos == text.size() || last_start == begin) return pos;
  return last_start;
}

}  // namespace

size_t next_piece_end(std::string_view text, size_t begin) {
  const Char first = char_at(text, begin);
  if (first.classes & kClassHan) return run_end(text, begin, kClassHan);
  if (const size_t end = word_end(text, begin, first); end > begin) return end;
  if (const size_t end = number_end(text, begin); end > begin) return end;
  if (const size_t end = symbol_end(text, begin); end > begin) return end;
  return space_end(text, begin);
}

std::optional<size_t> ReferenceCuts::next() {
  constexpr size_t kMaxSlice = 400'000;
  constexpr size_t kMaxRun = 25'000;
  if (text_.size() <= kMaxRun) return std::nullopt;  // a character has at least one byte
  while (pos_ < text_.size()) {
    const size_t begin = pos_;
    const Utf8Char c = utf8_at(text_, pos_);
    pos_ += c.length;
    if (!ignored_.empty() && text_.substr(begin, c.length) == ignored_) continue;
    const bool is_space = c.kind == Utf8Kind::kValid && is_python_space(c.code_point);
    const bool slice_is_full = slice_ == kMaxSlice;
    const bool cut = slice_is_full || (run_ == kMaxRun && is_space == run_is_space_);
    if (slice_is_full) slice_ = 0;
    if (cut) run_ = 0;
    run_ = run_ > 0 && is_space == run_is_space_ ? run_ + 1 : 1;
    run_is_space_ = is_space;
    ++slice_;
    if (cut) return begin;
  }
  return std::nullopt;
}

}  // namespace perigee
