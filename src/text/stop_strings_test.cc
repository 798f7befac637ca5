#include "text/stop_strings.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"

namespace perigee {
namespace {

struct Outcome {
  std::string text;
  std::optional<size_t> stop;
  bool operator==(const Outcome&) const = default;
};

// The definition: the stop string that ends first, the longest of several.
Outcome by_definition(const std::string& text, const std::vector<std::string>& stops, bool include) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<size_t> best;
    for (size_t i = 0; i < stops.size(); ++i) {
      const bool ends_here = !stops[i].empty() && std::string_view(text).substr(0, end).ends_with(stops[i]);
      if (ends_here && (!best || stops[i].size() > stops[*best].size())) best = i;
    }
    if (best) return {text.substr(0, include ? end : end - stops[*best].size()), best};
  }
  return {text, std::nullopt};
}

// Feeds pieces of at most `max_piece` bytes and checks that nothing is held back needlessly.
Outcome streamed(const std::string& text, const std::vector<std::string>& stops, bool include, Rng& rng,
                 size_t max_piece) {
  StopStrings matcher(stops, include);
  Outcome out;
  for (size_t pos = 0; pos < text.size();) {
    const size_t n = std::min(text.size() - pos, 1 + rng.below(max_piece));
    const auto found = matcher.push(std::string_view(text).substr(pos, n), out.text);
    pos += n;
    if (found) {
      out.stop = found->stop_index;
      std::string more;
      EXPECT_EQ(matcher.push("more", more)->stop_index, found->stop_index);
      EXPECT_EQ(more, "");
      break;
    }
    const std::string held = text.substr(out.text.size(), pos - out.text.size());
    const auto starts = [&](const std::string& stop) { return stop.size() > held.size() && stop.starts_with(held); };
    EXPECT_TRUE(held.empty() || std::any_of(stops.begin(), stops.end(), starts)) << held;
    EXPECT_TRUE(!include || held.empty()) << held;
  }
  matcher.finish(out.text);
  return out;
}

TEST(StopStrings, FindsTheFirstAtAnyCutting) {
  Rng rng(3);
  int found = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::string> stops(rng.below(4));
    for (std::string& stop : stops)
      for (uint64_t n = rng.below(6); n > 0; --n) stop += static_cast<char>('a' + rng.below(2));
    std::string text;
    for (uint64_t n = rng.below(30); n > 0; --n) text += static_cast<char>('a' + rng.below(3));
    const bool include = rng.chance(0.5);
    const Outcome want = by_definition(text, stops, include);
    ASSERT_EQ(streamed(text, stops, include, rng, 1), want) << text;
    ASSERT_EQ(streamed(text, stops, include, rng, 5), want) << text;
    found += want.stop.has_value();
  }
  EXPECT_GT(found, 5000);
}

TEST(StopStrings, HoldsBackOnlyWhatCouldBecomeAStop) {
  StopStrings matcher({"\n\nUser:", "STOP"}, false);
  std::string out;
  EXPECT_FALSE(matcher.push("hello ST", out));
  EXPECT_EQ(out, "hello ");
  EXPECT_FALSE(matcher.push("ART\n", out));
  EXPECT_EQ(out, "hello START");
  EXPECT_FALSE(matcher.push("\n\nUs", out));
  EXPECT_EQ(out, "hello START\n");
  const auto found = matcher.push("er: hi", out);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->stop_index, 0u);
  matcher.finish(out);
  EXPECT_EQ(out, "hello START\n");
}

// After "aabaaa" comes "b": what may still become the stop is not the "a" before it but "aa".
TEST(StopStrings, FallsBackToAShorterStart) {
  StopStrings matcher({"aabaaac"}, false);
  std::string out;
  ASSERT_TRUE(matcher.push("aabaaabaaac", out));
  EXPECT_EQ(out, "aaba");
}

// Quadratic matching would take minutes here.
TEST(StopStrings, IsLinear) {
  const std::string stop = std::string(20'000, 'a') + "b";
  StopStrings matcher({stop}, false);
  std::string out;
  for (int i = 0; i < 100'000; ++i) ASSERT_FALSE(matcher.push("aaaa", out));
  matcher.finish(out);
  EXPECT_EQ(out.size(), 400'000u);
}

}  // namespace
}  // namespace perigee
