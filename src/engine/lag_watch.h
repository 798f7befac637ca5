// LagWatch: decides when a rank that does not answer is lost. Pure: it is told how far each rank is, and the time.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"

namespace perigee {

struct RankTimeouts {
  // A rank is lost that does not move for so long after another rank has come further. Ranks of one group do the same
  // work at the same time, so this is far more than they are ever apart.
  double behind_s = 3;
  double step_s = 0;  // any rank is lost that works at one step for longer; 0: a step may take any time
  double end_s = 5;   // after a failure: how long the other ranks have to end before they are left behind
  // A start fails when a rank shows no sign of life for so long: no further weight read, no phase ended. A warm-up may
  // compile kernels, so this is minutes; 0: a start may take any time.
  double start_s = 600;
  // Outlives the ranks. A failed group ends by the system's clock all the same.
  const Clock* clock = &system_clock();
};

// How far a rank is.
struct RankProgress {
  int64_t steps = 0;     // that it has reported
  int64_t meetings = 0;  // with the other ranks that it has come to, where ranks exchange data within a step
  bool operator==(const RankProgress&) const = default;
  auto operator<=>(const RankProgress&) const = default;
};

class LagWatch {
 public:
  LagWatch(int32_t num_ranks, const RankTimeouts& timeouts)
      : timeouts_(timeouts), ranks_(static_cast<size_t>(num_ranks)) {}

  // A look every so often: how far each rank is, of `submitted` steps; `elapsed_s` have gone by since the last look.
  // The rank that is lost, the one that is furthest behind.
  std::optional<int32_t> look(std::span<const RankProgress> ranks, int64_t submitted, double elapsed_s) {
    RankProgress first;
    for (const RankProgress& rank : ranks)
      first = {std::max(first.steps, rank.steps), std::max(first.meetings, rank.meetings)};
    std::optional<int32_t> lost;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      const RankProgress& now = ranks[i];
      const bool behind = now.steps < first.steps || now.meetings < first.meetings;
      rank.behind_s = behind && now == rank.last ? rank.behind_s + elapsed_s : 0;
      rank.busy_s = now.steps < submitted && now.steps == rank.last.steps ? rank.busy_s + elapsed_s : 0;
      rank.last = now;
      const bool late = rank.behind_s > timeouts_.behind_s || (timeouts_.step_s > 0 && rank.busy_s > timeouts_.step_s);
      if (late && (!lost || now < ranks[static_cast<size_t>(*lost)])) lost = static_cast<int32_t>(i);
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
    RankProgress last;
    double behind_s = 0;  // since another rank has come further
    double busy_s = 0;    // since it has begun its step
  };
  const RankTimeouts timeouts_;
  std::vector<Rank> ranks_;
};

}  // namespace perigee
