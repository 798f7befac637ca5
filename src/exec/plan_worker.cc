#include "exec/plan_worker.h"

#include <algorithm>

#include "base/clock.h"
#include "ops/observed_ops.h"

namespace perigee {

void PlanWorker::submit(StepPlan plan) {
  CHECK(plans_.try_push(std::move(plan)), "more than ", kMaxPlansInFlight, " plans in flight");
}

Status PlanWorker::load(std::unique_ptr<Ops> ops) {
  ops_ = std::move(ops);
  if (config_.observer != nullptr) observed_ = observe_ops(*ops_, *config_.observer);
  if (config_.make_model) {
    model_ = config_.make_model(*ops_);
  } else {
    ASSIGN_OR_RETURN(model_, load_model(config_.load, *ops_));
  }
  layout_ = model_->cache_layout(config_.fp8_cache ? DType::kF8E4M3 : ops_->activation_dtype());
  builder_ = std::make_unique<BatchBuilder>(*model_, config_.deterministic);
  return {};
}

Status PlanWorker::set_pool(int64_t bytes) {
  const int64_t pages = bytes / layout_.page_bytes();
  if (pages < least_pages())
    return bad_input(str_cat("the cache of ", bytes, " bytes holds ", pages, " pages of ", layout_.page_bytes(),
                             " bytes; raise --kv-cache-memory-bytes to at least ", least_pages() * layout_.page_bytes(),
                             ": two blocks", state_pages() > 0 ? " and a recurrent state" : ""),
                     "kv-cache-memory-bytes");
  num_pages_ = static_cast<int32_t>(std::min<int64_t>(pages, INT32_MAX));
  const int32_t penalties = ops_->on_device() ? 0 : model_->info().vocab;  // a GPU counts what they need itself
  slots_ = std::make_unique<Slots>(config_.max_sequences, penalties, max_blocks());
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
  CHECK(std::ssize(batch.logit_rows) <= most_logit_rows(), "step ", plan.step, " asks for ", batch.logit_rows.size(),
        " rows of logits, ", most_logit_rows(), " at most");
  build_us_.store((system_clock().now_s() - begin) * 1e6, std::memory_order_relaxed);
  return batch;
}

}  // namespace perigee
