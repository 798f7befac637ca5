#include "exec/worker.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/queue.h"
#include "exec/batch_builder.h"
#include "exec/sampler.h"
#include "exec/slots.h"
#include "ops/ops.h"

namespace perigee {
namespace {

constexpr int32_t kRingTokens = 1;  // without speculation one token a sequence is uncertain at a time

Result<std::unique_ptr<Ops>> make_ops(const WorkerConfig& config) {
  if (config.device == Device::kRef) return make_ref_ops();
  return make_cpu_ops(
      {.num_threads = config.num_threads, .allow_amx = config.allow_amx, .allow_avx512 = config.allow_avx512});
}

}  // namespace

struct Worker::Impl {
  WorkerConfig config;
  std::function<void(StepResult&&)> on_result;
  std::unique_ptr<Ops> ops;
  std::unique_ptr<Model> model;
  CacheLayout layout;
  Buffer pool_memory, ring_memory;
  std::vector<uint8_t> zero_page;  // recurrent models
  int32_t num_pages = 0;
  std::unique_ptr<Slots> slots;
  std::unique_ptr<BatchBuilder> builder;
  std::unique_ptr<Sampler> sampler;

  BoundedQueue<StepPlan> plans{kMaxPlansInFlight};
  std::mutex masks_mutex;
  std::condition_variable masks_ready;
  std::vector<StepMasks> masks;
  std::atomic<double> build_us{0};
  std::thread thread;

