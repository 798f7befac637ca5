#include "exec/worker.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/clock.h"
#include "base/queue.h"
#include "exec/batch_builder.h"
#include "exec/mask_box.h"
#include "exec/sampler.h"
#include "exec/slots.h"
#include "ops/observed_ops.h"

namespace perigee {
namespace {

constexpr int32_t kRingTokens = 1;  // without speculation one token a sequence is uncertain at a time

Result<std::unique_ptr<Ops>> make_ops(const WorkerConfig& config) {
  if (config.device == Device::kRef) return make_ref_ops();
  return make_cpu_ops(
      {.num_threads = config.num_threads, .allow_amx = config.allow_amx, .allow_avx512 = config.allow_avx512});
}

class HostWorker final : public Worker {
 public:
  static Result<std::unique_ptr<Worker>> create(const WorkerConfig& config,
                                                std::function<void(StepResult&&)> on_result);
  ~HostWorker() override {
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
  int32_t state_pages() const override { return static_cast<int32_t>(layout_.state_pages()); }
  double last_build_us() const override { return build_us_.load(std::memory_order_relaxed); }

 private:
  void run();
  void execute(const StepPlan& plan);
  void start_state(const SequenceStart& start);
  uint8_t* page(PageId page) { return pool_memory_.data() + page.value * layout_.page_bytes(); }
  RowResult finish_row(const StepPlan& plan, size_t index, const Tensor& logits);
  void prompt_logprobs(const PlanRow& row, const Slot& slot, int32_t first, const Tensor& logits, RowResult& out);

  WorkerConfig config_;
  std::function<void(StepResult&&)> on_result_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Ops> observed_;  // null without an observer
  std::unique_ptr<Model> model_;
  CacheLayout layout_;
  Buffer pool_memory_, ring_memory_;
  std::vector<uint8_t> zero_page_;  // recurrent models
  int32_t num_pages_ = 0;
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<BatchBuilder> builder_;
  std::unique_ptr<Sampler> sampler_;
  BoundedQueue<StepPlan> plans_{kMaxPlansInFlight};
  MaskBox masks_;
  std::atomic<double> build_us_{0};
  std::thread thread_;
};

Result<std::unique_ptr<Worker>> HostWorker::create(const WorkerConfig& config,
                                                   std::function<void(StepResult&&)> on_result) {
  auto worker = std::make_unique<HostWorker>();
  HostWorker& w = *worker;
  w.config_ = config;
  w.on_result_ = std::move(on_result);
  ASSIGN_OR_RETURN(w.ops_, make_ops(config));
  if (config.observer != nullptr) w.observed_ = observe_ops(*w.ops_, *config.observer);
  ASSIGN_OR_RETURN(w.model_, load_model(config.load, *w.ops_));
  w.layout_ = w.model_->cache_layout(w.ops_->activation_dtype());
  ASSIGN_OR_RETURN(w.num_pages_, count_pages(config.cache_bytes, w.layout_));
  w.pool_memory_ = w.ops_->make_buffer(static_cast<size_t>(w.num_pages_ * w.layout_.page_bytes()));
  if (w.layout_.state_pages() > 0) {
    const int64_t ring_bytes = config.max_sequences * w.layout_.ring_slot_bytes(kRingTokens);
    w.ring_memory_ = w.ops_->make_buffer(static_cast<size_t>(ring_bytes));
    w.zero_page_.resize(static_cast<size_t>(w.layout_.page_bytes()));
  }
  const ModelInfo& info = w.model_->info();
  const int64_t max_blocks = std::min<int64_t>(w.num_pages_, info.max_positions / kBlockTokens + 1);
  w.slots_ = std::make_unique<Slots>(config.max_sequences, info.vocab, static_cast<int32_t>(max_blocks));
  w.builder_ = std::make_unique<BatchBuilder>(*w.model_, config.deterministic);
  w.sampler_ = std::make_unique<Sampler>(info.vocab);
  w.thread_ = std::thread([&w] { w.run(); });
  return std::unique_ptr<Worker>(std::move(worker));
}

void HostWorker::run() {
  while (std::optional<StepPlan> plan = plans_.pop()) execute(*plan);
}

void HostWorker::execute(const StepPlan& plan) {
  const double begin = system_clock().now_s();
  for (const SequenceStart& start : plan.starts) slots_->start(start);
  for (const BlockAppend& append : plan.appends) slots_->append(append);
  const Batch& batch = builder_->build(plan, *slots_);
  build_us_.store((system_clock().now_s() - begin) * 1e6, std::memory_order_relaxed);

  for (const SequenceStart& start : plan.starts) start_state(start);
  Ops& ops = observed_ ? *observed_ : *ops_;
  ops.begin_step();
  const PagePool pool{
      .base = pool_memory_.data(), .layout = layout_, .ring = ring_memory_.data(), .ring_tokens = kRingTokens};
  const Tensor logits = model_->forward(batch, ops, pool);
  StepResult result{.step = plan.step, .rows = {}};
  result.rows.reserve(plan.rows.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    slots_->advance(plan.rows[i].slot, plan.rows[i].num_tokens, batch.sequences[i].commit_all);
    result.rows.push_back(finish_row(plan, i, logits));
  }
  masks_.drop(plan.step);
  on_result_(std::move(result));
}

// The recurrent state before the sequence's first row: a copy of the checkpoint that it starts from, or zeros.
void HostWorker::start_state(const SequenceStart& start) {
  CHECK(static_cast<int64_t>(start.state_pages.size()) == layout_.state_pages(), "sequence ", start.sequence, " has ",
        start.state_pages.size(), " state pages");
  CHECK(start.checkpoint.empty() == (start.state_pages.empty() || start.num_cached_tokens == 0), "sequence ",
        start.sequence, " starts at ", start.num_cached_tokens, " without the state there");
  for (size_t i = 0; i < start.state_pages.size(); ++i) {
    const uint8_t* from = start.checkpoint.empty() ? zero_page_.data() : page(start.checkpoint[i]);
    ops_->copy(page(start.state_pages[i]), from, static_cast<size_t>(layout_.page_bytes()));
  }
}

RowResult HostWorker::finish_row(const StepPlan& plan, size_t index, const Tensor& logits) {
  const PlanRow& row = plan.rows[index];
  Slot& slot = (*slots_)[row.slot];
  RowResult out{.slot = row.slot, .sequence = row.sequence, .ids = {}, .logprobs = {}, .prompt_logprobs = {}};
  const int32_t first = builder_->logit_row(index);
  if (row.prompt_logprobs) prompt_logprobs(row, slot, first, logits, out);
  if (!row.sample) return out;

  const int32_t logit_row = row.prompt_logprobs ? first + row.num_tokens - 1 : first;
  const std::vector<uint32_t> mask = row.masked ? masks_.wait(plan.step, row.slot) : std::vector<uint32_t>();
  const SamplerRow sampled_row{
      .logits = {logits.row<const float>(logit_row), static_cast<size_t>(logits.cols)},
      .params = slot.sampling.get(),
      .num_outputs = slot.num_outputs,
      .output_counts = slot.output_counts,
      .seen = slot.seen,
      .mask = mask,
  };
  SampledToken token = sampler_->sample(sampled_row);
  out.finite = token.finite;
  if (!token.finite) {
    slots_->accept(row.slot, 0);  // the next plan may be in flight already: its row needs an id that exists
    return out;
  }
  slots_->accept(row.slot, token.id);
  out.ids.push_back(token.id);
  if (slot.sampling->logprobs >= 0) out.logprobs.push_back(std::move(token.logprobs));
  return out;
}

void HostWorker::prompt_logprobs(const PlanRow& row, const Slot& slot, int32_t first, const Tensor& logits,
                                 RowResult& out) {
  for (int32_t i = 0; i < row.num_tokens; ++i) {
    const int32_t next = row.position + i + 1;
    if (next >= slot.num_prompt_tokens) break;
    const std::span<const float> logit_row(logits.row<const float>(first + i), static_cast<size_t>(logits.cols));
    out.prompt_logprobs.push_back(
        sampler_->token_logprobs(logit_row, (*slot.tokens)[static_cast<size_t>(next)], slot.sampling->prompt_logprobs));
  }
}

}  // namespace

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

Result<std::unique_ptr<Worker>> Worker::create(const WorkerConfig& config,
                                               std::function<void(StepResult&&)> on_result) {
  CHECK(config.device != Device::kCuda);
  return HostWorker::create(config, std::move(on_result));
}

}  // namespace perigee
