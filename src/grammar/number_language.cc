#include "grammar/number_language.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace perigee {
namespace {

// A number as digits * 10^-fraction.
struct Decimal {
  int64_t digits = 0;
  int fraction = 0;
};

Result<Decimal> decimal_of(const std::string& text) {
  const Error unfit(Code::kBadInput, "supported are positive numbers of at most 12 digits");
  Decimal out;
  bool after_point = false;
  size_t at = 0;
  for (; at < text.size() && text[at] != 'e' && text[at] != 'E'; ++at) {
    if (text[at] == '.') {
      after_point = true;
      continue;
    }
    if (text[at] < '0' || text[at] > '9' || out.digits >= 100'000'000'000) return unfit;
    out.digits = out.digits * 10 + (text[at] - '0');
    out.fraction += after_point ? 1 : 0;
  }
  if (at < text.size()) {
    if (text.size() - at > 4) return unfit;
    out.fraction -= std::stoi(text.substr(at + 1));
  }
  for (; out.fraction > 0 && out.digits % 10 == 0; --out.fraction) out.digits /= 10;
  for (; out.fraction < 0 && out.digits < 1'000'000'000'000; ++out.fraction) out.digits *= 10;
  if (out.digits == 0 || out.fraction < 0 || out.fraction > 12) return unfit;
  return out;
}

// -?[0-9]+ of multiples of factor * 10^zeros. A state is the number without the zeros at its end, of which there are k,
// up to `zeros`, modulo the factor.
Language whole_multiples(int64_t factor, int zeros) {
  const auto state_of = [&](int64_t rest, int k) { return static_cast<int32_t>(2 + rest * (zeros + 1) + k); };
  std::vector<Language::State> states(static_cast<size_t>(2 + factor * (zeros + 1)));
  const auto add_digits = [&](size_t from, const auto& next) {
    for (uint32_t digit = 0; digit < 10; ++digit) states[from].edges.push_back({'0' + digit, '0' + digit, next(digit)});
  };
  const auto first = [&](uint32_t digit) { return digit == 0 ? state_of(0, zeros) : state_of(digit % factor, 0); };
  states[0].edges.push_back({'-', '-', 1});
  add_digits(0, first);
  add_digits(1, first);
  for (int64_t rest = 0; rest < factor; ++rest) {
    int64_t power = 10;  // 10^(k + 1), modulo the factor
    for (int k = 0; k <= zeros; ++k, power = power * 10 % factor) {
      const size_t at = static_cast<size_t>(state_of(rest, k));
      states[at].accepts = rest == 0 && k == zeros;
      add_digits(at, [&](uint32_t digit) {
        if (digit != 0) return state_of((rest * power + digit) % factor, 0);
        return k < zeros ? state_of(rest, k + 1) : state_of(rest * 10 % factor, k);
      });
    }
  }
  return Language::of_states(std::move(states));
}

// Whether a division in double precision finds the multiples of `unit`, moved by `offset`, to be multiples of the step.
bool divides(int64_t unit, double offset, double step) {
  for (int64_t times = 1; times <= 4096; ++times) {
    const double quotient = (static_cast<double>(unit * times) + offset) / step;
    if (quotient != std::floor(quotient)) return false;
  }
  return true;
}

int64_t scale_of(const Decimal& decimal) {
  int64_t scale = 1;
  for (int i = 0; i < decimal.fraction; ++i) scale *= 10;
  return scale;
}

int64_t least_whole_multiple(const Decimal& decimal) {
  return decimal.digits / std::gcd(decimal.digits, scale_of(decimal));
}

Language of_texts(const std::vector<std::string>& texts) {
  std::vector<Language::State> states(1);
  for (const std::string& text : texts) {
    size_t at = 0;
    for (const char c : text) {
      const auto byte = static_cast<uint32_t>(static_cast<uint8_t>(c));
      const auto known = std::find_if(states[at].edges.begin(), states[at].edges.end(),
                                      [&](const auto& edge) { return edge.low == byte; });
      if (known != states[at].edges.end()) {
        at = static_cast<size_t>(known->to);
        continue;
      }
      states[at].edges.push_back({byte, byte, static_cast<int32_t>(states.size())});
      at = states.size();
      states.emplace_back();
    }
    states[at].accepts = true;
  }
  return Language::of_states(std::move(states));
}

}  // namespace

Result<Language> multiples_between(const std::string& step, double least, double most) {
  constexpr double kMostListed = 1000, kMostValue = 1e15;
  ASSIGN_OR_RETURN(const Decimal decimal, decimal_of(step));
  const int64_t unit = least_whole_multiple(decimal);
  const double value = std::stod(step), first = std::ceil(least / static_cast<double>(unit));
  const double last = std::floor(most / static_cast<double>(unit));
  if (std::max(std::abs(least), std::abs(most)) > kMostValue || last - first >= kMostListed)
    return Error(Code::kBadInput,
                 "at most 300 is supported, without the zeros at its end, or 1,000 multiples between bounds");
  std::vector<std::string> texts;
  for (auto times = static_cast<int64_t>(first); times <= static_cast<int64_t>(last); ++times) {
    const double quotient = static_cast<double>(times * unit) / value;
    if (quotient == std::floor(quotient)) texts.push_back(std::to_string(times * unit));
  }
  return of_texts(texts);
}

Result<Language> multiples_of(const std::string& step, bool fractions) {
  ASSIGN_OR_RETURN(const Decimal decimal, decimal_of(step));
  const int64_t scale = scale_of(decimal), unit = least_whole_multiple(decimal);
  const double value = std::stod(step);
  if (!divides(unit, 0, value)) return Error(Code::kBadInput, "its multiples cannot be told apart in double precision");
  int zeros = 0;
  int64_t factor = unit;
  for (; factor % 10 == 0; factor /= 10) ++zeros;
  constexpr int64_t kMostFactor = 300;
  if (factor > kMostFactor)
    return Error(Code::kBadInput,
                 "at most 300 is supported, without the zeros at its end, or 1,000 multiples between bounds");
  Language out = whole_multiples(factor, zeros);
  if (!fractions || unit != 1) return out;
  for (const auto& [parts, regex] : {std::pair{2, "^-?[0-9]+\\.5$"}, {4, "^-?[0-9]+\\.(25|75)$"}}) {
    if (scale % (parts * decimal.digits) != 0 || !divides(1, 1.0 / parts, value)) continue;
    ASSIGN_OR_RETURN(const Language more, Language::of_pattern(regex, Reading::kNarrow));
    ASSIGN_OR_RETURN(out, out.united(more));
  }
  return out;
}

std::string spellings_of_number(std::string number) {
  if (number.find('.') != std::string::npos) {
    number.resize(number.find_last_not_of('0') + 1);
    if (number.back() == '.') number.pop_back();
  }
  if (number.find_first_not_of("-0") == std::string::npos) return "-?0(\\.0+)?";
  const size_t point = number.find('.');
  if (point == std::string::npos) return number + "(\\.0+)?";
  return number.replace(point, 1, "\\.") + "0*";
}

}  // namespace perigee
