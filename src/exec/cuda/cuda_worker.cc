#include "exec/cuda/cuda_worker.h"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <deque>

#include "base/clock.h"
#include "base/log.h"
#include "base/memory_text.h"
#include "exec/cuda/decode_graphs.h"
#include "exec/cuda/device_arrays.h"
#include "exec/cuda/sampling_kernels.h"
#include "exec/cuda/step_kernels.h"
#include "exec/cuda/step_sampling.h"
#include "exec/cuda/warm_up_shapes.h"
#include "exec/plan_worker.h"
#include "ops/cuda/backend.h"
#include "ops/cuda/mla/mla_decode.h"

namespace perigee {
namespace {

struct StepInFlight {
  StepPlan plan;
  int32_t turn = 0;
  AskedLogits asked;
};

class CudaWorker final : public PlanWorker {
 public:
  static Result<std::unique_ptr<Worker>> create(const WorkerConfig& config, OnResult on_result);
  using PlanWorker::PlanWorker;
  ~CudaWorker() override { end(); }

 private:
  Status reserve();
  Status warm_up();
  Status reserve_pool();
  Status capture();
  Status run_padding(std::span<const SequenceRows> sequences);
  void run() override;
  void start(StepPlan plan);
  Tensor forward(const Batch& host, std::span<const int32_t> logit_rows);
  void finish();
  int32_t graph_bucket(const StepPlan& plan) const;
  CudaOps& ops() const { return static_cast<CudaOps&>(*ops_); }
  cudaStream_t stream() const { return ops().stream(); }
  PagePool pool() const {
    return {.base = pages_.data(), .layout = layout_, .ring = ring_.data(), .ring_tokens = kRingTokens};
  }

