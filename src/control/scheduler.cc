#include "control/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "control/faults.h"
#include "control/scheduler_impl.h"

namespace perigee {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

bool remove(std::vector<Sequence*>& list, Sequence& sequence) {
  const auto found = std::find(list.begin(), list.end(), &sequence);
  if (found == list.end()) return false;
  list.erase(found);
  return true;
}

}  // namespace

bool in_order_of_service(const Sequence* a, const Sequence* b) {
  return a->before(*b);
}

void insert_in_order(std::vector<Sequence*>& list, Sequence& sequence) {
  list.insert(std::upper_bound(list.begin(), list.end(), &sequence, in_order_of_service), &sequence);
}

Scheduler::Impl::Impl(const SchedulerConfig& config)
    : rules_(config),
      cache_(config.num_pages, config.hash_seed, config.hash_bits),
      states_(rules_, cache_),
      admission_(rules_, cache_, states_),
      slots_(static_cast<size_t>(rules_.num_slots), nullptr),
      next_deadline_s_(kNever) {
  for (int32_t slot = rules_.num_slots - 1; slot >= 0; --slot) free_slots_.push_back(SlotId(slot));
  running_.reserve(slots_.size());
  spare_plans_.reserve(kMaxPlansInFlight);
}

void Scheduler::Impl::submit(Submit submit) {
  CHECK(submit.prompt && submit.sampling && !submit.prompt->empty(), "sequence ", submit.sequence, " is incomplete");
  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.request = std::move(submit);
  sequence.input = sequence.request.prompt;
  const SchedulerConfig& config = rules_.config;
  sequence.max_outputs = std::min(sequence.sampling().max_tokens, config.max_model_len - sequence.num_prompt());
  CHECK(sequence.max_outputs >= 1 && sequence.max_blocks() + config.state_pages <= config.num_pages, "sequence ",
        sequence.id(), " can never fit");
  const bool fresh = sequences_.emplace(sequence.id(), std::move(owned)).second;
  CHECK(fresh, "sequence ", sequence.id(), " is submitted twice");

  const auto leader = sequences_.find(sequence.request.leader);
  // Waiting for a leader that is served later would invert their order.
  const bool follows = config.prefix_caching && leader != sequences_.end() && leader->second->before(sequence) &&
                       !leader->second->prompt_confirmed;
  if (follows) {
    leader->second->has_followers = true;
  } else {
    sequence.request.leader = {};
  }
  if (sequence.request.deadline_s > 0) next_deadline_s_ = std::min(next_deadline_s_, sequence.request.deadline_s);
  ++num_accepted_;
  insert_in_order(waiting_, sequence);
}

void Scheduler::Impl::cancel(const Cancel& cancel) {
  const auto found = sequences_.find(cancel.sequence);
  if (found == sequences_.end()) return;  // ended already: the events crossed
  Sequence& sequence = *found->second;
  SequenceUpdate& update = add_update(sequence);
  const bool lose = planted(Fault::kLostFinish) && !sequence.is_running();
  end(sequence, cancel.reason, update);
  if (lose) updates_.pop_back();
}

// Takes the sequence out of every list and frees it; its update, already among updates_, says how it ended.
void Scheduler::Impl::end(Sequence& sequence, FinishReason reason, SequenceUpdate& update) {
  update.finish = reason;
  if (sequence.is_running()) {
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
  CHECK(remove(running_, sequence), "sequence ", sequence.id(), " does not run");
  Running run = std::move(sequence.running());
  sequence.state = Waiting();
  at_slot(run.slot) = nullptr;
  std::vector<PageHandle> pages = states_.take_all_pages(run);
  if (run.plans != 0 && !planted(Fault::kFreeUnderFlight)) {
    plans_.hold(run.plans, run.slot, std::move(pages));
  } else {
    release_back_to_front(pages);
    free_slots_.push_back(run.slot);
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
  const BlockPool& pool = cache_.pool();
  SchedulerGauges gauges = totals_;
  gauges.running = static_cast<int32_t>(running_.size());
  gauges.waiting = static_cast<int32_t>(waiting_.size());
  gauges.plans_in_flight = plans_.size();
  gauges.free_pages = pool.num_free();
  gauges.cached_pages = pool.num_cached();
  gauges.used_pages = pool.num_used();
  gauges.total_pages = pool.num_pages();
  gauges.latent_pages = pool.num_owned(PageOwner::kLatent);
  gauges.state_pages = pool.num_owned(PageOwner::kState);
  gauges.checkpoint_pages = pool.num_owned(PageOwner::kCheckpoint);
  gauges.checkpoints = cache_.checkpoints().size();
  gauges.checkpoint_writes = states_.totals().writes;
  gauges.checkpoint_hits = states_.totals().hits;
  gauges.checkpoint_skips = states_.totals().skips;
  gauges.checkpoint_evictions = cache_.num_evicted_checkpoints();
  gauges.blocks_hashed = cache_.index().num_hashed();
  return gauges;
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
void Scheduler::give_back(StepPlan plan) {
  if (impl_->spare_plans_.size() < kMaxPlansInFlight) impl_->spare_plans_.push_back(std::move(plan));
}
void Scheduler::take_updates(std::vector<SequenceUpdate>& updates) {
  updates.clear();
  std::swap(updates, impl_->updates_);
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
  const SchedulerConfig& config = impl_->rules_.config;
  if (num_prompt_tokens < 1 || max_tokens < 1) return false;
  if (num_prompt_tokens > config.max_model_len || max_tokens > config.max_model_len - num_prompt_tokens) return false;
  return num_blocks(static_cast<int32_t>(num_prompt_tokens + max_tokens - 1)) + config.state_pages <= config.num_pages;
}

bool Scheduler::idle() const {
  return impl_->waiting_.empty() && impl_->running_.empty() && impl_->plans_.empty();
}

void Scheduler::drop_prefix_cache() {
  impl_->cache_.forget_all();
}

}  // namespace perigee
