#include "text/stop_strings.h"

#include <algorithm>

namespace perigee {

bool StopStrings::Matcher::step(char c) {
  if (stop.empty()) return false;
  if (matched == stop.size()) matched = fallback[matched];
  while (matched > 0 && stop[matched] != c) matched = fallback[matched];
  if (stop[matched] == c) ++matched;
  return matched == stop.size();
}

StopStrings::StopStrings(std::vector<std::string> stops, bool include) : include_(include) {
  for (std::string& stop : stops) {
    std::vector<uint32_t> fallback(stop.size() + 1, 0);
    for (size_t i = 1; i < stop.size(); ++i) {
      uint32_t length = fallback[i];
      while (length > 0 && stop[length] != stop[i]) length = fallback[length];
      fallback[i + 1] = stop[length] == stop[i] ? length + 1 : 0;
    }
    matchers_.push_back({std::move(stop), std::move(fallback)});
  }
}

std::optional<size_t> StopStrings::step(char c) {
  std::optional<size_t> longest;
  for (size_t i = 0; i < matchers_.size(); ++i) {
    if (!matchers_[i].step(c)) continue;
    if (!longest || matchers_[i].stop.size() > matchers_[*longest].stop.size()) longest = i;
  }
  return longest;
}

std::optional<StopStrings::Found> StopStrings::push(std::string_view text, std::string& emit) {
  if (found_) return found_;
  for (const char c : text) {
    held_ += c;
    const std::optional<size_t> stop = step(c);
    if (!stop) continue;
    found_ = Found{*stop};
    if (!include_) held_.resize(held_.size() - matchers_[*stop].stop.size());
    emit += held_;
    held_.clear();
    return found_;
  }
  size_t keep = 0;
  for (const Matcher& matcher : matchers_) keep = include_ ? 0 : std::max<size_t>(keep, matcher.matched);
  emit.append(held_, 0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return std::nullopt;
}

void StopStrings::finish(std::string& emit) {
  emit += held_;
  held_.clear();
}

}  // namespace perigee
