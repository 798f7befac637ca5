// Policies: which of the workers that can take a request takes it. Pure, except that a policy remembers its own
// choices.
#pragma once

#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "router/prefix_map.h"

namespace perigee {

enum class PolicyKind {
  kRoundRobin,
  kRandom,
  kPowerOfTwo,  // of two at random the one with fewer open requests
  // The one that has seen most of the prompt's beginning, unless that is little or it has far more open requests than
  // another; else the one with the fewest open requests.
  kCacheAware,
};

struct PolicyConfig {
  PolicyKind kind = PolicyKind::kCacheAware;
  double cache_threshold = 0.3;        // the part of the prompt that must have been seen
  int64_t balance_abs_threshold = 64;  // how many more open requests than the least loaded one are far more:
  double balance_rel_threshold = 1.5;  // more than both
  size_t max_prefix_pairs = 1u << 18;  // about 16 MB
  uint64_t seed = 0;
};

struct Candidate {
  uint64_t worker = 0;  // an id, ascending in a list of candidates
  int64_t open_requests = 0;
};

class Policy {
 public:
  explicit Policy(const PolicyConfig& config) : config_(config), rng_(config.seed), seen_(config.max_prefix_pairs) {}

  bool reads_prompts() const { return config_.kind == PolicyKind::kCacheAware; }
  // An index into `candidates`, which are at least one. `prompt` counts where reads_prompts().
  size_t choose(const std::vector<Candidate>& candidates, const PrefixBlocks& prompt);

 private:
  size_t next_in_turn(const std::vector<Candidate>& candidates);
  size_t of_two(const std::vector<Candidate>& candidates);
  size_t by_prefix(const std::vector<Candidate>& candidates, const PrefixBlocks& prompt);
  size_t least_loaded(const std::vector<Candidate>& candidates);

  const PolicyConfig config_;
  Rng rng_;
  PrefixMap seen_;
  uint64_t last_worker_ = 0;  // of round robin; workers count from 1
};

}  // namespace perigee
