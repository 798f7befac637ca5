#include "exec/cuda/cuda_worker.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <numeric>
#include <thread>
#include <tuple>

#include "base/clock.h"
#include "base/log.h"
#include "base/queue.h"
#include "exec/batch_builder.h"
#include "exec/cuda/decode_graphs.h"
#include "exec/cuda/plan_upload.h"
#include "exec/cuda/sampling_kernels.h"
#include "exec/mask_box.h"
#include "ops/cuda/backend.h"
#include "ops/observed_ops.h"

namespace perigee {
namespace {

// What the host must know of a slot. The length is a mirror; the GPU's rules.
struct SlotMirror {
  SequenceId sequence;
  std::shared_ptr<const std::vector<int32_t>> tokens;
  std::shared_ptr<const SamplingParams> sampling;
  int32_t num_prompt_tokens = 0, num_cached_tokens = 0, length = 0, num_blocks = 0;
};

// A plan in device memory, and what it asks of its logits.
struct PackedPlan {
  PlanArrays arrays;
  int32_t bucket = 0;                   // of its graph; 0: eager
  std::span<const int32_t> logit_rows;  // eager: rows of the batch whose logits are wanted
  std::span<const SampleRecord> samples;
  std::span<const ScoreRecord> scores;
};

struct StepInFlight {
  StepPlan plan;
  int32_t turn = 0;
  std::vector<int32_t> score_ids;   // of all prompt scores, in the order of the plan's rows
  std::vector<int32_t> num_scores;  // of each plan row
  std::vector<bool> logprobs;       // of each plan row: whether the sampled id's are wanted
};

class CudaWorker final : public Worker {
 public:
  static Result<std::unique_ptr<Worker>> create(const WorkerConfig& config,
                                                std::function<void(StepResult&&)> on_result);
  ~CudaWorker() override {
    plans_.close();
    masks_.close();
    if (thread_.joinable()) thread_.join();
  }
  void submit(StepPlan plan) override {
    CHECK(plans_.try_push(std::move(plan)), "more than ", kMaxPlansInFlight, " plans in flight");
  }
  void set_masks(StepMasks masks) override { masks_.put(std::move(masks)); }
  const Model& model() const override { return *model_; }
  int32_t num_pages() const override { return num_pages_; }
  int32_t state_pages() const override { return 0; }
  double last_build_us() const override { return build_us_.load(std::memory_order_relaxed); }

 private:
  Status reserve();
  void reserve_slots(int64_t slots, int64_t max_blocks);
  void reserve_batch(int64_t tokens);
  Status warm_up();
  void run();
  void start(StepPlan plan);
  PackedPlan pack(const StepPlan& plan, StepInFlight& step);
  int32_t graph_bucket(const StepPlan& plan) const;
  void finish();
  void fill_starts(const StepPlan& plan, StartRecord* records);
  void fill_appends(const StepPlan& plan, AppendRecord* records);
  void fill_rows(const StepPlan& plan, RowRecord* records);
  void upload_lists(const SequenceStart& start);
  void ask(const StepPlan& plan, bool graph, StepInFlight& step);
  Tensor forward(const StepPlan& plan, const PackedPlan& packed);
  void sample(const PackedPlan& packed, const Tensor& logits, int32_t turn);
  void upload_masks(const StepPlan& plan);
  RowResult row_result(const StepInFlight& step, size_t index, size_t& sample, size_t& score) const;
  cudaStream_t stream() const { return ops_->stream(); }
  PagePool pool() const { return {.base = pool_memory_.data(), .layout = layout_}; }

  WorkerConfig config_;
  std::function<void(StepResult&&)> on_result_;
  std::unique_ptr<CudaOps> ops_;
  std::unique_ptr<Ops> observed_;  // null without an observer; steps outside of graphs run on it
  std::unique_ptr<Model> model_;
  CacheLayout layout_;
  int32_t num_pages_ = 0;
  int64_t allocations_ = 0;  // when the worker was ready

  Buffer pool_memory_, slot_memory_, batch_memory_, work_, masks_device_, masks_host_, lists_device_, lists_host_;
  Buffer results_device_, results_host_[2];  // SampleResult [max_sequences], then TokenScore [max_step_tokens]
  SlotArrays slots_;
  BatchArrays batch_;
  DeviceSequences sequences_;
  std::array<std::unique_ptr<PlanUpload>, 2> uploads_;
  std::array<Event, 2> done_;
  Event lists_sent_;
  std::unique_ptr<DecodeGraphs> graphs_;
  std::vector<SlotMirror> mirror_;
  std::vector<SequenceRows> host_rows_;
  std::vector<int32_t> logit_rows_;  // of the plan being packed
  std::vector<SampleRecord> samples_;
  std::vector<ScoreRecord> scores_;
  std::deque<StepInFlight> in_flight_;
  int32_t turn_ = 0;

