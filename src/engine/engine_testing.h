// What the engine's tests share: hands without a model, which keep the plans they get until the test answers, and a
// sink that checks what every sink is promised: chunks of each choice up to exactly one with `finish`.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/eventually.h"
#include "engine/engine.h"

namespace perigee {

// The plans of one engine, and the way back. Shared by the test and the executor, so that it outlives the engine.
class Hands {
 public:
  // Called on the engine's thread for each plan, in place of keeping it for next().
  std::function<void(const StepPlan&)> on_plan;
  double build_us = 0;  // what each batch is said to have taken

  void take(StepPlan plan) {
    {
      std::lock_guard lock(mutex_);
      ++num_plans_;
      for (const SequenceStart& start : plan.starts) seeds_[start.sequence.value] = start.sampling->seed;
      if (!on_plan) plans_.push_back(plan);
    }
    if (on_plan) on_plan(plan);
  }
  void take(StepMasks masks) {
    std::lock_guard lock(mutex_);
    masks_.push_back(std::move(masks));
  }
  std::vector<StepMasks> masks() const {  // so far
    std::lock_guard lock(mutex_);
    return masks_;
  }
  StepPlan next() {
    CHECK(eventually([&] { return num_kept() > 0; }), "no plan came");
    std::lock_guard lock(mutex_);
    StepPlan plan = std::move(plans_.front());
    plans_.pop_front();
    return plan;
  }
  size_t num_kept() const {
    std::lock_guard lock(mutex_);
    return plans_.size();
  }
  int num_plans() const {
    std::lock_guard lock(mutex_);
    return num_plans_;
  }
  std::map<int64_t, uint64_t> seeds() const {  // by sequence
    std::lock_guard lock(mutex_);
    return seeds_;
  }

  void answer(const StepPlan& plan, int32_t id = 7) {
    StepResult result{.step = plan.step, .rows = {}};
    for (const PlanRow& row : plan.rows) {
      RowResult& added = result.rows.emplace_back(RowResult{.slot = row.slot, .sequence = row.sequence});
      if (row.samples()) added.ids = {id};
    }
    on_step({.plan = plan, .result = std::move(result)});
  }
  // Answers what comes until `condition` holds.
  template <typename Condition>
  [[nodiscard]] bool answer_until(Condition condition) {
    return eventually([&] {
      if (num_kept() > 0) answer(next());
      return condition();
    });
  }
  void lose_device(const StepPlan& plan) {
    on_step({.plan = {}, .result = {.step = plan.step, .rows = {}, .device_lost = "a test"}});
  }

  OnStep on_step;

 private:
  mutable std::mutex mutex_;
  std::deque<StepPlan> plans_;
  std::vector<StepMasks> masks_;
  int num_plans_ = 0;
  std::map<int64_t, uint64_t> seeds_;
};

class NoRanks final : public Executor {
 public:
  explicit NoRanks(std::shared_ptr<Hands> hands) : hands_(std::move(hands)) {}
  void submit(Step step) override { hands_->take(std::move(step.plan)); }
  void set_masks(StepMasks masks) override { hands_->take(std::move(masks)); }
  const ModelInfo& model() const override { return model_; }
  int32_t num_pages() const override { return 64; }
  int32_t state_pages() const override { return 0; }
  double last_build_us() const override { return hands_->build_us; }

 private:
  ModelInfo model_ = {.vocab = 64, .max_positions = 4096};
  std::shared_ptr<Hands> hands_;
};

inline std::unique_ptr<Engine> engine_with(const std::shared_ptr<Hands>& hands, EngineConfig config = {}) {
  auto engine = Engine::create(config, [&](const EngineConfig&, OnStep on_step) {
    hands->on_step = std::move(on_step);
    return Result<std::unique_ptr<Executor>>(std::make_unique<NoRanks>(hands));
  });
  CHECK(engine.ok(), engine.error().message);
  return std::move(*engine);
}

// Of one request.
class Chunks {
 public:
  OutputSink sink() {
    return [this](OutputChunk&& chunk) {
      std::lock_guard lock(mutex_);
      OutputChunk& known = choices_[chunk.choice];
      CHECK(!known.finish, "choice ", chunk.choice, " goes on after its end");
      chunk.ids.insert(chunk.ids.begin(), known.ids.begin(), known.ids.end());
      known = std::move(chunk);
    };
  }
  OutputChunk choice(int32_t i = 0) const {  // ids of all chunks, the rest of the last one
    std::lock_guard lock(mutex_);
    const auto found = choices_.find(i);
    return found == choices_.end() ? OutputChunk() : found->second;
  }
  int num_finished() const {
    std::lock_guard lock(mutex_);
    int count = 0;
    for (const auto& [i, chunk] : choices_) count += chunk.finish ? 1 : 0;
    return count;
  }
  [[nodiscard]] bool wait(int count = 1) const {
    return eventually([&] { return num_finished() >= count; });
  }

 private:
  mutable std::mutex mutex_;
  std::map<int32_t, OutputChunk> choices_;
};

inline EngineRequest request_for(int32_t max_tokens, int32_t n = 1) {
  EngineRequest request;
  request.prompt = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{1, 2, 3});
  request.sampling.max_tokens = max_tokens;
  request.n = n;
  return request;
}

}  // namespace perigee
