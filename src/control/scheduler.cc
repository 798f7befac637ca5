#include "control/scheduler.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "control/faults.h"
#include "control/scheduler_impl.h"

namespace perigee {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

bool in_order(const Sequence* a, const Sequence* b) {
  return a->before(*b);
}

void insert_in_order(std::vector<Sequence*>& list, Sequence& sequence) {
  list.insert(std::upper_bound(list.begin(), list.end(), &sequence, in_order), &sequence);
}

bool remove(std::vector<Sequence*>& list, Sequence& sequence) {
  const auto found = std::find(list.begin(), list.end(), &sequence);
  if (found == list.end()) return false;
  list.erase(found);
  return true;
}

SchedulerConfig checked(const SchedulerConfig& config) {
  const Status status = validate(config);
  CHECK(status.ok(), status.error().field, ": ", status.error().message);
  return config;
}

int32_t hit_granularity_blocks(const SchedulerConfig& config) {
  return config.deterministic ? std::lcm(config.attention_alignment, kBlockTokens) / kBlockTokens : 1;
}

// Where a chunk of a recurrent model ends can change the last bits of its state. So that its company does not decide
// that, chunks keep to the alignment wherever the budget has room for one beside all decode rows.
bool keeps_alignment(const SchedulerConfig& config) {
  const int64_t enough = int64_t{config.attention_alignment} + config.max_sequences;
  return config.deterministic || (config.state_pages > 0 && config.max_step_tokens >= enough);
}

// How many sequences may run: with a row of one token for each but one, the budget still has room for that one's
// smallest chunk. So the first prefill in order of service moves in every step, however many decode beside it.
int32_t num_slots(const SchedulerConfig& config) {
  const int32_t smallest_chunk = keeps_alignment(config) ? config.attention_alignment : 1;
  return std::min(config.max_sequences, config.max_step_tokens - smallest_chunk + 1);
}

CheckpointPolicy checkpoint_policy(const SchedulerConfig& config) {
  const int32_t granularity = hit_granularity_blocks(config);
  const auto tokens = [&](int32_t blocks) {
    return (blocks + granularity - 1) / granularity * granularity * kBlockTokens;
  };
  return {.granularity_tokens = granularity * kBlockTokens,
          .interval_tokens = tokens(config.checkpoint_interval_blocks),
          .turn_tokens = tokens(config.checkpoint_turn_blocks)};
}

}  // namespace

Status validate(const SchedulerConfig& config) {
  if (config.num_pages < 1) return bad_input("the pool has no page", "num_pages");
  if (config.max_sequences < 1) return bad_input("at least one sequence must run", "max_sequences");
  if (config.max_model_len < 2)
    return bad_input(str_cat("a context of ", config.max_model_len,
                             " has no room for a prompt and an output: raise --max-model-len"),
                     "max_model_len");
  if (config.attention_alignment < 1) return bad_input("must be positive", "attention_alignment");
  if (config.long_prefill_tokens < 0) return bad_input("must not be negative", "long_prefill_tokens");
  if (config.state_pages < 0 || config.state_pages >= config.num_pages)
    return bad_input("must leave pages for the blocks of a sequence", "state_pages");
  if (config.checkpoint_interval_blocks < 0) return bad_input("must not be negative", "checkpoint_interval_blocks");
  if (config.checkpoint_turn_blocks < 0) return bad_input("must not be negative", "checkpoint_turn_blocks");
  if (config.hash_bits < 1 || config.hash_bits > 128) return bad_input("must be in [1, 128]", "hash_bits");
  const int32_t least = config.deterministic ? config.attention_alignment : 1;
  if (config.max_step_tokens < least)
    return bad_input(str_cat("must be at least ", least, ", the smallest prefill chunk"), "max_step_tokens");
  if (config.attention_alignment > kPromptLogprobTokens)
    return bad_input(str_cat("must be at most ", kPromptLogprobTokens, ", the tokens of a chunk under prompt_logprobs"),
                     "attention_alignment");
  return {};
}

Scheduler::Impl::Impl(const SchedulerConfig& config)
    : config_(checked(config)),
      hit_blocks_(hit_granularity_blocks(config)),
      strict_alignment_(keeps_alignment(config)),
      policy_(checkpoint_policy(config)),
      index_(config.num_pages, config.hash_seed, config.hash_bits),
      pool_(config.num_pages, [this](PageId page) { page_evicted(page); }),
      checkpoints_(pool_),
      match_(index_),
      slots_(static_cast<size_t>(num_slots(config)), nullptr),
      next_deadline_s_(kNever) {
  for (int32_t slot = num_slots(config) - 1; slot >= 0; --slot) free_slots_.push_back(SlotId(slot));
  running_.reserve(slots_.size());
}

