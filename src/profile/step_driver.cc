#include "profile/step_driver.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "engine/rank_group.h"

namespace perigee {

Result<std::unique_ptr<StepDriver>> StepDriver::create(RankConfig config, const StepShape& shape,
                                                       std::vector<OpObserver*> observers) {
  const int32_t chunk = std::max(config.limits.max_step_tokens / kBlockTokens * kBlockTokens, kBlockTokens);
  config.limits.max_sequences = shape.batch;
  const int32_t decode_tokens = shape.batch * (1 + config.limits.num_drafts);
  config.limits.max_step_tokens = shape.prefill ? shape.batch * shape.context : std::max(chunk, decode_tokens);
  std::unique_ptr<StepDriver> driver(new StepDriver(shape, config));
  ASSIGN_OR_RETURN(
      driver->ranks_,
      RankGroup::create({.rank = config, .observers = std::move(observers)}, [d = driver.get()](Step&& step) {
        const auto finite = [](const RowResult& row) { return row.finite; };
        StepResult& result = step.result;
        Done done{.at_s = system_clock().now_s(),
                  .finite = std::all_of(result.rows.begin(), result.rows.end(), finite),
                  .device_lost = std::move(result.device_lost)};
        for (const RowResult& row : result.rows) done.num_ids.push_back(static_cast<int32_t>(row.ids.size()));
        d->done_.push_reserved(std::move(done));
      }));
  RETURN_IF_ERROR(driver->check_room(shape.batch));
  driver->make_prompts();
  if (!shape.prefill) RETURN_IF_ERROR(driver->fill_caches(chunk));
  return driver;
}

StepDriver::StepDriver(const StepShape& shape, RankConfig& config)
    : shape_(shape),
      num_drafts_(config.limits.num_drafts),
      dcp_size_(config.limits.dcp_size),
      num_blocks_(static_cast<size_t>(config.limits.max_sequences)) {
  for (int32_t i = 0; i < shape.batch; ++i) {
    SamplingParams sampling;
    sampling.temperature = shape.temperature;
    sampling.seed = static_cast<uint64_t>(i);
    sampling.max_tokens = INT32_MAX;
    sampling_.push_back(std::make_shared<const SamplingParams>(sampling));
  }
}

void StepDriver::make_prompts() {
  Rng rng(1);
  prompts_.clear();
  for (int32_t i = 0; i < shape_.batch; ++i) {
    std::vector<int32_t> prompt(static_cast<size_t>(shape_.context));
    for (int32_t& id : prompt) id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(ranks_->model().vocab)));
    prompts_.push_back(std::make_shared<const std::vector<int32_t>>(std::move(prompt)));
  }
}

