#include "server/long_strings.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "text/tokenizer.h"

namespace perigee {

namespace {

constexpr size_t kLongString = 1u << 20;
constexpr size_t kMaxStrings = 1u << 14;  // that are looked at: bodies with many more are refused for that
constexpr uint32_t kStop = 1u << 31;      // in place of a weight: the string ends here, or an escape begins

std::array<uint32_t, 256> weights_of_plain_text(const TokenBound& bound) {
  std::array<uint32_t, 256> weights{};
  for (size_t byte = 0; byte < weights.size(); ++byte) weights[byte] = bound.weight(static_cast<char>(byte));
  weights['"'] = weights['\\'] = kStop;
  return weights;
}

constexpr uint32_t kNoDigit = 1u << 16;

constexpr std::array<uint32_t, 256> make_hex_digits() {
  std::array<uint32_t, 256> digits{};
  digits.fill(kNoDigit);
  for (uint32_t i = 0; i < 10; ++i) digits['0' + i] = i;
  for (uint32_t i = 10; i < 16; ++i) digits['a' + i - 10] = digits['A' + i - 10] = i;
  return digits;
}

// The code unit of the escape \uXXXX that begins at text[at]; kNoDigit or more for anything else.
uint32_t escaped_unit(std::string_view text, size_t at) {
  static constexpr std::array<uint32_t, 256> kDigits = make_hex_digits();
  if (text.size() < at + 6 || text[at] != '\\' || text[at + 1] != 'u') return kNoDigit;
  const auto digit = [&](size_t i) { return kDigits[static_cast<uint8_t>(text[at + i])]; };
  const uint32_t high = digit(2) << 4 | digit(3), low = digit(4) << 4 | digit(5);
  return high << 8 | low;
}

// Reads one string after the other.
class StringScan {
 public:
  StringScan(std::string_view body, const TokenBound& bound, size_t max_tokens)
      : body_(body),
        bound_(bound),
        plain_(weights_of_plain_text(bound)),
        limit_(max_tokens * uint64_t{TokenBound::kOneToken}) {}

  bool find_string() {
    const size_t quote = body_.find('"', at_);
    if (quote == std::string_view::npos) return false;
    begin_ = at_ = quote + 1;
    return true;
  }
  // To the end of the string that was found. True: it is too long, and read no further than it takes to know.
  bool reads_too_much() {
    uint64_t weight = 0;
    bool may_shrink = false;
    while (at_ < body_.size() && body_[at_] != '"') {
      weight += body_[at_] == '\\' ? take_escapes(may_shrink) : take_plain();
      if (weight <= limit_ || at_ - begin_ <= kLongString || may_shrink) continue;
      may_shrink = body_.substr(begin_, at_ - begin_).find(kNeutral) != std::string_view::npos;
      if (!may_shrink) return true;
    }
    ++at_;
    return false;
  }
  size_t string_begin() const { return begin_; }

 private:
  static constexpr size_t kPiece = 4096;  // is taken at once, so that little more is read than a verdict takes

  uint64_t take_plain() {
    constexpr size_t kStride = 8;
    const size_t end = std::min(body_.size(), at_ + kPiece);
    uint64_t weight = 0;
    for (; at_ + kStride <= end; at_ += kStride) {
      uint32_t sum = 0, any = 0;
      for (size_t i = 0; i < kStride; ++i) {
        const uint32_t more = plain_[static_cast<uint8_t>(body_[at_ + i])];
        sum += more;
        any |= more;
      }
      if ((any & kStop) != 0) break;
      weight += sum;
    }
    for (; at_ < end; ++at_) {
      const uint32_t more = plain_[static_cast<uint8_t>(body_[at_])];
      if (more == kStop) break;
      weight += more;
    }
    return weight;
  }
  // Several that follow each other.
  uint64_t take_escapes(bool& may_shrink) {
    const size_t end = std::min(body_.size(), at_ + kPiece);
    uint64_t weight = 0;
    while (at_ < end && body_[at_] == '\\') {
      const uint32_t code = take_escape();
      may_shrink = may_shrink || code == kNeutralCode;
      weight += weight_of(code);
    }
    return weight;
  }
  // Of what is not valid JSON any character will do: the parser refuses it.
  uint32_t take_escape() {
    constexpr std::string_view kNames = "bfnrt\"\\/", kMeant = "\b\f\n\r\t\"\\/";
    const uint32_t unit = escaped_unit(body_, at_);
    if (unit >= kNoDigit) {
      const size_t which = at_ + 1 < body_.size() ? kNames.find(body_[at_ + 1]) : std::string_view::npos;
      at_ += 2;
      return which == std::string_view::npos ? 0 : static_cast<uint32_t>(kMeant[which]);
    }
    at_ += 6;
    if ((unit & 0xF800) != 0xD800) return unit;
    const uint32_t low = unit < 0xDC00 ? escaped_unit(body_, at_) : kNoDigit;
    if ((low & ~uint32_t{0x3FF}) != 0xDC00) return 0xFFFD;
    at_ += 6;
    return 0x10000 + ((unit & 0x3FF) << 10 | (low & 0x3FF));
  }
  // As UTF-8.
  uint64_t weight_of(uint32_t code) const {
    const auto byte = [&](uint32_t value) { return bound_.weight(static_cast<char>(value)); };
    const auto tail = [&](int shift) { return byte(0x80 | (code >> shift & 0x3F)); };
    if (code < 0x80) return byte(code);
    if (code < 0x800) return byte(0xC0 | code >> 6) + tail(0);
    if (code < 0x10000) return byte(0xE0 | code >> 12) + tail(6) + tail(0);
    return byte(0xF0 | code >> 18) + tail(12) + tail(6) + tail(0);
  }
  static constexpr uint32_t kNeutralCode = 0xFDD0;  // prompts of chats lose it before they are tokenised

  const std::string_view body_;
  const TokenBound& bound_;
  const std::array<uint32_t, 256> plain_;
  const uint64_t limit_;
  size_t at_ = 0, begin_ = 0;
};

}  // namespace

Status check_long_strings(std::string_view body, const TokenBound& bound, size_t max_tokens) {
  if (body.size() <= kLongString) return {};
  StringScan scan(body, bound, max_tokens);
  for (size_t i = 0; i < kMaxStrings && scan.find_string(); ++i)
    if (scan.reads_too_much())
      return bad_input(fmt::format(
          "the text that begins at byte {} of the body has more than {} tokens, the most that fit; shorten it",
          scan.string_begin(), max_tokens));
  return {};
}

}  // namespace perigee
