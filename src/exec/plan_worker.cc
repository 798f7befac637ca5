#include "exec/plan_worker.h"

#include <algorithm>

#include "base/clock.h"
#include "ops/observed_ops.h"

namespace perigee {
namespace {

// How many pages the cache holds; an error when they are too few for any work.
Result<int32_t> count_pages(int64_t cache_bytes, const CacheLayout& layout) {
  const int64_t pages = cache_bytes / layout.page_bytes();
  const int64_t least = 2 + layout.state_pages();
  if (pages < least)
    return bad_input(
        str_cat("the cache of ", cache_bytes, " bytes holds ", pages, " pages of ", layout.page_bytes(),
                " bytes; raise it to at least ", least, ": two blocks and a recurrent state of ", layout.state_pages()),
        "kv-cache-memory-bytes");
  return static_cast<int32_t>(std::min<int64_t>(pages, INT32_MAX));
}

}  // namespace

void PlanWorker::submit(StepPlan plan) {
  CHECK(plans_.try_push(std::move(plan)), "more than ", kMaxPlansInFlight, " plans in flight");
}

Status PlanWorker::load(std::unique_ptr<Ops> ops, bool count_penalties) {
  ops_ = std::move(ops);
  if (config_.observer != nullptr) observed_ = observe_ops(*ops_, *config_.observer);
  ASSIGN_OR_RETURN(model_, load_model(config_.load, *ops_));
  layout_ = model_->cache_layout(config_.fp8_cache ? DType::kF8E4M3 : ops_->activation_dtype());
  ASSIGN_OR_RETURN(num_pages_, count_pages(config_.cache_bytes, layout_));
  slots_ = std::make_unique<Slots>(config_.max_sequences, count_penalties ? model_->info().vocab : 0, max_blocks());
  builder_ = std::make_unique<BatchBuilder>(*model_, config_.deterministic);
  return {};
}

int32_t PlanWorker::max_blocks() const {
  return static_cast<int32_t>(std::min<int64_t>(num_pages_, model_->info().max_positions / kBlockTokens + 1));
}

void PlanWorker::begin() {
  thread_ = std::thread([this] { run(); });
}

void PlanWorker::end() {
  plans_.close();
  masks_.close();
  if (thread_.joinable()) thread_.join();
}

void PlanWorker::lose_device(StepId step, const std::string& why) const {
  on_result_({.step = step, .rows = {}, .device_lost = str_cat(why, ", in step ", step, " of rank 0")});
}

const Batch& PlanWorker::build(const StepPlan& plan) {
  const double begin = system_clock().now_s();
  for (const SequenceStart& start : plan.starts) slots_->start(start);
  for (const BlockAppend& append : plan.appends) slots_->append(append);
  const Batch& batch = builder_->build(plan, *slots_);
  build_us_.store((system_clock().now_s() - begin) * 1e6, std::memory_order_relaxed);
  return batch;
}

}  // namespace perigee
