// Simulation: the real scheduler, fake workers, a virtual clock and a seed.
//
// One seed decides everything: whether the model is recurrent, pool sizes, limits, prompts (which share prefixes),
// salts, n > 1, priorities, deadlines, cancellations, and when each row runs and each result arrives. After every event
// the invariants INV-1 ... INV-11 of docs/invariants.md are checked as far as they apply to one engine; all that
// happens is folded into one hash, so that a replay can be compared.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sim/harness.h"

namespace perigee::sim {

// Ranks that execute every plan, each at its own pace, and the most drafts of a verify row. Ranks may be late by as
// long as plans may wait, and one may be lost.
struct Shape {
  int32_t num_ranks = 1, num_drafts = 0;
  int32_t max_dcp = 1;  // a seed draws its dcp size: a power of two, this at most. A rank is then a group of so many
};

class Simulation final : Harness {
 public:
  explicit Simulation(uint64_t seed, const Shape& shape = {});
  Counts run();  // ends the process when an invariant does not hold

 private:
  struct Drawn {
    Rng rng;  // as the rest of the simulation goes on with it
    SchedulerConfig config;
  };
  static Drawn draw(uint64_t seed, const Shape& shape);
  Simulation(uint64_t seed, const Shape& shape, const Drawn& drawn);
  static void draw_recurrent(Rng& rng, SchedulerConfig& config, int32_t& num_blocks);
  static void draw_dcp(uint64_t seed, int32_t max_dcp, int32_t num_blocks, SchedulerConfig& config);
  void tick();
  void submit_some();
  void submit_one(const std::shared_ptr<const std::vector<int32_t>>& prompt, const std::string& salt,
                  SequenceId leader);
  std::shared_ptr<const std::vector<int32_t>> draw_prompt();
  void draw_next_turn(std::shared_ptr<const std::vector<int32_t>>& prompt, std::string& salt);
  std::shared_ptr<const SamplingParams> draw_sampling(int32_t num_prompt);
  int32_t draw_length();
  void cancel_some();
  void lose_rank();
  bool queue_is_full() const { return scheduler_.gauges().waiting >= queue_length_; }

  bool lost_ = false;
  int32_t num_to_submit_ = 0, longest_prompt_ = 0;
  int32_t queue_length_ = 0;  // the engine in front lets no more in
  double arrival_chance_ = 0, cancel_chance_ = 0, deliver_chance_ = 0, long_outputs_chance_ = 0, turn_chance_ = 0;
};

}  // namespace perigee::sim
