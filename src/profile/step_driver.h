// StepDriver: ranks without engine or server, given one plan after another of the same shape, two in flight as an
// engine has them. For `perigee bench step`. Where the ranks speculate, decode rows verify drafts, so that sequences
// move by as many tokens as are kept, of which the driver knows a range.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/queue.h"
#include "engine/executor.h"
#include "exec/rank_config.h"

namespace perigee {

struct StepShape {
  int32_t batch = 1;
  int32_t context = 1024;  // decode: tokens in the cache before the first step; prefill: new tokens of each sequence
  bool prefill = false;
  float temperature = 0;   // 0: greedy
  int32_t max_steps = 64;  // how many will ever run
};

class StepDriver {
 public:
  // Starts the ranks of `config`, whose limits on sequences and tokens it sets, and for decode fills the caches with
  // random prompts of `context` tokens. Errors: the ranks'; the cache or the model's positions are too few.
  // `observers` of the ranks outlive it.
  static Result<std::unique_ptr<StepDriver>> create(RankConfig config, const StepShape& shape,
                                                    std::vector<OpObserver*> observers = {});

  // Begins decode anew, of as many sequences as created at most, as if their first tokens were found in the cache: it
  // holds there whatever it does, and only what comes after the last whole block is computed.
  Status restart(int32_t batch, int32_t context);
  // Runs `count` steps; the seconds of each, which add up to the time from the first submission to the last result.
  // `eager`: decode steps outside of graphs, with the same logits.
  Result<std::vector<double>> run(int32_t count, bool eager = false);
  double last_result_s() const { return last_result_s_; }  // on the system clock
  // What the steps of the last run() gave: tokens of prompts computed, or ids that decode rows kept.
  int64_t run_tokens() const { return run_tokens_; }

 private:
  struct Done {
    double at_s = 0;
    bool finite = true;
    std::vector<int32_t> num_ids = {};  // of each row
    std::string device_lost = {};
  };
  StepDriver(const StepShape& shape, RankConfig& config);
  Status check_room(int32_t num_states) const;
  Status fill_caches(int32_t chunk_tokens);
  StepPlan next_plan(bool eager);
  void make_prompts();
  Status fill_as_if_cached();
  SequenceStart& start(int32_t sequence, StepPlan& plan);
  std::vector<Placement> state_at(int32_t sequence) const;
  void append_blocks(int32_t sequence, int32_t end, StepPlan& plan);
  void prefill_row(int32_t sequence, int32_t position, int32_t num_tokens, StepPlan& plan);
  Result<Done> wait();
  void begin_decode();
  void confirm(const Done& done);
  int32_t blocks_per_sequence() const;
  int32_t pages_per_sequence() const;  // of blocks, at the dcp index with most

  StepShape shape_;
  const int32_t num_drafts_;                    // of a row
  const int32_t dcp_size_;                      // blocks are dealt to the indices in turn
  BoundedQueue<Done> done_{kMaxPlansInFlight};  // outlives the ranks, which fill it
  std::vector<std::shared_ptr<const std::vector<int32_t>>> prompts_;
  std::vector<std::shared_ptr<const SamplingParams>> sampling_;
  std::vector<int32_t> num_blocks_;  // of each sequence
  int64_t step_ = 0, started_ = 0;
  std::vector<PositionRange> positions_;  // of each sequence's next decode row
  int64_t run_tokens_ = 0;
  double last_result_s_ = 0;
  std::unique_ptr<Executor> ranks_;
};

}  // namespace perigee
