#include "exec/cuda/cuda_device.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/log.h"
#include "base/memory_text.h"
#include "comm/cuda/peer_comm.h"
#include "comm/cuda/peer_comms.h"
#include "exec/cuda/decode_graphs.h"
#include "exec/cuda/draft_kernels.h"
#include "exec/cuda/gpu_memory.h"
#include "exec/cuda/sampling_kernels.h"
#include "exec/cuda/step_kernels.h"
#include "exec/cuda/step_sampling.h"
#include "exec/cuda/warm_up_shapes.h"
#include "ops/cuda/backend.h"
#include "ops/cuda/mla/mla_decode.h"

namespace perigee {
namespace {

class CudaDevice final : public RankDevice {
 public:
  explicit CudaDevice(const RankConfig& config) : config_(config) {}

  Result<std::unique_ptr<Ops>> make_ops() override;
  Result<int32_t> warm_up(RankParts& parts) override;
  Status reserve() override;
  uint8_t* pages() override { return pages_.data(); }
  void apply(const StepPlan& plan, const Batch& batch, int32_t buffer) override;
  void forward(const StepPlan& plan, const Batch& batch, int32_t buffer) override;
  void mask(const StepPlan& plan, MaskBox& masks) override { sampling_->upload_masks(plan, masks); }
  void sample(const StepPlan& plan, int32_t buffer) override;
  bool is_done(int32_t buffer) override { return in_flight_[static_cast<size_t>(buffer)].done.is_done(); }
  Status collect(const StepPlan& plan, int32_t buffer, StepResult& result) override;
  void fail() override { cuda_ok(break_device(stream()), "breaking the device"); }
  void log_loss() override { log_error("GPU ", config_.rank, " after the failure: ", gpu_report(config_.rank)); }

 private:
  int32_t places() const { return 1 + config_.limits.num_drafts; }  // that a sequence is sampled at in a step
  Status reserve_arrays();
  void make_drafter();
  Status run_largest_steps();
  Status run_padding(std::span<const SequenceRows> sequences);
  Status run_padding(std::span<const SequenceRows> sequences, int32_t rows, int32_t rows_of_logits);
  Result<int32_t> pages_left() const;
  void lower_lengths(const StepPlan& plan, const StepResult& result);
  int32_t graph_bucket(const StepPlan& plan) const;
  CudaOps& ops() const { return static_cast<CudaOps&>(*parts_->ops); }
  cudaStream_t stream() const { return ops().stream(); }
  // The other arenas follow the pages.
  PagePool pool() const {
    const CacheLayout& layout = parts_->layout;
    const int64_t pages = static_cast<int64_t>(pages_.size()) / layout.bytes_per_page();
    return {.base = pages_.data(),
            .layout = layout,
            .ring = ring_.data(),
            .ring_tokens = parts_->ring_tokens(),
            .draft_base = pages_.data() + pages * layout.page_bytes()};
  }

  const RankConfig config_;
  RankParts* parts_ = nullptr;
  Buffer pages_, ring_;
  std::unique_ptr<DeviceArrays> arrays_;
  DeviceSequences sequences_;  // of arrays_
  std::unique_ptr<StepSampling> sampling_;
  std::unique_ptr<DeviceDrafter> drafter_;  // null without speculation
  std::unique_ptr<DecodeGraphs> graphs_;
  std::vector<StepId> started_in_;  // of each slot: the plan that its sequence came with
  int64_t allocations_ = 0;         // by this thread before its first step