int32_t Scheduler::Impl::max_outputs(int64_t num_prompt, int64_t max_tokens) const {
  return static_cast<int32_t>(std::min<int64_t>(max_tokens, config_.max_model_len - num_prompt));
}

void Scheduler::Impl::submit(Submit submit) {
  CHECK(submit.prompt && submit.sampling && !submit.prompt->empty(), "sequence ", submit.sequence, " is incomplete");
  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.request = std::move(submit);
  sequence.input = sequence.request.prompt;
  sequence.max_outputs = max_outputs(sequence.num_prompt(), sequence.sampling().max_tokens);
  CHECK(sequence.max_outputs >= 1 && sequence.max_blocks() + config_.state_pages <= config_.num_pages, "sequence ",
        sequence.id(), " can never fit");
  const bool fresh = sequences_.emplace(sequence.id(), std::move(owned)).second;
  CHECK(fresh, "sequence ", sequence.id(), " is submitted twice");

  const auto leader = sequences_.find(sequence.request.leader);
  // Waiting for a leader that is served later would invert their order.
  const bool follows = config_.prefix_caching && leader != sequences_.end() && leader->second->before(sequence) &&
                       !leader->second->prompt_confirmed;
  if (follows) {
    leader->second->has_followers = true;
  } else {
    sequence.request.leader = {};
  }
  if (sequence.request.deadline_s > 0) next_deadline_s_ = std::min(next_deadline_s_, sequence.request.deadline_s);
  ++num_accepted_;
  enqueue(sequence);
}

void Scheduler::Impl::enqueue(Sequence& sequence) {
  insert_in_order(waiting_, sequence);
}

void Scheduler::Impl::cancel(const Cancel& cancel) {
  const auto found = sequences_.find(cancel.sequence);
  if (found == sequences_.end()) return;  // ended already: the events crossed
  Sequence& sequence = *found->second;
  SequenceUpdate& update = add_update(sequence);
  const bool lose = planted(Fault::kLostFinish) && !sequence.slot.valid();
  end(sequence, cancel.reason, update);
  if (lose) updates_.pop_back();
}

// Takes the sequence out of every list and frees it; its update, already among updates_, says how it ended.
void Scheduler::Impl::end(Sequence& sequence, FinishReason reason, SequenceUpdate& update) {
  update.finish = reason;
  if (sequence.slot.valid()) {
    stop_running(sequence);
  } else {
    CHECK(remove(waiting_, sequence), "sequence ", sequence.id(), " is in limbo");
  }
  release_followers(sequence);
  ++num_ended_;
  sequences_.erase(sequence.id());
}

// Gives up slot and pages, at once or when the plans in flight that touch them have returned.
void Scheduler::Impl::stop_running(Sequence& sequence) {
  CHECK(remove(running_, sequence), "sequence ", sequence.id(), " holds slot ", sequence.slot, " and does not run");
  const SlotId slot = std::exchange(sequence.slot, SlotId());
  at_slot(slot) = nullptr;
  const uint32_t plans = std::exchange(sequence.plans, 0u);
  std::vector<PageHandle> pages = take_all_pages(sequence);
  if (plans != 0 && !planted(Fault::kFreeUnderFlight)) {
    quarantine_.hold(plans, slot, std::move(pages));
  } else {
    release_back_to_front(pages);
    free_slots_.push_back(slot);
  }
}

void Scheduler::Impl::release_followers(Sequence& leader) {
  if (!std::exchange(leader.has_followers, false)) return;
  for (Sequence* sequence : waiting_)
    if (sequence->request.leader == leader.id()) sequence->request.leader = {};
}

void Scheduler::Impl::expire(double now_s) {
  if (now_s < next_deadline_s_) return;
  next_deadline_s_ = kNever;
  std::vector<Sequence*> expired;
  for (const auto* list : {&running_, &waiting_}) {
    for (Sequence* sequence : *list) {
      const double deadline_s = sequence->request.deadline_s;
      if (deadline_s <= 0) continue;
      if (deadline_s <= now_s) {
        expired.push_back(sequence);
      } else {
        next_deadline_s_ = std::min(next_deadline_s_, deadline_s);
      }
    }
  }
  for (Sequence* sequence : expired) end(*sequence, FinishReason::kDeadline, add_update(*sequence));
}

SequenceUpdate& Scheduler::Impl::add_update(const Sequence& sequence) {
  SequenceUpdate& update = updates_.emplace_back();
  update.sequence = sequence.id();
  update.num_cached_tokens = std::max(sequence.num_cached_tokens, 0);
  update.num_preemptions = sequence.num_preemptions;
  return update;
}