  BoundedQueue<StepPlan> plans_{kMaxPlansInFlight};
  MaskBox masks_;
  std::atomic<double> build_us_{0};
  std::thread thread_;
};

Result<std::unique_ptr<Worker>> CudaWorker::create(const WorkerConfig& config,
                                                   std::function<void(StepResult&&)> on_result) {
  RETURN_IF_ERROR(select_device(0));
  auto worker = std::make_unique<CudaWorker>();
  CudaWorker& w = *worker;
  w.config_ = config;
  w.on_result_ = std::move(on_result);
  w.ops_ = std::make_unique<CudaOps>(CudaOptions{.deterministic = config.deterministic});
  if (config.observer != nullptr) {
    w.observed_ = observe_ops(*w.ops_, *config.observer);
    w.ops_->observe_launches(config.observer);
  }
  ASSIGN_OR_RETURN(w.model_, load_model(config.load, *w.ops_));
  w.layout_ = w.model_->cache_layout(DType::kBF16);
  if (w.layout_.state_layers > 0)
    return Error(Code::kUnavailable, "--device cuda does not run models with recurrent layers yet: use --device cpu",
                 "device");
  ASSIGN_OR_RETURN(w.num_pages_, count_pages(config.cache_bytes, w.layout_));
  RETURN_IF_ERROR(w.reserve());
  w.thread_ = std::thread([&w] { w.run(); });
  return std::unique_ptr<Worker>(std::move(worker));
}

Status CudaWorker::reserve() {
  const ModelInfo& info = model_->info();
  const int64_t slots = config_.max_sequences, tokens = std::max(config_.max_step_tokens, config_.max_sequences);
  const int64_t max_blocks = std::min<int64_t>(num_pages_, info.max_positions / kBlockTokens + 1);
  pool_memory_ = device_buffer(static_cast<size_t>(num_pages_ * layout_.page_bytes()));
  slots_.vocab = static_cast<int32_t>(info.vocab);
  reserve_slots(slots, max_blocks);
  reserve_batch(tokens);
  work_ = device_buffer(static_cast<size_t>(slots * info.vocab) * sizeof(float));
  masks_device_ = device_buffer(static_cast<size_t>(slots * slots_.bit_words()) * 4);
  masks_host_ = pinned_buffer(masks_device_.size());
  lists_host_ = pinned_buffer(kMaxListed * 8 + static_cast<size_t>(info.max_positions + 1) * 4);
  lists_device_ = device_buffer(lists_host_.size());
  results_device_ = device_buffer(static_cast<size_t>(slots) * sizeof(SampleResult) +
                                  static_cast<size_t>(tokens) * sizeof(TokenScore));
  for (Buffer& buffer : results_host_) buffer = pinned_buffer(results_device_.size());
  const UploadLimits limits{.max_sequences = static_cast<int32_t>(slots),
                            .max_tokens = static_cast<int32_t>(tokens),
                            .max_blocks = static_cast<int32_t>(max_blocks),
                            .max_logit_rows = static_cast<int32_t>(tokens)};
  for (auto& upload : uploads_) upload = std::make_unique<PlanUpload>(limits);
  RETURN_IF_ERROR(device_status());
  return warm_up();
}

// One piece of memory, cut into the slots' arrays.
void CudaWorker::reserve_slots(int64_t slots, int64_t max_blocks) {
  size_t used = 0;
  const auto cut = [&]<typename T>(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(slot_memory_.data() + used);
    used += (static_cast<size_t>(slots * count) * sizeof(T) + 255) / 256 * 256;
  };
  for (int pass = 0; pass < 2; ++pass) {  // the first adds up, the second has the memory
    if (pass == 1) slot_memory_ = device_buffer(used);
    used = 0;
    cut(slots_.newest, 1);
    cut(slots_.length, 1);
    cut(slots_.num_outputs, 1);
    cut(slots_.block_tables, max_blocks);
    cut(slots_.params, 1);
    cut(slots_.listed_ids, kMaxListed);
    cut(slots_.listed_bias, kMaxListed);
    cut(slots_.counts, slots_.count_words());
    cut(slots_.seen, slots_.bit_words());
  }
  slots_.max_blocks = static_cast<int32_t>(max_blocks);
  mirror_.resize(static_cast<size_t>(slots));
  cuda_ok(cudaMemset(slot_memory_.data(), 0, slot_memory_.size()), "clearing slots");
}

void CudaWorker::reserve_batch(int64_t tokens) {
  const size_t array = (static_cast<size_t>(tokens + 1) * 4 + 255) / 256 * 256;
  batch_memory_ = device_buffer(6 * array + static_cast<size_t>(config_.max_sequences) * slots_.max_blocks * 4);
  cuda_ok(cudaMemset(batch_memory_.data(), 0, batch_memory_.size()), "clearing the batch");
  int32_t** const arrays[] = {&batch_.tokens,    &batch_.positions, &batch_.row_sequence, &batch_.row_page,
                              &batch_.first_row, &batch_.lengths,   &batch_.block_tables};
  for (size_t i = 0; i < 7; ++i) *arrays[i] = reinterpret_cast<int32_t*>(batch_memory_.data() + i * array);
  sequences_ = {.first_row = batch_.first_row,
                .lengths = batch_.lengths,
                .block_tables = batch_.block_tables,
                .table_width = slots_.max_blocks,
                .row_sequence = batch_.row_sequence,
                .row_page = batch_.row_page};
}

// The largest steps of padding alone, in both forms of attention, so that the arena has its final size; then the
// graphs.
Status CudaWorker::warm_up() {
  const int32_t rows = std::max(config_.max_step_tokens, config_.max_sequences), sequences = config_.max_sequences;
  for (int32_t i = 0; i < sequences; ++i)
    host_rows_.push_back({.first_row = i, .num_tokens = i + 1 < sequences ? 1 : rows - i});
  cuda_ok(build_batch({}, slots_, batch_, rows, stream()), "warming up");
  const std::span<const int32_t> any_rows(batch_.row_sequence, static_cast<size_t>(rows));
  for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kExpanded}) {
    SequenceRows& last = host_rows_.back();
    last.form = form;
    last.position = std::max(slots_.max_blocks * kBlockTokens - last.num_tokens, 0);
    if (last.position + last.num_tokens > slots_.max_blocks * kBlockTokens) last.num_tokens = 1;
    ops_->begin_step();
    model_->forward(device_batch(batch_, sequences_, host_rows_, rows, any_rows), *ops_, pool());
    RETURN_IF_ERROR(ops_->status());
    cuda_ok(cudaStreamSynchronize(stream()), "warming up");
  }
  ops_->begin_step();
  graphs_ = std::make_unique<DecodeGraphs>(batch_, sequences_, config_.max_sequences);
  RETURN_IF_ERROR(graphs_->capture(*model_, *ops_, pool()));
  cuda_ok(cudaStreamSynchronize(stream()), "warming up");
  allocations_ = num_device_allocations();
  return ops_->status();
}