  struct InFlight {
    std::unique_ptr<PlanUpload> upload;
    Event done;
    AskedLogits asked;
  };
  std::array<InFlight, kMaxPlansInFlight> in_flight_;
  // Of the step under way:
  int32_t bucket_ = 0;                   // 0: no graph
  std::span<const int32_t> logit_rows_;  // device
  Batch batch_;                          // on the device, and what came of it,
  ModelOutput output_;                   // of steps that are no graphs
};

// What the kernels' grids and the attention's work lists hold.
Status check_limits(const RankConfig& config) {
  constexpr int32_t kMaxTokens = 65535;
  if (config.limits.max_sequences > kMlaMaxSequences)
    return bad_input(
        fmt::format("--max-num-seqs {}: a GPU runs at most {}", config.limits.max_sequences, kMlaMaxSequences),
        "max-num-seqs");
  if (config.limits.max_step_tokens > kMaxTokens)
    return bad_input(
        fmt::format("--max-num-batched-tokens {}: a GPU takes at most {}", config.limits.max_step_tokens, kMaxTokens),
        "max-num-batched-tokens");
  return {};
}

SyntheticRates synthetic_rates(const RankConfig& config) {
  SyntheticRates out{.count = static_cast<int32_t>(config.synthetic_rates.size())};
  CHECK(out.count <= kMaxDrafts, out.count, " rates");
  std::copy(config.synthetic_rates.begin(), config.synthetic_rates.end(), out.rates);
  return out;
}

Result<std::unique_ptr<Ops>> CudaDevice::make_ops() {
  PeerComms::Pair comms{.all = &Comm::alone(), .dcp = &Comm::alone()};
  if (config_.peers != nullptr) {
    ASSIGN_OR_RETURN(comms, config_.peers->connect(config_.rank));
  }
  auto ops = std::make_unique<CudaOps>(CudaOptions{
      .device = config_.rank, .deterministic = config_.limits.deterministic, .comm = comms.all, .dcp = comms.dcp});
  ops->set_silent(true);  // until everything is reserved
  if (config_.observer != nullptr) ops->observe_launches(config_.observer);
  return std::unique_ptr<Ops>(std::move(ops));
}

Result<int32_t> CudaDevice::warm_up(RankParts& parts) {
  parts_ = &parts;
  RETURN_IF_ERROR(reserve_arrays());
  RETURN_IF_ERROR(run_largest_steps());
  return pages_left();
}

// All but the pool, whose size may depend on what this takes; until then one page, which padding reads, and tables for
// as many as there can be.
Status CudaDevice::reserve_arrays() {
  const RankParts& parts = *parts_;
  // Of all memory, in whole GiB: every rank of a group has to come to the same size.
  const int64_t most = std::max(device_memory().total >> 30 << 30, parts.least_pages() * parts.layout.bytes_per_page());
  ASSIGN_OR_RETURN(const int32_t most_pages, parts.pages_in(config_.cache_bytes > 0 ? config_.cache_bytes : most));
  const int32_t slots = config_.limits.max_sequences, tokens = parts.max_tokens(),
                max_blocks = parts.max_blocks(most_pages);
  const int32_t state_pages = parts.state_pages();
  pages_ = device_buffer(static_cast<size_t>(parts.layout.bytes_per_page()));
  if (state_pages > 0) ring_ = device_buffer(static_cast<size_t>(parts.ring_bytes()));
  const int32_t checkpoints = state_pages > 0 ? max_checkpoint_writes(slots, tokens) : 0;
  const ModelInfo& model = parts.model->info();
  const bool looks_up = places() > 1 && parts.draft == nullptr;
  arrays_ = std::make_unique<DeviceArrays>(ArraySizes{.slots = slots,
                                                      .tokens = tokens,
                                                      .max_blocks = max_blocks,
                                                      .vocab = model.vocab,
                                                      .state_width = state_pages,
                                                      .checkpoints = checkpoints,
                                                      .places = places(),
                                                      .history = looks_up ? model.max_positions + 1 : 0,
                                                      .rank = ops().comm().rank(),
                                                      .ranks = ops().comm().size(),
                                                      .shared = config_.limits.dcp_size > 1,
                                                      .draft_tables = parts.has_draft_tables()});
  sequences_ = arrays_->sequences();
  sampling_ = std::make_unique<StepSampling>(SamplingSizes{.slots = slots,
                                                           .scores = kPromptLogprobTokens,
                                                           .max_positions = model.max_positions,
                                                           .synthetic = synthetic_rates(config_)},
                                             *arrays_, ops().owned_stream(), ops().comm());
  make_drafter();
  started_in_.resize(static_cast<size_t>(slots));
  const UploadLimits limits{.max_sequences = slots,
                            .max_tokens = tokens,
                            .max_blocks = max_blocks,
                            .max_logit_rows = parts.max_rows_of_logits(),
                            .state_width = state_pages,
                            .max_checkpoints = checkpoints,
                            .places = places()};
  for (InFlight& step : in_flight_) step.upload = std::make_unique<PlanUpload>(limits);
  return device_status();
}

void CudaDevice::make_drafter() {
  if (parts_->draft)
    drafter_ =
        make_device_eagle_drafter(*parts_->draft, *arrays_, config_.limits.max_sequences, parts_->max_tokens(), ops());
  else if (places() > 1)
    drafter_ = make_device_ngram_drafter(config_.ngram, *arrays_, stream());
}

// Steps of padding alone, so that the arena has its final size.
Status CudaDevice::run_largest_steps() {
  cuda_ok(load_sampling_kernels(), "loading the sampling kernels");
  cuda_ok(load_step_kernels(), "loading the step kernels");
  cuda_ok(load_draft_kernels(), "loading the draft kernels");
  for (const std::vector<SequenceRows>& sequences : warm_up_shapes({.sequences = config_.limits.max_sequences,
                                                    .tokens = parts_->max_tokens(),
                                                    .sequence_tokens = sequences_.table_width * kBlockTokens,
                                                    .recurrent = parts_->state_pages() > 0}))
    RETURN_IF_ERROR(run_padding(sequences));
  return {};
}

// With as many rows of logits as there can be; and, if every row may have them, with one fewer: the last layer then
// gathers its rows.
Status CudaDevice::run_padding(std::span<const SequenceRows> sequences) {
  const int32_t rows = sequences.back().first_row + sequences.back().num_tokens;
  const int32_t most = std::min(rows, parts_->max_rows_of_logits());
  RETURN_IF_ERROR(run_padding(sequences, rows, most));
  return most == rows ? run_padding(sequences, rows, rows - 1) : Status();
}

Status CudaDevice::run_padding(std::span<const SequenceRows> sequences, int32_t rows, int32_t rows_of_logits) {
  cuda_ok(build_batch({}, arrays_->slots(), arrays_->batch(), parts_->max_tokens(), stream()), "warming up");
  const std::span<const int32_t> any_rows(arrays_->batch().row_sequence, static_cast<size_t>(rows_of_logits));
  ops().begin_step();
  const Batch batch = device_batch(arrays_->batch(), sequences_, sequences, rows, any_rows);
  const ModelOutput output = parts_->model->forward(batch, ops(), pool());
  if (drafter_) drafter_->draft({batch, output, pool(), ops()});
  RETURN_IF_ERROR(ops().status());
  cuda_ok(cudaStreamSynchronize(stream()), "warming up");
  ops().begin_step();
  return device_status();
}

// Of what memory_share leaves to the pool.
Result<int32_t> CudaDevice::pages_left() const {
  const DeviceMemory memory = device_memory();
  const int64_t used = memory.total - memory.free;
  const int64_t pool = gpu_pool_bytes(config_, memory.total, used + config_.transfer_bytes);
  if (config_.cache_bytes > memory.free)
    return bad_input(fmt::format("--kv-cache-memory-bytes {}: the GPU has {} left beside weights and workspace",
                                 memory_text(config_.cache_bytes), memory_text(memory.free)),
                     "kv-cache-memory-bytes");
  const int64_t least = parts_->least_pages() * parts_->layout.bytes_per_page();
  if (config_.cache_bytes == 0 && pool < least)
    return bad_input(
        fmt::format("--gpu-memory-utilization {:g} of {}: weights, workspace and other processes take {}, and a cache "
                    "needs {}; raise it, or lower --max-num-batched-tokens or --max-num-seqs",
                    config_.memory_share, memory_text(memory.total), memory_text(used), memory_text(least)),
        "gpu-memory-utilization");
  return parts_->pages_in(pool);
}

// Graphs come last: they hold the pool's address.
Status CudaDevice::reserve() {
  pages_ = {};
  pages_ = device_buffer(static_cast<size_t>(parts_->pool_bytes()));
  RETURN_IF_ERROR(device_status());
  const int32_t rows = std::min(config_.limits.max_sequences, parts_->max_tokens() / places());
  graphs_ = std::make_unique<DecodeGraphs>(arrays_->batch(), sequences_, rows);
  cuda_ok(build_batch({.width = places()}, arrays_->slots(), arrays_->batch(), rows, stream()), "warming up");
  RETURN_IF_ERROR(graphs_->capture(*parts_->model, ops(), pool(), *sampling_, drafter_.get()));
  cuda_ok(cudaStreamSynchronize(stream()), "warming up");
  ops().set_silent(false);
  allocations_ = num_device_allocations();
  return device_status();
}

void CudaDevice::apply(const StepPlan& plan, const Batch& batch, int32_t buffer) {
  CHECK(std::ssize(batch.positions) <= parts_->max_tokens(), "a step of ", batch.positions.size(), " tokens");
  CHECK(std::ssize(plan.checkpoints) <= max_checkpoint_writes(config_.limits.max_sequences, parts_->max_tokens()),
        "a step of ", plan.checkpoints.size(), " checkpoints");
  auto& [upload, done, asked] = in_flight_[static_cast<size_t>(buffer)];
  upload->begin();
  bucket_ = graph_bucket(plan);
  for (const SequenceStart& start : plan.starts) started_in_[static_cast<size_t>(start.slot.value)] = plan.step;
  PlanArrays packed =
      pack_plan(plan, batch.sequences, *parts_->slots, parts_->state_pages(), bucket_ > 0 ? places() : 0, *upload);
  logit_rows_ = upload->place(batch.logit_rows);
  sampling_->ask(plan, *parts_->slots, *parts_->builder, bucket_ > 0, *upload, asked);
  packed.samples = asked.samples.data();
  upload->send(ops().owned_stream());
  cuda_ok(apply_deltas(packed, arrays_->slots(), stream()), "applying a plan");
  cuda_ok(start_states(packed, arrays_->slots(), {pages_.data(), parts_->layout.page_bytes()}, stream()),
          "starting states");
  for (const SequenceStart& start : plan.starts) sampling_->start(start);
  cuda_ok(build_batch(packed, arrays_->slots(), arrays_->batch(), std::max(bucket_, packed.num_rows), stream()),
          "building a batch");
}

int32_t CudaDevice::graph_bucket(const StepPlan& plan) const {
  const auto is_decode = [](const PlanRow& row) { return row.prefill() == nullptr; };
  if (plan.eager || !std::all_of(plan.rows.begin(), plan.rows.end(), is_decode)) return 0;
  return graphs_->bucket(static_cast<int32_t>(plan.rows.size()));
}

void CudaDevice::forward(const StepPlan&, const Batch& batch, int32_t) {
  if (bucket_ > 0) return graphs_->forward(bucket_, stream());
  Ops& step_ops = parts_->step_ops();
  step_ops.begin_step();
  batch_ = device_batch(arrays_->batch(), sequences_, batch.sequences, std::ssize(batch.positions), logit_rows_);
  output_ = parts_->model->forward(batch_, step_ops, pool());
}

// A result need not wait for the drafts of the next rows, except those that the host makes masks of, and where a
// draft's cache lies in pages that others read once the result is in.
void CudaDevice::sample(const StepPlan&, int32_t buffer) {
  auto& [upload, done, asked] = in_flight_[static_cast<size_t>(buffer)];
  if (bucket_ > 0) {
    graphs_->sample(bucket_, buffer, stream());
  } else {
    sampling_->deal(output_.logits, asked.sampled_by);
    sampling_->score(asked, output_.logits, buffer);
    sampling_->sample(asked.num_rows, output_.logits, buffer);
  }
  upload->fence(ops().owned_stream());
  const bool fetches_drafts = drafter_ != nullptr && asked.masked;
  const bool awaits_drafts = fetches_drafts || (config_.shared_pages && parts_->draft != nullptr);
  if (!awaits_drafts) done.record(ops().owned_stream());
  if (bucket_ > 0)
    graphs_->draft(bucket_, stream());
  else if (drafter_)
    drafter_->draft({batch_, output_, pool(), parts_->step_ops()});
  if (fetches_drafts) sampling_->fetch_drafts(buffer);
  if (awaits_drafts) done.record(ops().owned_stream());
}

Status CudaDevice::collect(const StepPlan& plan, int32_t buffer, StepResult& result) {
  const InFlight& of = in_flight_[static_cast<size_t>(buffer)];
  of.done.wait();
  RETURN_IF_ERROR(device_status());
  CHECK(num_device_allocations() == allocations_, "memory was reserved after the start, in step ", plan.step);
  sampling_->fill(plan, of.asked, buffer, result);
  if (drafter_) lower_lengths(plan, result);
  return {};
}

// The host has taken all drafts to be right. Not of a slot that has another sequence by now.
void CudaDevice::lower_lengths(const StepPlan& plan, const StepResult& result) {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    if (row.num_drafts() == 0 || started_in_[static_cast<size_t>(row.slot.value)] > plan.step) continue;
    const RowResult& of = result.rows[i];
    const auto num_kept = static_cast<int32_t>(of.ids.size()) + (of.finite ? 0 : 1);
    parts_->slots->lower(row.slot, row.num_tokens() - num_kept);
  }
}

}  // namespace

Result<std::unique_ptr<RankDevice>> make_cuda_device(const RankConfig& config) {
  RETURN_IF_ERROR(check_limits(config));
  if (const Status gpu = select_device(config.rank); !gpu.ok()) return without_gpu(gpu.error());
  log_info("GPU ", config.rank, ": ", gpu_report(config.rank), ", ", memory_text(device_memory().free), " free");
  return std::unique_ptr<RankDevice>(std::make_unique<CudaDevice>(config));
}

}  // namespace perigee
