// LagWatch: decides when a rank that does not answer is lost. Pure: it is told how far each rank is, and the time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace perigee {

struct RankTimeouts {
  // A rank is lost that reports nothing for so long after another rank has come further. Ranks of one group do the
  // same work at the same time, so this is far more than they are ever apart.
  double behind_s = 3;
  double step_s = 0;  // any rank is lost that works at one step for longer; 0: a step may take any time
  double end_s = 5;   // after a failure: how long the other ranks have to end before they are left behind
  // A start fails when a rank shows no sign of life for so long: no further weight read, no phase ended. A warm-up may
  // compile kernels, so this is minutes; 0: a start may take any time.
  double start_s = 600;
};

class LagWatch {
 public:
  LagWatch(int32_t num_ranks, const RankTimeouts& timeouts)
      : timeouts_(timeouts), ranks_(static_cast<size_t>(num_ranks)) {}

  // A look every so often: `steps` has the number of steps that each rank has reported so far, of `submitted`, and
  // `elapsed_s` have gone by since the last look. The rank that is lost, the one that is furthest behind.
  std::optional<int32_t> look(std::span<const int64_t> steps, int64_t submitted, double elapsed_s) {
    const int64_t first = *std::max_element(steps.begin(), steps.end());
    std::optional<int32_t> lost;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      const bool still = steps[i] == rank.steps;
      rank.steps = steps[i];
      rank.behind_s = still && steps[i] < first ? rank.behind_s + elapsed_s : 0;
      rank.busy_s = still && steps[i] < submitted ? rank.busy_s + elapsed_s : 0;
      const bool late = rank.behind_s > timeouts_.behind_s || (timeouts_.step_s > 0 && rank.busy_s > timeouts_.step_s);
      if (late && (!lost || steps[i] < steps[static_cast<size_t>(*lost)])) lost = static_cast<int32_t>(i);
    }
    return lost;
  }
  // How long the rank has not moved while it should have.
  double silent_s(int32_t rank) const {
    const Rank& r = ranks_[static_cast<size_t>(rank)];
    return std::max(r.behind_s, r.busy_s);
  }

 private:
  struct Rank {
    int64_t steps = 0;
    double behind_s = 0;  // since another rank has come further
    double busy_s = 0;    // since it has begun its step
  };
  const RankTimeouts timeouts_;
  std::vector<Rank> ranks_;
};

}  // namespace perigee