  Buffer pages_, ring_;
  std::unique_ptr<DeviceArrays> arrays_;
  DeviceSequences sequences_;  // of arrays_
  std::unique_ptr<StepSampling> sampling_;
  std::array<std::unique_ptr<PlanUpload>, 2> uploads_;
  std::array<Event, 2> done_;
  std::unique_ptr<DecodeGraphs> graphs_;
  std::deque<StepInFlight> in_flight_;
  int32_t turn_ = 0;
  bool lost_ = false;        // the device: nothing is computed any more
  int64_t allocations_ = 0;  // by this thread before its first step
};

// What the kernels' grids and the attention's work lists hold.
Status check_limits(const WorkerConfig& config) {
  constexpr int32_t kMaxTokens = 65535;
  if (config.max_sequences > kMlaMaxSequences)
    return bad_input(str_cat("--max-num-seqs ", config.max_sequences, ": a GPU runs at most ", kMlaMaxSequences),
                     "max-num-seqs");
  if (config.max_step_tokens > kMaxTokens)
    return bad_input(str_cat("--max-num-batched-tokens ", config.max_step_tokens, ": a GPU takes at most ", kMaxTokens),
                     "max-num-batched-tokens");
  return {};
}

Result<std::unique_ptr<Worker>> CudaWorker::create(const WorkerConfig& config, OnResult on_result) {
  RETURN_IF_ERROR(check_limits(config));
  if (const Status gpu = select_device(0); !gpu.ok()) return without_gpu(gpu.error());
  log_info("GPU 0: ", gpu_report(0), ", ", memory_text(device_memory().free), " free");
  auto worker = std::make_unique<CudaWorker>(config, std::move(on_result));
  auto ops = std::make_unique<CudaOps>(CudaOptions{.deterministic = config.deterministic});
  if (config.observer != nullptr) ops->observe_launches(config.observer);
  RETURN_IF_ERROR(worker->load(std::move(ops)));
  RETURN_IF_ERROR(worker->reserve());
  RETURN_IF_ERROR(worker->warm_up());
  RETURN_IF_ERROR(worker->reserve_pool());
  RETURN_IF_ERROR(worker->capture());
  worker->begin();
  return std::unique_ptr<Worker>(std::move(worker));
}

// All but the pool, whose size may depend on what this takes; until then one page, which padding reads, and tables for
// as many as there can be.
Status CudaWorker::reserve() {
  const int64_t most = std::max(device_memory().free, least_pages() * layout_.page_bytes());
  RETURN_IF_ERROR(set_pool(config_.cache_bytes > 0 ? config_.cache_bytes : most));
  const int64_t slots = config_.max_sequences, tokens = max_tokens(), vocab = model_->info().vocab;
  pages_ = device_buffer(static_cast<size_t>(layout_.page_bytes()));
  if (state_pages() > 0) ring_ = device_buffer(static_cast<size_t>(ring_bytes()));
  const int32_t checkpoints = state_pages() > 0 ? max_checkpoint_writes(config_.max_sequences, max_tokens()) : 0;
  arrays_ = std::make_unique<DeviceArrays>(ArraySizes{.slots = slots,
                                                      .tokens = tokens,
                                                      .max_blocks = max_blocks(),
                                                      .vocab = vocab,
                                                      .state_width = state_pages(),
                                                      .checkpoints = checkpoints});
  sequences_ = arrays_->sequences();
  sampling_ = std::make_unique<StepSampling>(
      SamplingSizes{.slots = slots, .scores = kPromptLogprobTokens, .max_positions = model_->info().max_positions},
      *arrays_, ops().owned_stream());
  const UploadLimits limits{.max_sequences = static_cast<int32_t>(slots),
                            .max_tokens = static_cast<int32_t>(tokens),
                            .max_blocks = max_blocks(),
                            .max_logit_rows = most_logit_rows(),
                            .state_width = state_pages(),
                            .max_checkpoints = checkpoints};
  for (auto& upload : uploads_) upload = std::make_unique<PlanUpload>(limits);
  return device_status();
}

// Steps of padding alone, so that the arena has its final size.
Status CudaWorker::warm_up() {
  cuda_ok(load_sampling_kernels(), "loading the sampling kernels");
  cuda_ok(load_step_kernels(), "loading the step kernels");
  for (const std::vector<SequenceRows>& sequences : warm_up_shapes({.sequences = config_.max_sequences,
                                                    .tokens = max_tokens(),
                                                    .sequence_tokens = max_blocks() * kBlockTokens,
                                                    .recurrent = state_pages() > 0}))
    RETURN_IF_ERROR(run_padding(sequences));
  return {};
}

// Graphs come after it, of what memory_share leaves to others: they hold the pool's address.
Status CudaWorker::reserve_pool() {
  const DeviceMemory memory = device_memory();
  const int64_t used = memory.total - memory.free;
  const int64_t left = static_cast<int64_t>(config_.memory_share * static_cast<double>(memory.total)) - used;
  if (config_.cache_bytes > memory.free)
    return bad_input(str_cat("--kv-cache-memory-bytes ", memory_text(config_.cache_bytes), ": the GPU has ",
                             memory_text(memory.free), " left beside weights and workspace"),
                     "kv-cache-memory-bytes");
  const int64_t least = least_pages() * layout_.page_bytes();
  if (config_.cache_bytes == 0 && left < least)
    return bad_input(
        str_cat("--gpu-memory-utilization ", config_.memory_share, " of ", memory_text(memory.total),
                ": weights, workspace and other processes take ", memory_text(used), ", and a cache needs ",
                memory_text(least), "; raise it, or lower --max-num-batched-tokens or --max-num-seqs"),
        "gpu-memory-utilization");
  RETURN_IF_ERROR(set_pool(config_.cache_bytes > 0 ? config_.cache_bytes : left));
  pages_ = {};
  pages_ = device_buffer(static_cast<size_t>(page_pool_bytes()));
  return device_status();
}

Status CudaWorker::capture() {
  graphs_ = std::make_unique<DecodeGraphs>(arrays_->batch(), sequences_, config_.max_sequences);
  RETURN_IF_ERROR(graphs_->capture(*model_, ops(), pool(), *sampling_));
  cuda_ok(cudaStreamSynchronize(stream()), "warming up");
  return device_status();
}

Status CudaWorker::run_padding(std::span<const SequenceRows> sequences) {
  const int32_t rows = sequences.back().first_row + sequences.back().num_tokens;
  cuda_ok(build_batch({}, arrays_->slots(), arrays_->batch(), max_tokens(), stream()), "warming up");
  const std::span<const int32_t> any_rows(arrays_->batch().row_sequence,
                                          static_cast<size_t>(std::min(rows, most_logit_rows())));
  ops_->begin_step();
  model_->forward(device_batch(arrays_->batch(), sequences_, sequences, rows, any_rows), *ops_, pool());
  RETURN_IF_ERROR(ops_->status());
  cuda_ok(cudaStreamSynchronize(stream()), "warming up");
  ops_->begin_step();
  return device_status();
}

void CudaWorker::run() {
  CHECK(select_device(0).ok());
  allocations_ = num_device_allocations();
  constexpr auto kPoll = std::chrono::microseconds(2);
  prctl(PR_SET_TIMERSLACK, 1);  // else a sleep takes 50 us more, and every result is as late
  while (!lost_) {
    std::optional<StepPlan> plan = in_flight_.empty() ? plans_.pop() : plans_.try_pop();
    if (plan) {
      start(std::move(*plan));
    } else if (in_flight_.empty()) {
      return;
    } else if (cudaEventQuery(done_[static_cast<size_t>(in_flight_.front().turn)].get()) == cudaErrorNotReady) {
      std::this_thread::sleep_for(kPoll);
    } else {
      finish();
    }
  }
}

void CudaWorker::start(StepPlan plan) {
  const double begin = system_clock().now_s();
  StepInFlight step{.turn = turn_};
  PlanUpload& upload = *uploads_[static_cast<size_t>(turn_)];
  upload.begin();
  const Batch& host = build(plan);
  CHECK(std::ssize(host.positions) <= max_tokens(), "a step of ", host.positions.size(), " tokens");
  CHECK(std::ssize(plan.checkpoints) <= max_checkpoint_writes(config_.max_sequences, max_tokens()), "a step of ",
        plan.checkpoints.size(), " checkpoints");
  const int32_t bucket = graph_bucket(plan);
  PlanArrays packed = pack_plan(plan, host.sequences, state_pages(), upload);
  const std::span<const int32_t> logit_rows = upload.place(host.logit_rows);
  step.asked = sampling_->ask(plan, *slots_, *builder_, bucket > 0, upload);
  packed.samples = step.asked.samples.data();
  upload.send(ops().owned_stream());
  cuda_ok(apply_deltas(packed, arrays_->slots(), stream()), "applying a plan");
  cuda_ok(start_states(packed, arrays_->slots(), {pages_.data(), layout_.page_bytes()}, stream()), "starting states");
  for (const SequenceStart& start : plan.starts) sampling_->start(start);
  cuda_ok(build_batch(packed, arrays_->slots(), arrays_->batch(), std::max(bucket, packed.num_rows), stream()),
          "building a batch");
  build_us_.store((system_clock().now_s() - begin) * 1e6, std::memory_order_relaxed);
  if (plan.step.value == config_.fail_at_step) cuda_ok(break_device(stream()), "breaking the device");
  Tensor logits;  // of steps that are no graphs
  if (bucket > 0)
    graphs_->forward(bucket, stream());
  else
    logits = forward(host, logit_rows);
  for (size_t i = 0; i < plan.rows.size(); ++i)
    slots_->advance(plan.rows[i].slot, plan.rows[i].num_tokens(), host.sequences[i].commit_all);
  if (std::any_of(plan.rows.begin(), plan.rows.end(), [](const PlanRow& row) { return row.masked; })) {
    // A grammar advances by the results before, and the masks' memory is free once those are there.
    while (!in_flight_.empty()) finish();
    if (lost_) return;
    sampling_->upload_masks(plan, masks_);
  }
  if (bucket > 0) {
    graphs_->sample(bucket, turn_, stream());
  } else {
    sampling_->score(step.asked, logits, turn_);
    sampling_->sample(step.asked.num_rows, logits, turn_);
  }
  upload.fence(ops().owned_stream());
  done_[static_cast<size_t>(turn_)].record(ops().owned_stream());
  step.plan = std::move(plan);
  in_flight_.push_back(std::move(step));
  turn_ = 1 - turn_;
}

int32_t CudaWorker::graph_bucket(const StepPlan& plan) const {
  const auto is_decode = [](const PlanRow& row) { return std::holds_alternative<Decode>(row.work); };
  if (plan.eager || !std::all_of(plan.rows.begin(), plan.rows.end(), is_decode)) return 0;
  return graphs_->bucket(static_cast<int32_t>(plan.rows.size()));
}

Tensor CudaWorker::forward(const Batch& host, std::span<const int32_t> logit_rows) {
  Ops& ops = step_ops();
  ops.begin_step();
  const Batch batch =
      device_batch(arrays_->batch(), sequences_, host.sequences, std::ssize(host.positions), logit_rows);
  return model_->forward(batch, ops, pool());
}

void CudaWorker::finish() {
  StepInFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  done_[static_cast<size_t>(step.turn)].wait();
  if (const Status status = device_status(); !status.ok()) {
    lost_ = true;
    in_flight_.clear();
    lose_device(step.plan.step, status.error().message);
    log_error("GPU 0 after the failure: ", gpu_report(0));  // last: it may hang where the GPU is gone
    return;
  }
  CHECK(num_device_allocations() == allocations_, "memory was reserved after the start, in step ", step.plan.step);
  StepResult result{.step = step.plan.step, .rows = sampling_->result(step.plan, step.asked, step.turn)};
  masks_.drop(step.plan.step);
  on_result_(std::move(result));
}

}  // namespace

Result<std::unique_ptr<Worker>> make_cuda_worker(const WorkerConfig& config,
                                                 std::function<void(StepResult&&)> on_result) {
  return CudaWorker::create(config, std::move(on_result));
}

}  // namespace perigee
