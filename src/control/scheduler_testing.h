// What the scheduler's tests share: a scheduler with a small pool, submissions in one line, results by hand. A test
// that cannot go on ends in a CHECK.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "control/scheduler.h"

namespace perigee {

inline SchedulerConfig small_config() {
  SchedulerConfig config;
  config.num_pages = 32;
  config.max_sequences = 8;
  config.max_step_tokens = 512;
  config.max_model_len = 1024;
  return config;
}

// Tokens first, first + 1, ...
inline std::vector<int32_t> tokens_from(int32_t first, int32_t count) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

class SchedulerHarness {
 public:
  explicit SchedulerHarness(const SchedulerConfig& config) : scheduler(config) {}

  struct Request {
    std::vector<int32_t> prompt;
    SamplingParams sampling = {};
    int32_t priority = 0;
    double deadline_s = 0;
    std::string salt = "";
    SequenceId leader = {};
    std::vector<ExtraKey> extra_keys = {};
    int32_t speculation_max_context = -1;
  };

  SequenceId submit(Request request) {
    Submit submit;
    submit.sequence = SequenceId(next_++);
    submit.prompt = std::make_shared<std::vector<int32_t>>(std::move(request.prompt));
    submit.sampling = std::make_shared<SamplingParams>(std::move(request.sampling));
    submit.priority = request.priority;
    submit.arrival_s = static_cast<double>(submit.sequence.value);
    submit.deadline_s = request.deadline_s;
    submit.cache_salt = request.salt;
    submit.leader = request.leader;
    submit.extra_keys = request.extra_keys;
    submit.speculation_max_context = request.speculation_max_context;
    const SequenceId sequence = submit.sequence;
    scheduler.submit(std::move(submit));
    return sequence;
  }
  SequenceId submit(int32_t num_prompt, int32_t max_tokens, int32_t priority = 0) {
    Request request{.prompt = tokens_from(1000 * next_, num_prompt)};  // no common prefix
    request.sampling.max_tokens = max_tokens;
    request.priority = priority;
    return submit(std::move(request));
  }

  StepPlan plan() {
    std::optional<StepPlan> plan = scheduler.next_plan(now_s);
    scheduler.check_integrity();
    CHECK(plan.has_value(), "nothing is planned");
    return *plan;
  }
  bool has_plan() { return scheduler.next_plan(now_s).has_value(); }

  StepResult answer(const StepPlan& plan, int32_t id = 7) const {
    StepResult result;
    result.step = plan.step;
    for (const PlanRow& row : plan.rows) {
      RowResult& added = result.rows.emplace_back();
      added.slot = row.slot;
      added.sequence = row.sequence;
      if (row.samples()) added.ids = {id};
      for (const CheckpointWrite& write : plan.checkpoints)
        if (write.slot == row.slot) added.checkpoints.push_back(write.boundary());
      if (!row.scores_prompt()) continue;
      for (int32_t i = 0; i < row.num_tokens(); ++i)
        added.prompt_logprobs.push_back({.id = row.position.least + 1 + i, .logprob = 0, .rank = 1, .top = {}});
    }
    return result;
  }

  // Applies a result and files the updates.
  void apply(const StepResult& result) {
    scheduler.apply(result);
    scheduler.check_integrity();
    collect();
  }
  void apply(const StepPlan& plan, int32_t id = 7) { apply(answer(plan, id)); }
  void step(int32_t id = 7) { apply(plan(), id); }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
  void run_to_end() {
    for (int i = 0; i < 5000 && !scheduler.idle(); ++i) step();
    CHECK(scheduler.idle(), "no end in sight");
  }

  void collect() {
    for (SequenceUpdate& update : scheduler.take_updates()) {
      Outcome& outcome = outcomes[update.sequence];
      CHECK(!outcome.finish, "sequence ", update.sequence, " goes on after its end");
      outcome.ids.insert(outcome.ids.end(), update.ids.begin(), update.ids.end());
      for (const TokenLogprobs& entry : update.prompt_logprobs) outcome.prompt_logprob_ids.push_back(entry.id);
      outcome.finish = update.finish;
      outcome.stop_id = update.stop_id;
      outcome.num_cached_tokens = update.num_cached_tokens;
      outcome.error = update.error;
    }
  }

  struct Outcome {
    std::vector<int32_t> ids;
    std::vector<int32_t> prompt_logprob_ids;
    std::optional<FinishReason> finish;
    int32_t stop_id = -1;
    int32_t num_cached_tokens = 0;
    std::string error;
  };

  Scheduler scheduler;
  double now_s = 1;
  std::map<SequenceId, Outcome> outcomes;

 private:
  int32_t next_ = 1;
};

// (sequence, tokens) of each row, in the plan's order.
inline std::vector<std::pair<int64_t, int32_t>> rows_of(const StepPlan& plan) {
  std::vector<std::pair<int64_t, int32_t>> rows;
  for (const PlanRow& row : plan.rows) rows.emplace_back(row.sequence.value, row.num_tokens());
  return rows;
}

}  // namespace perigee
