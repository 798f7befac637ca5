// Few of many combinations: every two values of two factors occur together in one of them.
#pragma once

#include <cstddef>
#include <set>
#include <tuple>
#include <vector>

namespace perigee {

// A value of each factor, from 0 on.
using Combination = std::vector<int>;

// All combinations of factors that have so many values each, in lexicographic order.
inline std::vector<Combination> full_product(const std::vector<int>& num_values) {
  std::vector<Combination> all = {{}};
  for (const int count : num_values) {
    std::vector<Combination> longer;
    for (const Combination& begun : all)
      for (int value = 0; value < count; ++value) {
        longer.push_back(begun);
        longer.back().push_back(value);
      }
    all = std::move(longer);
  }
  return all;
}

// Greedy: always the first of those with the most pairs that are new.
inline std::vector<Combination> pairwise_cover(const std::vector<int>& num_values) {
  using Pair = std::tuple<size_t, int, size_t, int>;
  const std::vector<Combination> all = full_product(num_values);
  std::set<Pair> covered;
  const auto for_new_pairs = [&covered](const Combination& c, auto&& f) {
    for (size_t i = 0; i < c.size(); ++i)
      for (size_t j = i + 1; j < c.size(); ++j)
        if (const Pair pair{i, c[i], j, c[j]}; !covered.contains(pair)) f(pair);
  };
  std::vector<Combination> cover;
  for (;;) {
    const Combination* best = nullptr;
    int most = 0;
    for (const Combination& c : all) {
      int count = 0;
      for_new_pairs(c, [&](const Pair&) { ++count; });
      if (count > most) most = count, best = &c;
    }
    if (best == nullptr) return cover;
    std::vector<Pair> added;
    for_new_pairs(*best, [&](const Pair& pair) { added.push_back(pair); });
    covered.insert(added.begin(), added.end());
    cover.push_back(*best);
  }
}

}  // namespace perigee