SchedulerGauges Scheduler::Impl::gauges() const {
  SchedulerGauges gauges = totals_;
  gauges.running = static_cast<int32_t>(running_.size());
  gauges.waiting = static_cast<int32_t>(waiting_.size());
  gauges.plans_in_flight = plans_in_flight();
  gauges.free_pages = pool_.num_free();
  gauges.cached_pages = pool_.num_cached();
  gauges.used_pages = pool_.num_used();
  gauges.total_pages = pool_.num_pages();
  gauges.latent_pages = pool_.num_owned(PageOwner::kLatent);
  gauges.state_pages = pool_.num_owned(PageOwner::kState);
  gauges.checkpoint_pages = pool_.num_owned(PageOwner::kCheckpoint);
  gauges.checkpoints = checkpoints_.size();
  gauges.blocks_hashed = index_.num_hashed();
  return gauges;
}

void Scheduler::Impl::check_sequence(const Sequence& sequence) const {
  const bool running = sequence.slot.valid();
  CHECK(running || (sequence.pages.empty() && sequence.state_pages.empty() && sequence.plans == 0 &&
                    sequence.scheduled == PositionRange()),
        "waiting sequence ", sequence.id(), " holds something");
  if (!running) return;
  CHECK(static_cast<int32_t>(sequence.state_pages.size()) == config_.state_pages, "sequence ", sequence.id(),
        " has no whole state");
  CHECK(slots_[static_cast<size_t>(sequence.slot.value)] == &sequence, "slot ", sequence.slot, " has another sequence");
  CHECK(sequence.num_confirmed <= sequence.scheduled.least && sequence.scheduled.least <= sequence.scheduled.most,
        "sequence ", sequence.id(), " is ahead of itself");
  CHECK(sequence.scheduled.most <= static_cast<int32_t>(sequence.pages.size()) * kBlockTokens, "sequence ",
        sequence.id(), " writes outside its pages");
  CHECK(sequence.num_outputs() + sequence.ids_in_flight <= sequence.max_outputs, "sequence ", sequence.id(),
        " samples too much");
  CHECK((sequence.plans == 0) == (sequence.scheduled == PositionRange::at(sequence.num_confirmed)), "sequence ",
        sequence.id(), " has lost a plan");
}

void Scheduler::Impl::check_integrity() const {
  pool_.check_integrity();
  check_lists();
  check_pages(0, pool_.num_pages());
  int32_t num_blocks = 0, num_checkpoint_pages = 0;
  for (int32_t i = 0; i < pool_.num_pages(); ++i) {
    num_blocks += index_.contains(PageId(i)) ? 1 : 0;
    num_checkpoint_pages += checkpoints_.block_of(PageId(i)).valid() ? 1 : 0;
  }
  CHECK(num_blocks == index_.size(), "the prefix index miscounts");
  CHECK(num_checkpoint_pages == checkpoints_.size() * config_.state_pages, "a checkpoint is not whole");
}

void Scheduler::Impl::check_some(int32_t num_pages) {
  check_lists();
  const int32_t first = next_to_check_;
  const int32_t end = std::min(first + num_pages, pool_.num_pages());
  for (int32_t page = first; page < end; ++page) pool_.check_page(PageId(page));
  check_pages(first, end);
  next_to_check_ = end < pool_.num_pages() ? end : 0;
}

void Scheduler::Impl::check_lists() const {
  CHECK(num_accepted_ - num_ended_ == static_cast<int64_t>(waiting_.size() + running_.size()),
        "a sequence is in limbo");
  CHECK(sequences_.size() == waiting_.size() + running_.size(), "a sequence is in no list");
  CHECK(std::is_sorted(waiting_.begin(), waiting_.end(), in_order), "the queue is out of order");
  CHECK(std::is_sorted(running_.begin(), running_.end(), in_order), "the running list is out of order");
  CHECK(static_cast<size_t>(quarantine_.num_slots()) + free_slots_.size() + running_.size() == slots_.size(),
        "a slot is lost");
  CHECK(quarantine_.empty() || plans_in_flight() > 0, "pages wait for no plan");
  for (const auto* list : {&running_, &waiting_})
    for (const Sequence* sequence : *list) check_sequence(*sequence);
}