void CudaWorker::run() {
  CHECK(select_device(0).ok());
  constexpr auto kPoll = std::chrono::microseconds(2);
  while (true) {
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
  const PackedPlan packed = pack(plan, step);
  cuda_ok(apply_deltas(packed.arrays, slots_, stream()), "applying a plan");
  for (const SequenceStart& start : plan.starts) upload_lists(start);
  const int32_t sequences = std::max(packed.bucket, packed.arrays.num_rows);
  cuda_ok(build_batch(packed.arrays, slots_, batch_, sequences, stream()), "building a batch");
  build_us_.store((system_clock().now_s() - begin) * 1e6, std::memory_order_relaxed);
  const Tensor logits = packed.bucket > 0 ? graphs_->launch(packed.bucket, stream()) : forward(plan, packed);
  upload_masks(plan);
  sample(packed, logits, step.turn);
  uploads_[static_cast<size_t>(step.turn)]->fence(ops_->owned_stream());
  done_[static_cast<size_t>(step.turn)].record(ops_->owned_stream());
  step.plan = std::move(plan);
  in_flight_.push_back(std::move(step));
  turn_ = 1 - turn_;
}

PackedPlan CudaWorker::pack(const StepPlan& plan, StepInFlight& step) {
  PlanUpload& upload = *uploads_[static_cast<size_t>(step.turn)];
  upload.begin();
  const int32_t bucket = graph_bucket(plan);
  StartRecord* starts = upload.take<StartRecord>(std::ssize(plan.starts));
  AppendRecord* appends = upload.take<AppendRecord>(std::ssize(plan.appends));
  RowRecord* rows = upload.take<RowRecord>(std::ssize(plan.rows));
  fill_starts(plan, starts);
  fill_appends(plan, appends);
  fill_rows(plan, rows);
  ask(plan, bucket > 0, step);
  const auto place = [&upload](const auto& values) {
    using Value = std::decay_t<decltype(values[0])>;
    Value* to = upload.take<Value>(std::ssize(values));
    std::copy(values.begin(), values.end(), to);
    return std::span<const Value>(upload.device(to), values.size());
  };
  const PackedPlan packed{.arrays = {.starts = upload.device(starts),
                                     .appends = upload.device(appends),
                                     .rows = upload.device(rows),
                                     .tokens = place(plan.tokens).data(),
                                     .num_starts = static_cast<int32_t>(plan.starts.size()),
                                     .num_appends = static_cast<int32_t>(plan.appends.size()),
                                     .num_rows = static_cast<int32_t>(plan.rows.size())},
                          .bucket = bucket,
                          .logit_rows = place(logit_rows_),
                          .samples = place(samples_),
                          .scores = place(scores_)};
  upload.send(ops_->owned_stream());
  return packed;
}

int32_t CudaWorker::graph_bucket(const StepPlan& plan) const {
  const auto eager = [](const PlanRow& row) { return !row.is_decode() || row.num_tokens != 1 || row.prompt_logprobs; };
  if (std::any_of(plan.rows.begin(), plan.rows.end(), eager)) return 0;
  return graphs_->bucket(static_cast<int32_t>(plan.rows.size()));
}

void CudaWorker::fill_starts(const StepPlan& plan, StartRecord* records) {
  for (const SequenceStart& start : plan.starts) {
    const auto num_tokens = static_cast<int32_t>(start.tokens->size());
    mirror_[static_cast<size_t>(start.slot.value)] = {.sequence = start.sequence,
                                                      .tokens = start.tokens,
                                                      .sampling = start.sampling,
                                                      .num_prompt_tokens = start.num_prompt_tokens,
                                                      .num_cached_tokens = start.num_cached_tokens,
                                                      .length = start.num_cached_tokens};
    *records++ = {.slot = start.slot.value,
                  .length = start.num_cached_tokens,
                  .num_outputs = num_tokens - start.num_prompt_tokens,
                  .reserved = 0,
                  .params = slot_params(*start.sampling)};
  }
}

void CudaWorker::fill_appends(const StepPlan& plan, AppendRecord* records) {
  for (const BlockAppend& append : plan.appends) {
    SlotMirror& slot = mirror_[static_cast<size_t>(append.slot.value)];
    CHECK(append.block_index == slot.num_blocks && slot.num_blocks < slots_.max_blocks, "block ", append.block_index,
          " after ", slot.num_blocks, " blocks of slot ", append.slot);
    ++slot.num_blocks;
    *records++ = {.slot = append.slot.value, .index = append.block_index, .page = append.page.value};
  }
}

void CudaWorker::fill_rows(const StepPlan& plan, RowRecord* records) {
  int32_t first_row = 0;
  for (const PlanRow& row : plan.rows) {
    SlotMirror& slot = mirror_[static_cast<size_t>(row.slot.value)];
    CHECK(slot.sequence == row.sequence && slot.length == row.position, "plan row of sequence ", row.sequence, " at ",
          row.position, " meets slot of ", slot.sequence, " at ", slot.length);
    CHECK(slot.num_blocks * kBlockTokens >= row.position + row.num_tokens, "sequence ", row.sequence, " has ",
          slot.num_blocks, " blocks for ", row.position + row.num_tokens, " tokens");
    slot.length += row.num_tokens;
    *records++ = {.slot = row.slot.value,
                  .num_tokens = row.num_tokens,
                  .tokens_offset = row.tokens_offset,
                  .first_row = first_row};
    first_row += row.num_tokens;
  }
  CHECK(first_row <= std::max(config_.max_step_tokens, config_.max_sequences), "a step of ", first_row, " tokens");
}

// Which logits are wanted, and for what. Row i of a graph's logits is plan row i's.
void CudaWorker::ask(const StepPlan& plan, bool graph, StepInFlight& step) {
  logit_rows_.clear();
  samples_.clear();
  scores_.clear();
  int32_t first_row = 0, masks = 0;
  for (const PlanRow& row : plan.rows) {
    const SlotMirror& slot = mirror_[static_cast<size_t>(row.slot.value)];
    const size_t scores_before = scores_.size();
    for (int32_t i = 0; row.prompt_logprobs && i < row.num_tokens; ++i) {
      const int32_t next = row.position + i + 1;
      if (next >= slot.num_prompt_tokens) break;
      const int32_t id = (*slot.tokens)[static_cast<size_t>(next)];
      const auto logit_row = static_cast<int32_t>(logit_rows_.size());
      scores_.push_back({.logit_row = logit_row, .id = id, .top = slot.sampling->prompt_logprobs});
      logit_rows_.push_back(first_row + i);
      step.score_ids.push_back(id);
    }
    step.num_scores.push_back(static_cast<int32_t>(scores_.size() - scores_before));
    step.logprobs.push_back(slot.sampling->logprobs >= 0);
    if (row.sample) {
      const auto logit_row = static_cast<int32_t>(graph ? &row - plan.rows.data() : std::ssize(logit_rows_));
      samples_.push_back({.slot = row.slot.value, .logit_row = logit_row, .mask_row = row.masked ? masks++ : -1});
      logit_rows_.push_back(first_row + row.num_tokens - 1);
    }
    first_row += row.num_tokens;
  }
}

// Bias and stop ids, and the tokens that penalties count: rare, so they have one buffer and wait for its last use.
void CudaWorker::upload_lists(const SequenceStart& start) {
  const SamplingParams& p = *start.sampling;
  const SlotParams sizes = slot_params(p);
  if (sizes.num_bias + sizes.num_stops == 0 && sizes.penalties == 0) return;
  lists_sent_.wait();
  auto* ids = reinterpret_cast<int32_t*>(lists_host_.data());
  auto* bias = reinterpret_cast<float*>(ids + kMaxListed);
  int32_t* tokens = ids + 2 * kMaxListed;
  for (int32_t i = 0; i < sizes.num_bias; ++i) std::tie(ids[i], bias[i]) = p.logit_bias[static_cast<size_t>(i)];
  std::copy_n(p.stop_ids.begin(), sizes.num_stops, ids + sizes.num_bias);
  const auto send = [this](void* to, const void* from, int32_t count) {
    if (count > 0)
      cuda_ok(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * 4, cudaMemcpyHostToDevice, stream()),
              "sending sampling lists");
  };
  const int64_t at = static_cast<int64_t>(start.slot.value) * kMaxListed;
  send(slots_.listed_ids + at, ids, sizes.num_bias + sizes.num_stops);
  send(slots_.listed_bias + at, bias, sizes.num_bias);
  if (sizes.penalties != 0) {
    const auto count = static_cast<int32_t>(start.tokens->size());
    std::copy(start.tokens->begin(), start.tokens->end(), tokens);
    auto* there = reinterpret_cast<int32_t*>(lists_device_.data());
    send(there, tokens, count);
    cuda_ok(count_tokens(slots_, start.slot.value, there, count, start.num_prompt_tokens, stream()), "counting tokens");
  }
  lists_sent_.record(ops_->owned_stream());
}

