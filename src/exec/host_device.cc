#include "exec/host_device.h"

#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "base/cgroup.h"
#include "base/log.h"
#include "base/memory_text.h"
#include "exec/eagle_drafter.h"
#include "exec/host_sampling.h"
#include "exec/ngram_drafter.h"

namespace perigee {

Result<RankParts> size_host_parts(const RankConfig& config) {
  return size_parts(config, *(config.device == Device::kRef ? make_ref_sizes() : make_cpu_sizes(config.quantization)));
}

int64_t host_memory_bytes() {
  int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  bytes = std::min(bytes, cgroup_memory_bytes());
  rlimit shell{};
  if (getrlimit(RLIMIT_AS, &shell) == 0 && shell.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, static_cast<int64_t>(shell.rlim_cur));
  return bytes;
}

namespace {

class HostDevice final : public RankDevice {
 public:
  explicit HostDevice(const RankConfig& config) : config_(config) {}

  Result<std::unique_ptr<Ops>> make_ops() override;
  int64_t weight_memory() const override { return host_memory_bytes() / config_.size - config_.cache_bytes; }
  Result<int32_t> warm_up(RankParts& parts) override;
  Status reserve() override;
  uint8_t* pages() override { return pool_memory_.data(); }
  void apply(const StepPlan& plan, const Batch& batch, int32_t buffer) override;
  void forward(const StepPlan& plan, const Batch& batch, int32_t buffer) override;
  void mask(const StepPlan& plan, MaskBox& masks) override;
  void sample(const StepPlan& plan, int32_t buffer) override;
  bool is_done(int32_t) override { return true; }
  Status collect(const StepPlan& plan, int32_t buffer, StepResult& result) override;
  void fail() override { status_ = Error(Code::kDeviceLost, "a test's fault"); }
  void log_loss() override {}

 private:
  void start_state(const SequenceStart& start);
  PagePool pool();
  void copy_page(const uint8_t* from, uint8_t* to) {
    parts_->ops->copy(to, from, static_cast<size_t>(parts_->layout.page_bytes()));
  }
  uint8_t* page(int32_t id) { return pool_memory_.data() + id * parts_->layout.page_bytes(); }

