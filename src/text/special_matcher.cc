#include "text/special_matcher.h"

#include <algorithm>

namespace perigee {

SpecialMatcher::SpecialMatcher(const std::vector<std::string_view>& strings) {
  for (size_t i = 0; i < strings.size(); ++i) {
    sorted_.push_back({std::string(strings[i]), static_cast<int32_t>(i)});
    first_bytes_[static_cast<uint8_t>(strings[i][0])] = true;
  }
  std::sort(sorted_.begin(), sorted_.end(), [](const Entry& a, const Entry& b) { return a.text < b.text; });
}

SpecialMatcher::Range SpecialMatcher::narrow(Range range, size_t depth, char byte) const {
  // An entry that ends at `depth` sorts first and compares as below every byte.
  const auto key = [depth](const Entry& e) { return depth < e.text.size() ? static_cast<uint8_t>(e.text[depth]) : -1; };
  const int want = static_cast<uint8_t>(byte);
  const auto begin = sorted_.begin() + static_cast<ptrdiff_t>(range.low);
  const auto end = sorted_.begin() + static_cast<ptrdiff_t>(range.high);
  const auto low = std::partition_point(begin, end, [&](const Entry& e) { return key(e) < want; });
  const auto high = std::partition_point(low, end, [&](const Entry& e) { return key(e) == want; });
  return {static_cast<size_t>(low - sorted_.begin()), static_cast<size_t>(high - sorted_.begin())};
}

std::optional<SpecialMatcher::Match> SpecialMatcher::match_at(std::string_view text, size_t pos) const {
  std::optional<Match> longest;
  Range range{0, sorted_.size()};
  for (size_t depth = 0; pos + depth < text.size(); ++depth) {
    range = narrow(range, depth, text[pos + depth]);
    if (range.low == range.high) break;
    const Entry& first = sorted_[range.low];
    if (first.text.size() == depth + 1) longest = Match{pos, depth + 1, first.index};
  }
  return longest;
}

std::optional<SpecialMatcher::Match> SpecialMatcher::find(std::string_view text, size_t from) const {
  for (size_t pos = from; pos < text.size(); ++pos) {
    if (!can_begin(text[pos])) continue;
    if (auto match = match_at(text, pos)) return match;
  }
  return std::nullopt;
}

bool SpecialMatcher::could_complete(std::string_view text, size_t pos) const {
  Range range{0, sorted_.size()};
  for (size_t i = pos; i < text.size() && range.low < range.high; ++i) range = narrow(range, i - pos, text[i]);
  return range.low < range.high;
}

}  // namespace perigee