Tensor CudaWorker::forward(const StepPlan& plan, const PackedPlan& packed) {
  host_rows_.clear();
  int32_t rows = 0;
  for (const PlanRow& row : plan.rows) {
    const SlotMirror& slot = mirror_[static_cast<size_t>(row.slot.value)];
    const Admission admission{.num_prompt_tokens = slot.num_prompt_tokens,
                              .num_cached_tokens = slot.num_cached_tokens,
                              .num_tokens = static_cast<int32_t>(slot.tokens->size())};
    host_rows_.push_back({.first_row = rows,
                          .num_tokens = row.num_tokens,
                          .position = row.position,
                          .form = form_of(row, admission, *model_, config_.deterministic)});
    rows += row.num_tokens;
  }
  Ops& ops = observed_ ? *observed_ : *ops_;
  ops.begin_step();
  return model_->forward(device_batch(batch_, sequences_, host_rows_, rows, packed.logit_rows), ops, pool());
}

void CudaWorker::upload_masks(const StepPlan& plan) {
  const bool masked = std::any_of(plan.rows.begin(), plan.rows.end(), [](const PlanRow& row) { return row.masked; });
  if (!masked) return;
  // A grammar advances by the results before, and the masks' memory is free once those are there.
  while (!in_flight_.empty()) finish();
  const auto words = static_cast<size_t>(slots_.bit_words());
  auto* to = reinterpret_cast<uint32_t*>(masks_host_.data());
  for (const PlanRow& row : plan.rows) {
    if (!row.sample || !row.masked) continue;
    const std::vector<uint32_t> mask = masks_.wait(plan.step, row.slot);
    CHECK(mask.empty() || mask.size() >= words, "a mask of ", mask.size(), " words");
    if (mask.empty())
      std::fill_n(to, words, ~0u);  // the sequence has ended: nobody reads its id
    else
      std::copy_n(mask.begin(), words, to);
    to += words;
  }
  const size_t bytes = reinterpret_cast<uint8_t*>(to) - masks_host_.data();
  cuda_ok(cudaMemcpyAsync(masks_device_.data(), masks_host_.data(), bytes, cudaMemcpyHostToDevice, stream()),
          "sending masks");
}