int32_t StepDriver::blocks_per_sequence() const {
  const int32_t tokens = shape_.context + (shape_.prefill ? 0 : shape_.max_steps * (1 + num_drafts_) + num_drafts_);
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

int32_t StepDriver::pages_per_sequence() const {
  return (blocks_per_sequence() + dcp_size_ - 1) / dcp_size_;
}

Status StepDriver::check_room(int32_t num_states) const {
  const int64_t tokens = static_cast<int64_t>(blocks_per_sequence()) * kBlockTokens;
  const int64_t pages = int64_t{shape_.batch} * pages_per_sequence() + int64_t{num_states} * ranks_->state_pages();
  const int64_t positions = ranks_->model().max_positions;
  if (tokens > positions)
    return bad_input(fmt::format("context and steps take {} positions, the model has {}", tokens, positions),
                     "context");
  if (pages > ranks_->num_pages())
    return bad_input(
        fmt::format("batch {} at this context takes {} pages, the cache has {}: multiply --kv-cache-memory-bytes by {}",
                    shape_.batch, pages, ranks_->num_pages(), pages / ranks_->num_pages() + 1),
        "kv-cache-memory-bytes");
  return {};
}

// From the last page down: what restart() takes for cached blocks never was a state, which may not be finite there.
// That of number `batch` is for its checkpoint.
std::vector<Placement> StepDriver::state_at(int32_t sequence) const {
  std::vector<Placement> pages;
  for (int32_t index = 0; index < dcp_size_; ++index)
    for (int32_t i = 0; i < ranks_->state_pages(); ++i)
      pages.push_back({PageId(ranks_->num_pages() - (sequence + 1) * ranks_->state_pages() + i), index});
  return pages;
}

SequenceStart& StepDriver::start(int32_t sequence, StepPlan& plan) {
  num_blocks_[static_cast<size_t>(sequence)] = 0;
  plan.starts.push_back({.slot = SlotId(sequence),
                         .sequence = SequenceId(started_ + sequence),
                         .tokens = prompts_[static_cast<size_t>(sequence)],
                         .num_prompt_tokens = shape_.context,
                         .sampling = sampling_[static_cast<size_t>(sequence)],
                         .state_pages = state_at(sequence)});
  return plan.starts.back();
}

// Blocks for all positions below `end`, and for as many more as a draft runs: no step drafts less than another.
void StepDriver::append_blocks(int32_t sequence, int32_t end, StepPlan& plan) {
  if (!shape_.prefill) end += num_drafts_;
  for (int32_t& block = num_blocks_[static_cast<size_t>(sequence)]; block * kBlockTokens < end; ++block)
    plan.appends.push_back({.slot = SlotId(sequence),
                            .block_index = block,
                            .place = {PageId(sequence * pages_per_sequence() + block / dcp_size_), block % dcp_size_}});
}

void StepDriver::prefill_row(int32_t sequence, int32_t position, int32_t num_tokens, StepPlan& plan) {
  append_blocks(sequence, position + num_tokens, plan);
  plan.rows.push_back({.slot = SlotId(sequence),
                       .sequence = SequenceId(started_ + sequence),
                       .position = PositionRange::at(position),
                       .work = Prefill{.tokens_offset = static_cast<int32_t>(plan.tokens.size()),
                                       .num_tokens = num_tokens,
                                       .sample = position + num_tokens == shape_.context}});
  const auto first = prompts_[static_cast<size_t>(sequence)]->begin() + position;
  plan.tokens.insert(plan.tokens.end(), first, first + num_tokens);
}

Status StepDriver::fill_caches(int32_t chunk_tokens) {
  for (int32_t sequence = 0; sequence < shape_.batch; ++sequence) {
    for (int32_t position = 0; position < shape_.context;) {
      const int32_t n = std::min(chunk_tokens, shape_.context - position);
      StepPlan plan{.step = StepId(step_++)};
      if (position == 0) start(sequence, plan);
      prefill_row(sequence, position, n, plan);
      ranks_->submit({std::move(plan)});
      RETURN_IF_ERROR(wait());
      position += n;
    }
  }
  begin_decode();
  return {};
}

Status StepDriver::restart(int32_t batch, int32_t context) {
  CHECK(!shape_.prefill && batch <= std::ssize(num_blocks_), batch, " sequences");
  started_ += shape_.batch;
  shape_.batch = batch;
  shape_.context = context;
  RETURN_IF_ERROR(check_room(batch + 1));
  make_prompts();
  return fill_as_if_cached();
}

Status StepDriver::fill_as_if_cached() {
  const int32_t cached = (shape_.context - 1) / kBlockTokens * kBlockTokens;
  const bool has_state = ranks_->state_pages() > 0 && cached > 0;
  if (has_state) {  // some state, as the checkpoint of all
    StepPlan plan{.step = StepId(step_++)};
    start(0, plan).state_pages = state_at(shape_.batch);
    prefill_row(0, 0, kBlockTokens, plan);
    ranks_->submit({std::move(plan)});
    RETURN_IF_ERROR(wait());
  }
  started_ += shape_.batch;
  for (int32_t sequence = 0; sequence < shape_.batch; ++sequence) {
    StepPlan plan{.step = StepId(step_++)};
    SequenceStart& begun = start(sequence, plan);
    begun.num_cached_tokens = cached;
    if (has_state) begun.checkpoint = state_at(shape_.batch);
    prefill_row(sequence, cached, shape_.context - cached, plan);
    ranks_->submit({std::move(plan)});
    RETURN_IF_ERROR(wait());
  }
  begin_decode();
  return {};
}

void StepDriver::begin_decode() {
  positions_.assign(static_cast<size_t>(shape_.batch), PositionRange::at(shape_.context));
}

// Until a result says more, a row keeps one id at least and all of them at most.
void StepDriver::confirm(const Done& done) {
  if (shape_.prefill) {
    run_tokens_ += int64_t{shape_.batch} * shape_.context;
    return;
  }
  for (size_t i = 0; i < positions_.size(); ++i) {
    positions_[i].least += done.num_ids[i] - 1;
    positions_[i].most -= 1 + num_drafts_ - done.num_ids[i];
    run_tokens_ += done.num_ids[i];
  }
}

StepPlan StepDriver::next_plan(bool eager) {
  StepPlan plan{.step = StepId(step_++), .eager = eager};
  if (shape_.prefill) {
    started_ += shape_.batch;
    for (int32_t i = 0; i < shape_.batch; ++i) {
      start(i, plan);
      prefill_row(i, 0, shape_.context, plan);
    }
    return plan;
  }
  for (int32_t i = 0; i < shape_.batch; ++i) {
    PositionRange& position = positions_[static_cast<size_t>(i)];
    append_blocks(i, position.most + 1 + num_drafts_, plan);
    plan.rows.push_back({.slot = SlotId(i),
                         .sequence = SequenceId(started_ + i),
                         .position = position,
                         .work = num_drafts_ > 0 ? RowWork(Verify{num_drafts_}) : RowWork(Decode())});
    ++position.least;
    position.most += 1 + num_drafts_;
  }
  plan.num_decode_rows = shape_.batch;
  return plan;
}

Result<StepDriver::Done> StepDriver::wait() {
  Done done = *done_.pop();
  last_result_s_ = done.at_s;
  if (!done.device_lost.empty()) return Error(Code::kDeviceLost, std::move(done.device_lost));
  if (!done.finite) return Error(Code::kUnavailable, "the model's logits are not finite");
  return done;
}

Result<std::vector<double>> StepDriver::run(int32_t count, bool eager) {
  std::vector<double> seconds;
  double last_s = system_clock().now_s();
  int32_t submitted = 0;
  run_tokens_ = 0;
  for (int32_t finished = 0; finished < count; ++finished) {
    for (; submitted < std::min(count, finished + kMaxPlansInFlight); ++submitted) ranks_->submit({next_plan(eager)});
    ASSIGN_OR_RETURN(const Done done, wait());
    confirm(done);
    seconds.push_back(done.at_s - last_s);
    last_s = done.at_s;
  }
  return seconds;
}

}  // namespace perigee
