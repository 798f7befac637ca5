#include "router/policy.h"

#include <algorithm>

namespace perigee {

// The next id after the last one, so that it stays fair where candidates come and go.
size_t Policy::next_in_turn(const std::vector<Candidate>& candidates) {
  const auto after = std::find_if(candidates.begin(), candidates.end(),
                                  [&](const Candidate& candidate) { return candidate.worker > last_worker_; });
  const size_t chosen = after == candidates.end() ? 0 : static_cast<size_t>(after - candidates.begin());
  last_worker_ = candidates[chosen].worker;
  return chosen;
}

size_t Policy::of_two(const std::vector<Candidate>& candidates) {
  const size_t first = rng_.below(candidates.size());
  const size_t second = (first + 1 + rng_.below(candidates.size() - 1)) % candidates.size();
  return candidates[second].open_requests < candidates[first].open_requests ? second : first;
}

// In turn among equals.
size_t Policy::least_loaded(const std::vector<Candidate>& candidates) {
  int64_t least = candidates.front().open_requests;
  for (const Candidate& candidate : candidates) least = std::min(least, candidate.open_requests);
  std::vector<Candidate> equals;
  std::vector<size_t> indices;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].open_requests != least) continue;
    equals.push_back(candidates[i]);
    indices.push_back(i);
  }
  return indices[next_in_turn(equals)];
}

size_t Policy::by_prefix(const std::vector<Candidate>& candidates, const PrefixBlocks& prompt) {
  size_t best = 0, best_blocks = 0;
  int64_t least = candidates.front().open_requests;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const size_t blocks = seen_.known_blocks(prompt, candidates[i].worker);
    least = std::min(least, candidates[i].open_requests);
    const bool better =
        blocks > best_blocks || (blocks == best_blocks && candidates[i].open_requests < candidates[best].open_requests);
    if (!better) continue;
    best = i;
    best_blocks = blocks;
  }
  const int64_t open = candidates[best].open_requests;
  const bool overloaded = open - least > config_.balance_abs_threshold &&
                          static_cast<double>(open) > config_.balance_rel_threshold * static_cast<double>(least);
  const bool seen = static_cast<double>(best_blocks) > config_.cache_threshold * static_cast<double>(prompt.size());
  const size_t chosen = seen && !overloaded ? best : least_loaded(candidates);
  seen_.remember(prompt, candidates[chosen].worker);
  return chosen;
}

size_t Policy::choose(const std::vector<Candidate>& candidates, const PrefixBlocks& prompt) {
  switch (config_.kind) {
    case PolicyKind::kRoundRobin: return next_in_turn(candidates);
    case PolicyKind::kRandom: return rng_.below(candidates.size());
    case PolicyKind::kPowerOfTwo: return candidates.size() == 1 ? 0 : of_two(candidates);
    case PolicyKind::kCacheAware: return by_prefix(candidates, prompt);
  }
  return 0;
}

}  // namespace perigee