  const RankConfig config_;
  RankParts* parts_ = nullptr;
  Buffer pool_memory_, ring_memory_;
  std::vector<uint8_t> zero_page_;  // recurrent models
  std::unique_ptr<HostSampling> sampling_;
  std::unique_ptr<Drafter> drafter_;  // null without speculation
  Status status_;
  // Of the step under way:
  const Batch* batch_ = nullptr;
  ModelOutput output_;
  MaskBox::Message step_masks_;  // null: of no plan with masked rows
  HostSampling::Masks masks_;    // of that
  StepResult result_;
};

Result<std::unique_ptr<Ops>> HostDevice::make_ops() {
  if (config_.device == Device::kRef) return make_ref_ops(*config_.comm, *config_.dcp_comm);
  const int threads =
      config_.load.num_threads > 0 ? config_.load.num_threads : std::max(1, available_cores() / config_.size);
  auto ops = make_cpu_ops({.num_threads = threads,
                           .isa = config_.isa,
                           .comm = *config_.comm,
                           .dcp = *config_.dcp_comm,
                           .quantization = config_.quantization});
  if (ops.ok()) log_info("backend ", (*ops)->name(), ", ", threads, threads == 1 ? " thread" : " threads");
  return ops;
}

Result<int32_t> HostDevice::warm_up(RankParts& parts) {
  parts_ = &parts;
  sampling_ = std::make_unique<HostSampling>(parts.model->info().vocab, *config_.comm, config_.synthetic_rates);
  const PlanLimits& limits = config_.limits;
  if (parts.draft)
    drafter_ = std::make_unique<EagleDrafter>(*parts.draft, limits.num_drafts, *config_.comm);
  else if (limits.num_drafts > 0)
    drafter_ = std::make_unique<NgramDrafter>(config_.ngram, limits.num_drafts, limits.max_sequences);
  return parts.pages_in(config_.cache_bytes);
}

// The page pool, and what recurrent models have beside it.
Status HostDevice::reserve() {
  const bool recurrent = parts_->state_pages() > 0;
  const int64_t bytes = parts_->pool_bytes() + (recurrent ? parts_->ring_bytes() : 0);
  if (!Buffer::can_make(static_cast<size_t>(bytes)))
    return bad_input(
        fmt::format("the system does not give {} for the cache beside {} of weights and what the program takes; this "
                    "process may have {}: lower --kv-cache-memory-bytes, or raise the limit (ulimit -v)",
                    memory_text(bytes), memory_text(parts_->weight_bytes()), memory_text(host_memory_bytes())),
        "kv-cache-memory-bytes");
  pool_memory_ = parts_->ops->make_buffer(static_cast<size_t>(parts_->pool_bytes()));
  if (recurrent) {
    ring_memory_ = parts_->ops->make_buffer(static_cast<size_t>(parts_->ring_bytes()));
    zero_page_.resize(static_cast<size_t>(parts_->layout.page_bytes()));
  }
  return {};
}

// The slots are the host's: their part of the plan is applied by then.
void HostDevice::apply(const StepPlan& plan, const Batch&, int32_t) {
  for (const SequenceStart& start : plan.starts) {
    start_state(start);
    if (drafter_) drafter_->start(start);
  }
}

// The recurrent state before the sequence's first row: a copy of the checkpoint that it starts from, or zeros.
void HostDevice::start_state(const SequenceStart& start) {
  const CacheLayout& layout = parts_->layout;
  const std::vector<int32_t>& pages = (*parts_->slots)[start.slot].state_pages;
  CHECK(std::ssize(pages) == layout.state_pages(), "sequence ", start.sequence, " has ", pages.size(), " state pages");
  CHECK(start.checkpoint.empty() == (pages.empty() || start.num_cached_tokens == 0), "sequence ", start.sequence,
        " starts at ", start.num_cached_tokens, " without the state there");
  size_t i = 0;
  for (const Placement& place : start.checkpoint)
    if (place.dcp_index == config_.dcp_index()) copy_page(page(place.page.value), page(pages[i++]));
  CHECK(i == (start.checkpoint.empty() ? 0 : pages.size()), "a checkpoint of ", i, " pages");
  for (; i < pages.size(); ++i) copy_page(zero_page_.data(), page(pages[i]));
}

void HostDevice::forward(const StepPlan& plan, const Batch& batch, int32_t) {
  batch_ = &batch;
  step_masks_ = nullptr;
  masks_.assign(plan.rows.size(), {});
  if (!status_.ok()) return;
  Ops& ops = parts_->step_ops();
  ops.begin_step();
  output_ = parts_->model->forward(batch, ops, pool());
}

PagePool HostDevice::pool() {
  return {.base = pool_memory_.data(),
          .layout = parts_->layout,
          .ring = ring_memory_.data(),
          .ring_tokens = parts_->ring_tokens(),
          .draft_base = pool_memory_.data() + parts_->num_pages * parts_->layout.page_bytes()};
}

// Of the rows that this rank samples: others have what they need.
void HostDevice::mask(const StepPlan& plan, MaskBox& masks) {
  step_masks_ = masks.wait(plan.step);
  MaskCursor cursor(*step_masks_);
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    if (!row.masked) continue;
    const std::span<const uint32_t> mask = cursor.of(row.slot);
    if (rank_of_slot(row.slot, config_.comm->size()) == config_.comm->rank()) masks_[i] = mask;
  }
  cursor.check_end();
}

void HostDevice::sample(const StepPlan& plan, int32_t) {
  if (status_.ok()) status_ = parts_->ops->status();
  if (!status_.ok()) return;
  result_.begin(plan);
  status_ =
      sampling_->sample(plan, output_.logits, *parts_->builder, masks_, parts_->ops->arena(), *parts_->slots, result_);
  for (size_t i = 0; i < plan.rows.size(); ++i)
    for (const StateCheckpoint& checkpoint : batch_->sequences[i].checkpoints)
      result_.rows[i].checkpoints.push_back(checkpoint.position);
  if (drafter_ && status_.ok())
    drafter_->draft({plan, *batch_, output_, result_, parts_->step_ops(), pool(), *parts_->slots});
  for (size_t i = 0; i < plan.rows.size(); ++i)
    if (plan.rows[i].masked) result_.rows[i].drafts = (*parts_->slots)[plan.rows[i].slot].drafts;
}

Status HostDevice::collect(const StepPlan&, int32_t, StepResult& result) {
  if (status_.ok()) std::swap(result, result_);
  return status_;
}

}  // namespace

Result<std::unique_ptr<RankDevice>> make_host_device(const RankConfig& config) {
  CHECK(config.device != Device::kCuda);
  if (config.cache_bytes > host_memory_bytes() / config.size)
    return bad_input(
        fmt::format("the cache of {} is over the memory that this process may have, {}: lower --kv-cache-memory-bytes",
                    memory_text(config.cache_bytes), memory_text(host_memory_bytes())),
        "kv-cache-memory-bytes");
  return std::unique_ptr<RankDevice>(std::make_unique<HostDevice>(config));
}

}  // namespace perigee
