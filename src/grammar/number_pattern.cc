#include "grammar/number_pattern.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "grammar/pattern.h"

namespace perigee {
namespace {

// Numbers are counted in units of 10^-fraction, of which a bound is below 10^15: doubles keep that many apart.
struct Scale {
  int fraction;
  int64_t unit;  // 10^fraction: units of 1
};
constexpr Scale kScales[] = {{9, 1'000'000'000}, {3, 1'000}, {0, 1}};
constexpr int64_t kLimit = 1'000'000'000'000'000;
constexpr int64_t kMostDigits = 15;

std::string digits_of(int64_t value, size_t width = 1) {
  std::string out;
  for (; value > 0; value /= 10) out += static_cast<char>('0' + value % 10);
  while (out.size() < width) out += '0';
  std::reverse(out.begin(), out.end());
  return out;
}

std::string digit_class(char low, char high) {
  return low == high ? std::string(1, low) : fmt::format("[{}-{}]", low, high);
}

std::string repeated_digit(size_t count) {
  if (count == 0) return "";
  return count == 1 ? "[0-9]" : fmt::format("[0-9]{{{}}}", count);
}

// Alternatives for the digit strings from `low` to `high`, both of the same length.
void between(const std::string& low, const std::string& high, const std::string& before,
             std::vector<std::string>& out) {
  if (low.empty()) return out.push_back(before);
  const size_t rest = low.size() - 1;
  const bool all_from = low.substr(1) == std::string(rest, '0'), all_to = high.substr(1) == std::string(rest, '9');
  if (low[0] == high[0]) {
    if (all_from && all_to) return out.push_back(before + low[0] + repeated_digit(rest));
    return between(low.substr(1), high.substr(1), before + low[0], out);
  }
  char first = low[0], last = high[0];
  if (!all_from) between(low.substr(1), std::string(rest, '9'), before + first++, out);
  if (!all_to) --last;
  if (first <= last) out.push_back(before + digit_class(first, last) + repeated_digit(rest));
  if (!all_to) between(std::string(rest, '0'), high.substr(1), before + high[0], out);
}

std::string optional(const std::string& group) {
  return spell_repeat(group, 0, 1);
}

std::string any_of(const std::vector<std::string>& alternatives) {
  std::string out;
  for (const std::string& each : alternatives) out += (out.empty() ? "" : "|") + each;
  return "(" + out + ")";
}

// Whole numbers from low to high, high < 0 for none.
void wholes(int64_t low, int64_t high, std::vector<std::string>& out) {
  std::string from = digits_of(low);
  if (high < 0) {
    between(from, std::string(from.size(), '9'), "", out);
    const int64_t size = static_cast<int64_t>(from.size());
    if (size < kMostDigits) out.push_back("[1-9]" + spell_repeat("[0-9]", size, kMostDigits - 1));
    return;
  }
  const std::string to = digits_of(high);
  while (from.size() < to.size()) {
    between(from, std::string(from.size(), '9'), "", out);
    from = "1" + std::string(from.size(), '0');
  }
  if (from <= to) between(from, to, "", out);
}

// Numbers from low to high units without a sign, high < 0 for none.
void unsigned_numbers(int64_t low, int64_t high, bool integer, const Scale& scale, std::vector<std::string>& out) {
  if (integer || scale.fraction == 0) {
    const int64_t first = (low + scale.unit - 1) / scale.unit;
    if (high < 0) return wholes(first, -1, out);
    if (first <= high / scale.unit) wholes(first, high / scale.unit, out);
    return;
  }
  const std::string any_fraction = optional("\\." + spell_repeat("[0-9]", 1, scale.fraction));
  const auto fraction = [&](int64_t from, int64_t to) {
    std::vector<std::string> digits;
    between(digits_of(from, scale.fraction), digits_of(to, scale.fraction), "", digits);
    return "\\." + any_of(digits);
  };
  int64_t first = low / scale.unit;
  const int64_t first_part = low % scale.unit;
  if (high >= 0 && first == high / scale.unit) {
    const std::string part = fraction(first_part, high % scale.unit);
    return out.push_back(digits_of(first) + (first_part == 0 ? optional(part) : part));
  }
  if (first_part != 0) {
    out.push_back(digits_of(first) + fraction(first_part, scale.unit - 1));
    ++first;
  }
  std::vector<std::string> inside;
  if (high < 0) {
    wholes(first, -1, inside);
  } else {
    if (first < high / scale.unit) wholes(first, high / scale.unit - 1, inside);
    out.push_back(digits_of(high / scale.unit) + optional(fraction(0, high % scale.unit)));
  }
  if (!inside.empty()) out.push_back(any_of(inside) + any_fraction);
}

// A bound in units of a scale.
struct Bound {
  int64_t units = 0;
  bool exact = true;       // else it lies between `units` and the next larger one
  bool too_large = false;  // 10^15 units or more, except 10^15 itself; `units` has its sign
};

Bound bound_of(const std::string& text, const Scale& scale) {
  const bool negative = text.starts_with("-");
  std::string digits;
  int64_t shift = scale.fraction;
  bool after_point = false;
  size_t at = negative ? 1 : 0;
  for (; at < text.size() && text[at] != 'e' && text[at] != 'E'; ++at) {
    if (text[at] == '.') {
      after_point = true;
      continue;
    }
    digits += text[at];
    shift -= after_point ? 1 : 0;
  }
  if (at < text.size()) {
    std::string exponent = text.substr(at + 1);
    const bool down = exponent.starts_with("-");
    if (down || exponent.starts_with("+")) exponent.erase(0, 1);
    const int64_t power = exponent.size() > 6 ? 1'000'000 : std::stoi(exponent);
    shift += down ? -power : power;
  }
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
  Bound out;
  if (shift < 0) {
    const size_t kept = digits.size() - std::min(digits.size(), static_cast<size_t>(-shift));
    out.exact = digits.find_first_not_of('0', kept) == std::string::npos;
    digits.resize(kept);
  } else if (!digits.empty()) {
    digits.append(static_cast<size_t>(std::min<int64_t>(shift, 20)), '0');
  }
  const bool is_limit = scale.fraction == 0 && digits == std::to_string(kLimit);  // as its neighbours, not doubtful
  out.too_large = digits.size() > 15 && !is_limit;
  if (out.too_large) digits = "1";
  for (const char digit : digits) out.units = out.units * 10 + (digit - '0');
  if (!negative) return out;
  out.units = -out.units - (out.exact ? 0 : 1);
  return out;
}

}  // namespace

Result<std::string> number_pattern(const NumberRange& range) {
  if (!range.least && !range.most) {
    const std::string integer = optional("-") + "(0|[1-9]" + spell_repeat("[0-9]", 0, kMostDigits - 1) + ")";
    if (range.integer) return integer;
    return integer + optional("\\." + spell_repeat("[0-9]", 1, 15)) +
           optional("[eE]" + optional("[+-]") + spell_repeat("[0-9]", 1, 2));
  }
  for (const Scale& scale : kScales) {
    std::optional<int64_t> least, most;
    const bool last = scale.fraction == 0;
    bool exact = true;
    if (range.least) {
      const Bound bound = bound_of(*range.least, scale);
      if (bound.too_large && (!last || bound.units > 0)) continue;
      exact &= bound.exact;
      least = bound.too_large ? -kLimit + 1 : bound.units;
      if (!bound.too_large && (!bound.exact || range.above_least)) ++*least;
    }
    if (range.most) {
      const Bound bound = bound_of(*range.most, scale);
      if (bound.too_large && (!last || bound.units < 0)) continue;
      exact &= bound.exact;
      most = bound.too_large ? kLimit - 1 : bound.units;
      if (!bound.too_large && bound.exact && range.below_most) --*most;
    }
    if (least && most && (*least >= kLimit || *most <= -kLimit)) break;  // all that is between them is too large
    const bool excluded = least && most && *least > *most;
    if (excluded && !range.integer && !exact) break;
    if (excluded) return std::string();
    std::vector<std::string> out;
    if (!most || *most >= 0)
      unsigned_numbers(std::max<int64_t>(least.value_or(0), 0), most.value_or(-1), range.integer, scale, out);
    if (!least || *least < 0) {
      std::vector<std::string> below;
      const int64_t nearest = most && *most < 0 ? -*most : 1;  // not -0
      if (!least || -*least >= nearest) unsigned_numbers(nearest, least ? -*least : -1, range.integer, scale, below);
      if (!below.empty()) out.push_back("-" + any_of(below));
    }
    return out.empty() ? std::string() : any_of(out);
  }
  return Error(Code::kBadInput, "its bounds are 10^15 or more from 0, or too close together to write a number between");
}

}  // namespace perigee
