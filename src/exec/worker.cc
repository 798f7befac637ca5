#include "exec/worker.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "base/cgroup.h"
#include "base/log.h"
#include "base/memory_text.h"
#include "exec/plan_worker.h"
#include "exec/sampler.h"
#include "ops/ops.h"

namespace perigee {
namespace {

Result<std::unique_ptr<Ops>> make_ops(const WorkerConfig& config) {
  if (config.device == Device::kRef) return make_ref_ops();
  const int threads = config.num_threads > 0 ? config.num_threads : available_cores();
  auto ops = make_cpu_ops({.num_threads = threads, .isa = config.isa});
  if (ops.ok()) log_info("backend ", (*ops)->name(), ", ", threads, threads == 1 ? " thread" : " threads");
  return ops;
}

class HostWorker final : public PlanWorker {
 public:
  static Result<std::unique_ptr<Worker>> create(const WorkerConfig& config, OnResult on_result);
  using PlanWorker::PlanWorker;
  ~HostWorker() override { end(); }

 private:
  Status reserve();  // the page pool, and what recurrent models have beside it
  void run() override;
  void execute(const StepPlan& plan);
  void start_state(const SequenceStart& start);
  uint8_t* page(const Placement& place) { return pool_memory_.data() + place.page.value * layout_.page_bytes(); }
  RowResult finish_row(const StepPlan& plan, size_t index, const Tensor& logits);
  void prompt_logprobs(const PlanRow& row, const Slot& slot, int32_t first, const Tensor& logits, RowResult& out);

  Buffer pool_memory_, ring_memory_;
  std::vector<uint8_t> zero_page_;  // recurrent models
  std::unique_ptr<Sampler> sampler_;
};

// What this process may have: the machine's memory, or less where a container or a shell says so.
int64_t host_memory_bytes() {
  int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  bytes = std::min(bytes, cgroup_memory_bytes());
  rlimit shell{};
  if (getrlimit(RLIMIT_AS, &shell) == 0 && shell.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, static_cast<int64_t>(shell.rlim_cur));
  return bytes;
}

Status HostWorker::reserve() {
  RETURN_IF_ERROR(set_pool(config_.cache_bytes));
  const int64_t bytes = page_pool_bytes() + (state_pages() > 0 ? ring_bytes() : 0);
  if (!Buffer::can_make(static_cast<size_t>(bytes)))
    return bad_input(
        str_cat("the system does not give ", memory_text(bytes), " for the cache beside ",
                memory_text(model_->info().weight_bytes),
                " of weights and what the program takes; this process may have ", memory_text(host_memory_bytes()),
                ": lower --kv-cache-memory-bytes, or raise the limit (ulimit -v)"),
        "kv-cache-memory-bytes");
  pool_memory_ = ops_->make_buffer(static_cast<size_t>(page_pool_bytes()));
  if (state_pages() > 0) {
    ring_memory_ = ops_->make_buffer(static_cast<size_t>(ring_bytes()));
    zero_page_.resize(static_cast<size_t>(layout_.page_bytes()));
  }
  return {};
}

Result<std::unique_ptr<Worker>> HostWorker::create(const WorkerConfig& config, OnResult on_result) {
  if (config.cache_bytes > host_memory_bytes())
    return bad_input(
        str_cat("the cache of ", memory_text(config.cache_bytes), " is over the memory that this process may have, ",
                memory_text(host_memory_bytes()), ": lower --kv-cache-memory-bytes"),
        "kv-cache-memory-bytes");
  WorkerConfig bounded = config;
  bounded.load.memory_bytes = host_memory_bytes() - config.cache_bytes;
  auto worker = std::make_unique<HostWorker>(bounded, std::move(on_result));
  ASSIGN_OR_RETURN(auto ops, make_ops(config));
  RETURN_IF_ERROR(worker->load(std::move(ops)));
  RETURN_IF_ERROR(worker->reserve());
  worker->sampler_ = std::make_unique<Sampler>(worker->model().info().vocab);
  worker->begin();
  return std::unique_ptr<Worker>(std::move(worker));
}

void HostWorker::run() {
  while (std::optional<StepPlan> plan = plans_.pop()) {
    if (plan->step.value == config_.fail_at_step) return lose_device(plan->step, "a test's fault");
    execute(*plan);
  }
}

void HostWorker::execute(const StepPlan& plan) {
  const Batch& batch = build(plan);
  for (const SequenceStart& start : plan.starts) start_state(start);
  Ops& ops = step_ops();
  ops.begin_step();
  const PagePool pool{
      .base = pool_memory_.data(), .layout = layout_, .ring = ring_memory_.data(), .ring_tokens = kRingTokens};
  const Tensor logits = model_->forward(batch, ops, pool);
  StepResult result{.step = plan.step, .rows = {}};
  result.rows.reserve(plan.rows.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    slots_->advance(plan.rows[i].slot, plan.rows[i].num_tokens(), batch.sequences[i].commit_all);
    result.rows.push_back(finish_row(plan, i, logits));
    for (const StateCheckpoint& checkpoint : batch.sequences[i].checkpoints)
      result.rows.back().checkpoints.push_back(checkpoint.position);
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
  RowResult out{.slot = row.slot, .sequence = row.sequence};
  const int32_t first = builder_->logit_row(index);
  if (row.scores_prompt()) prompt_logprobs(row, slot, first, logits, out);
  if (!row.samples()) return out;

  const int32_t logit_row = row.scores_prompt() ? first + row.num_tokens() - 1 : first;
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
  for (int32_t i = 0; i < row.num_tokens(); ++i) {
    const int32_t next = row.position.least + i + 1;
    if (next >= slot.num_prompt_tokens) break;
    const std::span<const float> logit_row(logits.row<const float>(first + i), static_cast<size_t>(logits.cols));
    out.prompt_logprobs.push_back(
        sampler_->token_logprobs(logit_row, (*slot.tokens)[static_cast<size_t>(next)], slot.sampling->prompt_logprobs));
  }
}

}  // namespace

Result<std::unique_ptr<Worker>> Worker::create(const WorkerConfig& config,
                                               std::function<void(StepResult&&)> on_result) {
  CHECK(config.device != Device::kCuda);
  return HostWorker::create(config, std::move(on_result));
}

}  // namespace perigee
