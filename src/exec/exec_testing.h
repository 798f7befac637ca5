// Test only: a rank on a thread of its own, small ones with made-up weights, and plans for one sequence in slot 0.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/queue.h"
#include "exec/host_device.h"
#include "exec/rank.h"
#include "ops/observed_ops.h"

namespace perigee {

// What a group of one rank is to it: nothing else is needed to execute plans.
class RankThread {
 public:
  static Result<std::unique_ptr<RankThread>> start(const RankConfig& config, RankPort::OnResult on_result) {
    ASSIGN_OR_RETURN(auto device, make_host_device(config));
    ASSIGN_OR_RETURN(auto rank, Rank::load(config, std::move(device)));
    RETURN_IF_ERROR(rank->reserve(rank->max_pages()));
    return std::unique_ptr<RankThread>(new RankThread(std::move(rank), std::move(on_result)));
  }
  ~RankThread() {
    port_.close();
    thread_.join();
  }
  void submit(StepPlan plan) { CHECK(port_.send(plans_.emplace_back(std::move(plan)))); }
  void set_masks(StepMasks masks) { port_.send(std::make_shared<const StepMasks>(std::move(masks))); }
  const RankParts& parts() const { return rank_->parts(); }

 private:
  RankThread(std::unique_ptr<Rank> rank, RankPort::OnResult on_result)
      : rank_(std::move(rank)), port_(abort_, std::move(on_result)), thread_([this] { rank_->run(port_); }) {}

  std::unique_ptr<Rank> rank_;
  const std::atomic<bool> abort_{false};
  std::deque<StepPlan> plans_;  // at addresses that stay
  RankPort port_;
  std::thread thread_;
};

inline RankConfig small_rank_config(const char* golden = "heads16") {
  RankConfig config;
  config.device = Device::kRef;
  config.load.path = std::string("tests/golden/") + golden;
  config.load.format = LoadFormat::kDummy;
  config.cache_bytes = 8 << 20;
  config.limits.max_sequences = 2;
  return config;
}

// `results` must outlive it.
inline std::unique_ptr<RankThread> start_rank(const RankConfig& config, BoundedQueue<StepResult>& results) {
  auto made = RankThread::start(config, [&results](StepResult& result) { results.push_reserved(std::move(result)); });
  CHECK(made.ok(), made.error().message);
  return std::move(*made);
}

inline std::vector<int32_t> test_prompt() {
  return {30, 31, 32, 33, 34};
}

// Step 0: the whole prompt, of at most a block, which ends with a sampled id.
inline StepPlan prompt_plan(const SamplingParams& sampling, std::vector<int32_t> prompt = test_prompt()) {
  StepPlan plan{.step = StepId(0), .starts = {}, .appends = {}, .rows = {}, .tokens = prompt};
  SequenceStart& start = plan.starts.emplace_back();
  start.slot = SlotId(0);
  start.sequence = SequenceId(1);
  start.num_prompt_tokens = static_cast<int32_t>(prompt.size());
  start.tokens = std::make_shared<const std::vector<int32_t>>(std::move(prompt));
  start.sampling = std::make_shared<const SamplingParams>(sampling);
  plan.appends.push_back({.slot = SlotId(0), .block_index = 0, .place = {PageId(0)}});
  PlanRow& row = plan.rows.emplace_back();
  row.slot = SlotId(0);
  row.sequence = SequenceId(1);
  row.work =
      Prefill{.num_tokens = start.num_prompt_tokens, .sample = true, .prompt_logprobs = sampling.prompt_logprobs >= 0};
  return plan;
}

// Step n runs the n-th sampled id.
inline StepPlan decode_plan(int32_t step) {
  StepPlan plan{.step = StepId(step), .starts = {}, .appends = {}, .rows = {}, .tokens = {}};
  PlanRow& row = plan.rows.emplace_back();
  row.slot = SlotId(0);
  row.sequence = SequenceId(1);
  row.position = PositionRange::at(static_cast<int32_t>(test_prompt().size()) + step - 1);
  row.work = Decode();
  plan.num_decode_rows = 1;
  return plan;
}

// Of a rank with an observer: how often it has waited for others before a collective.
class WaitCounter final : public OpObserver {
 public:
  void begin_step() override {}
  bool wants_costs() const override { return false; }
  void cost(OpCost&&) override {}
  void begin_op() override {}
  void end_op() override {}
  void launched(const char*) override {}
  bool wants_waits() const override { return true; }
  void end_wait() override { ++count; }
  int count = 0;  // read when the rank has ended
};

}  // namespace perigee