// INV-1: every page is held as often as it is known to be, by holders of its own kind; what is published can be found.
void Scheduler::Impl::check_pages(int32_t first, int32_t end) const {
  std::vector<int32_t> holders(static_cast<size_t>(end - first), 0);
  const auto count = [&](PageId page) {
    if (page.value >= first && page.value < end) ++holders[static_cast<size_t>(page.value - first)];
  };
  const auto count_as = [&](PageOwner owner, const std::vector<PageHandle>& handles) {
    for (const PageHandle& handle : handles) {
      CHECK(pool_.owner(handle.page()) == owner, "page ", handle.page(), " is held under another type than it has");
      count(handle.page());
    }
  };
  for (const Sequence* sequence : running_) {
    count_as(PageOwner::kLatent, sequence->pages);
    count_as(PageOwner::kState, sequence->state_pages);
  }
  for (const InFlight& flight : flights_) {
    count_as(PageOwner::kCheckpoint, flight.traffic.copied);
    for (const WriteInFlight& write : flight.traffic.writes) count_as(PageOwner::kCheckpoint, write.pages);
  }
  quarantine_.for_each_page(count);
  for (int32_t i = first; i < end; ++i) {
    const PageId page(i);
    const int32_t known = holders[static_cast<size_t>(i - first)];
    CHECK(pool_.num_holders(page) == known, "page ", page, " has ", pool_.num_holders(page), " holders, ", known,
          " known");
    const PageId block = checkpoints_.block_of(page);
    const bool is_block = index_.contains(page);
    CHECK(pool_.is_published(page) == (is_block || block.valid()), "page ", page, " is published and unknown");
    CHECK(!is_block || pool_.owner(page) == PageOwner::kLatent, "page ", page, " is no block");
    CHECK(is_block || checkpoints_.at(page).serial == 0, "the checkpoint at page ", page, " has lost its block");
    CHECK(!block.valid() || pool_.owner(page) == PageOwner::kCheckpoint, "page ", page, " is of no checkpoint");
  }
}

// A block leaves the prefix index, and its checkpoint with it.
void Scheduler::Impl::forget_block(PageId page) {
  index_.erase(page);
  checkpoints_.drop(page);
}

// All that this sequence read leaves the prefix index: which of its blocks spoilt its output is not known, and the next
// request with this prompt shall compute them anew.
void Scheduler::Impl::forget_blocks(const Sequence& sequence) {
  for (const PageHandle& handle : sequence.pages) {
    if (!index_.contains(handle.page())) continue;
    forget_block(handle.page());
    pool_.unpublish(handle.page());
  }
}

void Scheduler::Impl::page_evicted(PageId page) {
  const int32_t before = checkpoints_.size();
  if (pool_.owner(page) == PageOwner::kLatent) {
    forget_block(page);
  } else {
    checkpoints_.page_evicted(page);
  }
  totals_.checkpoint_evictions += before - checkpoints_.size();
}

Scheduler::Scheduler(const SchedulerConfig& config) : impl_(std::make_unique<Impl>(config)) {}
Scheduler::~Scheduler() = default;

void Scheduler::submit(Submit submit) {
  impl_->submit(std::move(submit));
}
void Scheduler::cancel(const Cancel& cancel) {
  impl_->cancel(cancel);
}
void Scheduler::apply(const StepResult& result) {
  impl_->apply(result);
}
std::optional<StepPlan> Scheduler::next_plan(double now_s) {
  return impl_->next_plan(now_s);
}
std::vector<SequenceUpdate> Scheduler::take_updates() {
  std::vector<SequenceUpdate> taken = std::exchange(impl_->updates_, {});
  impl_->updates_.reserve(taken.size());  // the next step's are about as many
  return taken;
}
SchedulerGauges Scheduler::gauges() const {
  return impl_->gauges();
}
void Scheduler::check_integrity() const {
  impl_->check_integrity();
}
void Scheduler::check_some(int32_t num_pages) {
  impl_->check_some(num_pages);
}

bool Scheduler::fits(int64_t num_prompt_tokens, int64_t max_tokens) const {
  const SchedulerConfig& config = impl_->config_;
  if (num_prompt_tokens < 1 || max_tokens < 1) return false;
  if (num_prompt_tokens > config.max_model_len || max_tokens > config.max_model_len - num_prompt_tokens) return false;
  return num_blocks(static_cast<int32_t>(num_prompt_tokens + max_tokens - 1)) + config.state_pages <= config.num_pages;
}

bool Scheduler::idle() const {
  return impl_->waiting_.empty() && impl_->running_.empty() && impl_->plans_in_flight() == 0;
}

void Scheduler::drop_prefix_cache() {
  for (int32_t i = 0; i < impl_->pool_.num_pages(); ++i) {
    const PageId page(i);
    if (!impl_->index_.contains(page)) continue;
    impl_->forget_block(page);
    impl_->pool_.unpublish(page);
  }
}

}  // namespace perigee