void CudaWorker::sample(const PackedPlan& packed, const Tensor& logits, int32_t turn) {
  auto* results = reinterpret_cast<SampleResult*>(results_device_.data());
  auto* scores = reinterpret_cast<TokenScore*>(results + config_.max_sequences);
  cuda_ok(score_rows(packed.scores.data(), static_cast<int32_t>(packed.scores.size()),
                     static_cast<const float*>(logits.data), slots_.vocab, scores, stream()),
          "scoring prompts");
  cuda_ok(sample_rows({.samples = packed.samples.data(),
                       .count = static_cast<int32_t>(packed.samples.size()),
                       .logits = static_cast<const float*>(logits.data),
                       .masks = reinterpret_cast<const uint32_t*>(masks_device_.data()),
                       .work = reinterpret_cast<float*>(work_.data()),
                       .results = results},
                      slots_, stream()),
          "sampling");
  const auto fetch = [&](const void* from, size_t bytes) {
    uint8_t* to = results_host_[turn].data() + (static_cast<const uint8_t*>(from) - results_device_.data());
    if (bytes > 0) cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream()), "fetching results");
  };
  fetch(results, packed.samples.size() * sizeof(SampleResult));
  fetch(scores, packed.scores.size() * sizeof(TokenScore));
}

TokenLogprobs token_logprobs(int32_t id, const TokenScore& score) {
  TokenLogprobs out{.id = id, .logprob = score.logprob, .rank = score.rank, .top = {}};
  for (int32_t i = 0; i < score.num_top; ++i) out.top.emplace_back(score.top_ids[i], score.top_logprobs[i]);
  return out;
}