  void run();
  void execute(const StepPlan& plan);
  void start_state(const SequenceStart& start);
  uint8_t* page(PageId page) { return pool_memory.data() + page.value * layout.page_bytes(); }
  RowResult finish_row(const StepPlan& plan, size_t index, const Tensor& logits);
  void prompt_logprobs(const PlanRow& row, const Slot& slot, int32_t first, const Tensor& logits, RowResult& out);
  std::vector<uint32_t> wait_mask(StepId step, SlotId slot);
  void drop_masks(StepId step);
};

Result<std::unique_ptr<Worker>> Worker::create(const WorkerConfig& config,
                                               std::function<void(StepResult&&)> on_result) {
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  impl->on_result = std::move(on_result);
  ASSIGN_OR_RETURN(impl->ops, make_ops(config));
  ASSIGN_OR_RETURN(impl->model, load_model(config.load, *impl->ops));
  impl->layout = impl->model->cache_layout(impl->ops->activation_dtype());
  const int64_t pages = config.cache_bytes / impl->layout.page_bytes();
  const int64_t least = 2 + impl->layout.state_pages();
  if (pages < least)
    return bad_input(str_cat("the cache of ", config.cache_bytes, " bytes holds ", pages, " pages of ",
                             impl->layout.page_bytes(), " bytes; raise it to at least ", least,
                             ": two blocks and a recurrent state of ", impl->layout.state_pages()),
                     "kv-cache-memory-bytes");
  impl->num_pages = static_cast<int32_t>(std::min<int64_t>(pages, INT32_MAX));
  impl->pool_memory = impl->ops->make_buffer(static_cast<size_t>(impl->num_pages * impl->layout.page_bytes()));
  if (impl->layout.state_pages() > 0) {
    const int64_t ring_bytes = config.max_sequences * impl->layout.ring_slot_bytes(kRingTokens);
    impl->ring_memory = impl->ops->make_buffer(static_cast<size_t>(ring_bytes));
    impl->zero_page.resize(static_cast<size_t>(impl->layout.page_bytes()));
  }
  const ModelInfo& info = impl->model->info();
  const int64_t max_blocks = std::min<int64_t>(impl->num_pages, info.max_positions / kBlockTokens + 1);
  impl->slots = std::make_unique<Slots>(config.max_sequences, info.vocab, static_cast<int32_t>(max_blocks));
  impl->builder = std::make_unique<BatchBuilder>(*impl->model, config.deterministic);
  impl->sampler = std::make_unique<Sampler>(info.vocab);
  impl->thread = std::thread([p = impl.get()] { p->run(); });
  return std::unique_ptr<Worker>(new Worker(std::move(impl)));
}

Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Worker::~Worker() {
  impl_->plans.close();
  impl_->thread.join();
}

void Worker::submit(StepPlan plan) {
  CHECK(impl_->plans.try_push(std::move(plan)), "more than ", kMaxPlansInFlight, " plans in flight");
}

void Worker::set_masks(StepMasks masks) {
  {
    std::lock_guard lock(impl_->masks_mutex);
    impl_->masks.push_back(std::move(masks));
  }
  impl_->masks_ready.notify_all();
}

const Model& Worker::model() const {
  return *impl_->model;
}
int32_t Worker::num_pages() const {
  return impl_->num_pages;
}
int32_t Worker::state_pages() const {
  return static_cast<int32_t>(impl_->layout.state_pages());
}
double Worker::last_build_us() const {
  return impl_->build_us.load(std::memory_order_relaxed);
}

void Worker::Impl::run() {
  while (std::optional<StepPlan> plan = plans.pop()) execute(*plan);
}

void Worker::Impl::execute(const StepPlan& plan) {
  const double begin = system_clock().now_s();
  for (const SequenceStart& start : plan.starts) slots->start(start);
  for (const BlockAppend& append : plan.appends) slots->append(append);
  const Batch& batch = builder->build(plan, *slots);
  build_us.store((system_clock().now_s() - begin) * 1e6, std::memory_order_relaxed);

  for (const SequenceStart& start : plan.starts) start_state(start);
  ops->begin_step();
  const PagePool pool{
      .base = pool_memory.data(), .layout = layout, .ring = ring_memory.data(), .ring_tokens = kRingTokens};
  const Tensor logits = model->forward(batch, *ops, pool);
  StepResult result{.step = plan.step, .rows = {}};
  result.rows.reserve(plan.rows.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    slots->advance(plan.rows[i].slot, plan.rows[i].num_tokens, batch.sequences[i].commit_all);
    result.rows.push_back(finish_row(plan, i, logits));
  }
  drop_masks(plan.step);
  on_result(std::move(result));
}

// The recurrent state before the sequence's first row: a copy of the checkpoint that it starts from, or zeros.
void Worker::Impl::start_state(const SequenceStart& start) {
  CHECK(static_cast<int64_t>(start.state_pages.size()) == layout.state_pages(), "sequence ", start.sequence, " has ",
        start.state_pages.size(), " state pages");
  CHECK(start.checkpoint.empty() == (start.state_pages.empty() || start.num_cached_tokens == 0), "sequence ",
        start.sequence, " starts at ", start.num_cached_tokens, " without the state there");
  for (size_t i = 0; i < start.state_pages.size(); ++i) {
    const uint8_t* from = start.checkpoint.empty() ? zero_page.data() : page(start.checkpoint[i]);
    ops->copy(page(start.state_pages[i]), from, static_cast<size_t>(layout.page_bytes()));
  }
}

RowResult Worker::Impl::finish_row(const StepPlan& plan, size_t index, const Tensor& logits) {
  const PlanRow& row = plan.rows[index];
  Slot& slot = (*slots)[row.slot];
  RowResult out{.slot = row.slot, .sequence = row.sequence, .ids = {}, .logprobs = {}, .prompt_logprobs = {}};
  const int32_t first = builder->logit_row(index);
  if (row.prompt_logprobs) prompt_logprobs(row, slot, first, logits, out);
  if (!row.sample) return out;

  const int32_t logit_row = row.prompt_logprobs ? first + row.num_tokens - 1 : first;
  const std::vector<uint32_t> mask = row.masked ? wait_mask(plan.step, row.slot) : std::vector<uint32_t>();
  const SamplerRow sampled_row{
      .logits = {logits.row<const float>(logit_row), static_cast<size_t>(logits.cols)},
      .params = slot.sampling.get(),
      .num_outputs = slot.num_outputs,
      .output_counts = slot.output_counts,
      .seen = slot.seen,
      .mask = mask,
  };
  SampledToken token = sampler->sample(sampled_row);
  out.finite = token.finite;
  if (!token.finite) {
    slots->accept(row.slot, 0);  // the next plan may be in flight already: its row needs an id that exists
    return out;
  }
  slots->accept(row.slot, token.id);
  out.ids.push_back(token.id);
  if (slot.sampling->logprobs >= 0) out.logprobs.push_back(std::move(token.logprobs));
  return out;
}

void Worker::Impl::prompt_logprobs(const PlanRow& row, const Slot& slot, int32_t first, const Tensor& logits,
                                   RowResult& out) {
  for (int32_t i = 0; i < row.num_tokens; ++i) {
    const int32_t next = row.position + i + 1;
    if (next >= slot.num_prompt_tokens) break;
    const std::span<const float> logit_row(logits.row<const float>(first + i), static_cast<size_t>(logits.cols));
    out.prompt_logprobs.push_back(
        sampler->token_logprobs(logit_row, (*slot.tokens)[static_cast<size_t>(next)], slot.sampling->prompt_logprobs));
  }
}

std::vector<uint32_t> Worker::Impl::wait_mask(StepId step, SlotId slot) {
  std::unique_lock lock(masks_mutex);
  std::vector<uint32_t> found;
  masks_ready.wait(lock, [&] {
    for (StepMasks& message : masks)
      for (RowMask& mask : message.rows)
        if (message.step == step && mask.slot == slot) {
          found = std::move(mask.words);
          return true;
        }
    return false;
  });
  return found;
}

void Worker::Impl::drop_masks(StepId step) {
  std::lock_guard lock(masks_mutex);
  std::erase_if(masks, [&](const StepMasks& message) { return message.step <= step; });
}

}  // namespace perigee
