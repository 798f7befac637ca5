// Test only: small workers of the reference backend with made-up weights, and plans for one sequence in slot 0.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/queue.h"
#include "exec/worker.h"

namespace perigee {

inline WorkerConfig small_worker_config(const char* golden = "heads16") {
  WorkerConfig config;
  config.device = Device::kRef;
  config.load.path = std::string(PERIGEE_SOURCE_DIR "/tests/golden/") + golden;
  config.load.format = LoadFormat::kDummy;
  config.cache_bytes = 8 << 20;
  config.max_sequences = 2;
  return config;
}

// `results` must outlive it.
inline std::unique_ptr<Worker> make_worker(const WorkerConfig& config, BoundedQueue<StepResult>& results) {
  auto made = Worker::create(config, [&results](StepResult&& result) { results.push_reserved(std::move(result)); });
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

}  // namespace perigee
