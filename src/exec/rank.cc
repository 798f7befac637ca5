#include "exec/rank.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "ops/observed_ops.h"

namespace perigee {

Rank::Rank(RankConfig config, std::unique_ptr<RankDevice> device) : device_(std::move(device)) {
  parts_.config = std::move(config);
}

Result<std::unique_ptr<Rank>> Rank::load(RankConfig config, std::unique_ptr<RankDevice> device) {
  std::unique_ptr<Rank> rank(new Rank(std::move(config), std::move(device)));
  RankParts& parts = rank->parts_;
  ASSIGN_OR_RETURN(parts.ops, rank->device_->make_ops());
  if (parts.config.observer != nullptr) parts.observed = observe_ops(*parts.ops, *parts.config.observer);
  std::unique_ptr<Model> model;
  if (parts.config.make_model) {
    model = parts.config.make_model(*parts.ops);
  } else {
    parts.config.load.memory_bytes = rank->device_->weight_memory();
    parts.config.load.ranks = parts.config.shard();
    ASSIGN_OR_RETURN(model, load_model(parts.config.load, *parts.ops));
  }
  parts.set_model(std::move(model), parts.ops->activation_dtype());
  if (!parts.config.draft_model.empty()) {
    ASSIGN_OR_RETURN(auto draft,
                     Eagle3::load(parts.draft_options(), *parts.model, *parts.ops, parts.config.draft_layer));
    RETURN_IF_ERROR(parts.set_draft(std::move(draft), parts.ops->activation_dtype()));
  }
  parts.builder =
      std::make_unique<BatchBuilder>(*parts.model, parts.config.limits.deterministic, parts.config.dcp_index());
  ASSIGN_OR_RETURN(rank->max_pages_, rank->device_->warm_up(parts));
  return rank;
}

Status Rank::reserve(int32_t num_pages) {
  CHECK(num_pages <= max_pages_, num_pages, " pages of a rank that has room for ", max_pages_);
  parts_.num_pages = num_pages;
  const int64_t penalties = parts_.ops->on_device() ? 0 : parts_.model->info().vocab;  // a GPU counts for itself
  parts_.slots = std::make_unique<Slots>(parts_.config.limits.max_sequences, penalties, parts_.max_blocks(num_pages),
                                         parts_.config.shard(),
                                         DcpShare{.index = parts_.config.dcp_index(),
                                                  .size = parts_.config.limits.dcp_size,
                                                  .keeps_all = parts_.has_own_draft_cache()});
  return device_->reserve();
}

void Rank::run(RankPort& port) {
  prctl(PR_SET_TIMERSLACK, 1);  // else a sleep takes 50 us more, and every result of a GPU is as late
  constexpr auto kPoll = std::chrono::microseconds(2);
  while (!lost_ && !port.aborted()) {
    const StepPlan* plan = num_in_flight_ == 0 ? port.wait_for_plan() : port.next_plan();
    if (plan == nullptr && num_in_flight_ == 0) return;
    if (plan != nullptr && !port.aborted()) launch(*plan, port);
    if (num_in_flight_ == 0) continue;  // lost, or aborted
    if (device_->is_done(oldest()))
      report(port);
    else if (plan == nullptr)
      std::this_thread::sleep_for(kPoll);
  }
}

void Rank::launch(const StepPlan& plan, RankPort& port) {
  const double begin = system_clock().now_s();
  const Batch& batch = build(plan);
  device_->apply(plan, batch, turn_);
  build_us_.store((system_clock().now_s() - begin) * 1e6, std::memory_order_relaxed);
  if (plan.step.value == parts_.config.fault.step && parts_.config.rank == parts_.config.fault.rank) fail();
  device_->forward(plan, batch, turn_);
  for (size_t i = 0; i < plan.rows.size(); ++i)
    parts_.slots->advance(plan.rows[i].slot, batch.sequences[i].num_tokens, batch.sequences[i].commit_all);
  if (std::any_of(plan.rows.begin(), plan.rows.end(), [](const PlanRow& row) { return row.masked; })) {
    // A grammar advances by the results before, and the masks' memory is free once those are there.
    while (num_in_flight_ > 0) {
      if (!wait(port)) return;
      report(port);
      if (lost_) return;
    }
    device_->mask(plan, port.masks());
  }
  device_->sample(plan, turn_);
  in_flight_[static_cast<size_t>(turn_)] = &plan;
  turn_ = 1 - turn_;
  ++num_in_flight_;
}

const Batch& Rank::build(const StepPlan& plan) {
  for (const SequenceStart& start : plan.starts) parts_.slots->start(start);
  for (const BlockAppend& append : plan.appends) parts_.slots->append(append);
  const Batch& batch = parts_.builder->build(plan, *parts_.slots);
  CHECK(std::ssize(batch.logit_rows) <= parts_.max_rows_of_logits(), "step ", plan.step, " asks for ",
        batch.logit_rows.size(), " rows of logits, ", parts_.max_rows_of_logits(), " at most");
  return batch;
}

// For the oldest step in flight. False: aborted.
bool Rank::wait(RankPort& port) {
  while (!device_->is_done(oldest())) {
    if (port.aborted()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(2));
  }
  return true;
}

void Rank::report(RankPort& port) {
  const int32_t buffer = oldest();
  const StepPlan& plan = *in_flight_[static_cast<size_t>(buffer)];
  --num_in_flight_;
  result_.begin(plan);
  if (const Status collected = device_->collect(plan, buffer, result_); !collected.ok())
    return lose(plan.step, collected.error().message, port);
  port.masks().drop(plan.step);
  port.report(result_);
}

void Rank::lose(StepId step, const std::string& why, RankPort& port) {
  lost_ = true;
  num_in_flight_ = 0;
  result_ = {.step = step, .rows = {}, .device_lost = lost_in_step(why, step, parts_.config.rank)};
  port.report(result_);
  device_->log_loss();  // last
}

void Rank::fail() {
  if (parts_.config.fault.mode == RankFault::Mode::kError) return device_->fail();
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace perigee