void CudaWorker::finish() {
  StepInFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  done_[static_cast<size_t>(step.turn)].wait();
  const Status status = device_status();
  CHECK(status.ok(), "device lost in step ", step.plan.step, ", rank 0: ", status.error().message);
  CHECK(num_device_allocations() == allocations_, "memory was reserved after the start, in step ", step.plan.step);
  StepResult result{.step = step.plan.step, .rows = {}};
  size_t sample = 0, score = 0;
  for (size_t i = 0; i < step.plan.rows.size(); ++i) result.rows.push_back(row_result(step, i, sample, score));
  masks_.drop(step.plan.step);
  on_result_(std::move(result));
}

RowResult CudaWorker::row_result(const StepInFlight& step, size_t index, size_t& sample, size_t& score) const {
  const PlanRow& row = step.plan.rows[index];
  const auto* samples = reinterpret_cast<const SampleResult*>(results_host_[step.turn].data());
  const auto* scores = reinterpret_cast<const TokenScore*>(samples + config_.max_sequences);
  RowResult out{.slot = row.slot, .sequence = row.sequence, .ids = {}, .logprobs = {}, .prompt_logprobs = {}};
  for (int32_t i = 0; i < step.num_scores[index]; ++i, ++score)
    out.prompt_logprobs.push_back(token_logprobs(step.score_ids[score], scores[score]));
  if (!row.sample) return out;
  const SampleResult& sampled = samples[sample++];
  out.finite = sampled.finite != 0;
  if (!out.finite) return out;
  out.ids.push_back(sampled.id);
  if (step.logprobs[index]) out.logprobs.push_back(token_logprobs(sampled.id, sampled.score));
  return out;
}

}  // namespace

Result<std::unique_ptr<Worker>> make_cuda_worker(const WorkerConfig& config,
                                                 std::function<void(StepResult&&)> on_result) {
  return CudaWorker::create(config, std::move(on_result));
}

}  // namespace perigee
