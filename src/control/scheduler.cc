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
      cache_(rules_.config),
      states_(rules_, cache_),
      admission_(rules_, cache_, states_),
      handovers_(rules_, cache_),
      slots_(static_cast<size_t>(rules_.num_slots), nullptr),
      next_deadline_s_(kNever),
      standing_since_s_(kNever) {
  for (int32_t slot = rules_.num_slots - 1; slot >= 0; --slot) free_slots_.push_back(SlotId(slot));
  running_.reserve(slots_.size());
  updates_.reserve(slots_.size() * kMaxPlansInFlight);  // results may come two at a time
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
  if (sequence.request.constraint) leave_min_tokens_to_masks(sequence);
  CHECK(sequence.max_outputs >= 1 && sequence.max_blocks() <= config.max_blocks(), "sequence ", sequence.id(),
        " can never fit");
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
  update.error = cancel.error;
  const bool lose = planted(Fault::kLostFinish) && !sequence.is_running();
  end(sequence, cancel.reason, update);
  if (lose) updates_.pop_back();
}

// Takes the sequence out of every list and frees it; its update, already among updates_, says how it ended.
void Scheduler::Impl::end(Sequence& sequence, FinishReason reason, SequenceUpdate& update) {
  update.finish = reason;
  const bool well = reason == FinishReason::kStop || reason == FinishReason::kLength;
  if (sequence.request.lease == LeaseWish::kFromStart) {
    if (well) handovers_.add_tail(sequence);
    handovers_.finish_growth(sequence.id(), reason == FinishReason::kError);
  }
  if (sequence.request.lease == LeaseWish::kAtEnd && well && sequence.prompt_confirmed)
    update.lease = handovers_.lease(sequence);
  if (sequence.is_running()) {
    stop_running(sequence);
  } else if (sequence.is_awaiting()) {
    CHECK(remove(awaiting_, sequence), "sequence ", sequence.id(), " is in limbo");
    handovers_.abandon(sequence.id());
  } else {
    CHECK(remove(waiting_, sequence), "sequence ", sequence.id(), " is in limbo");
    handovers_.drop_tail(sequence.id());
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
  for (const auto* list : {&running_, &waiting_, &awaiting_}) {
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
  const Pools& pools = cache_.pools();
  SchedulerGauges gauges = totals_;
  gauges.running = static_cast<int32_t>(running_.size());
  gauges.waiting = static_cast<int32_t>(waiting_.size());
  gauges.plans_in_flight = plans_.size();
  gauges.free_pages = pools.num_free();
  gauges.cached_pages = pools.num_cached();
  gauges.used_pages = pools.num_used();
  gauges.total_pages = pools.num_pages();
  gauges.latent_pages = pools.num_owned(PageOwner::kLatent);
  gauges.state_pages = pools.num_owned(PageOwner::kState);
  gauges.checkpoint_pages = pools.num_owned(PageOwner::kCheckpoint);
  gauges.checkpoints = cache_.checkpoints().size();
  gauges.checkpoint_writes = states_.totals().writes;
  gauges.checkpoint_hits = states_.totals().hits;
  gauges.checkpoint_skips = states_.totals().skips;
  gauges.checkpoint_evictions = cache_.num_evicted_checkpoints();
  gauges.awaiting = static_cast<int32_t>(awaiting_.size());
  gauges.leases = handovers_.num_leases();
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
std::optional<StepId> Scheduler::take_mask_jobs(std::vector<MaskJob>& jobs) {
  PlansInFlight::Flight* flight = impl_->plans_.awaiting_masks();
  if (flight == nullptr) return std::nullopt;
  impl_->take_mask_jobs(*flight, jobs);
  return flight->step;
}
std::vector<Import> Scheduler::take_imports() {
  return std::exchange(impl_->imports_, {});
}
void Scheduler::end_import(SequenceId sequence, ImportEnd end, const std::string& why) {
  impl_->end_import(sequence, end, why);
}
std::vector<LeaseGrowth> Scheduler::take_lease_growth() {
  return impl_->handovers_.take_growth();
}
void Scheduler::release(SequenceId lease) {
  impl_->handovers_.release(lease);
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
  impl_->updates_.reserve(taken.capacity());
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
  return num_blocks(static_cast<int32_t>(num_prompt_tokens + max_tokens - 1)) <= config.max_blocks();
}

bool Scheduler::idle() const {
  return impl_->waiting_.empty() && impl_->running_.empty() && impl_->awaiting_.empty() && impl_->plans_.empty();
}

void Scheduler::drop_prefix_cache() {
  impl_->cache_.forget_all();
}

// --- The next step: decode rows first, then running prefills, then admissions, all within one token budget ---

constexpr int32_t kReservedOutputs = 1024;  // of a sequence that starts, so that its steps allocate nothing

std::optional<StepPlan> Scheduler::Impl::next_plan(double now_s) {
  expire(now_s);
  if (plans_.full() || (running_.empty() && waiting_.empty())) {
    standing_since_s_ = kNever;
    return std::nullopt;
  }
  PlanDraft draft = new_draft();
  plan_decodes(draft);
  if (!draft.ends_lease) {  // which other prompts' chunks would hold up
    plan_prefills(draft);
    plan_admissions(draft);
  }
  if (handovers_.num_leases() > 0)
    give_way(now_s);
  else
    standing_since_s_ = kNever;
  if (draft.plan.rows.empty()) {
    spare_plans_.push_back(std::move(draft.plan));
    return std::nullopt;
  }
  plans_.launch(draft.plan, std::move(draft.traffic));
  ++totals_.steps;
  return std::move(draft.plan);
}

// In the memory of a plan that was given back, if there is one.
PlanDraft Scheduler::Impl::new_draft() {
  PlanDraft draft;
  draft.budget_tokens = rules_.config.max_step_tokens;
  if (!spare_plans_.empty()) {
    draft.plan = std::move(spare_plans_.back());
    spare_plans_.pop_back();
  }
  StepPlan& plan = draft.plan;
  plan.step = plans_.next_step();
  plan.starts.clear();
  plan.appends.clear();
  plan.rows.clear();
  plan.tokens.clear();
  plan.checkpoints.clear();
  plan.num_decode_rows = 0;
  plan.rows.reserve(slots_.size());
  plan.appends.reserve(slots_.size());
  return draft;
}

// Preemption takes from the back of running_, behind the row being planned, so that no planned row loses its pages.
// Decode rows cannot starve a running prefill: see SchedulerRules::num_slots. Nor can those that end leases, one for
// each prompt.
void Scheduler::Impl::plan_decodes(PlanDraft& draft) {
  for (size_t i = 0; i < running_.size() && draft.budget_tokens > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.in_prefill() || !sequence.wants_sample()) continue;
    const int32_t drafts = num_drafts(sequence, draft);
    if (!ensure_pages(sequence, planted(Fault::kNoPagesForDrafts) ? 1 : 1 + drafts, draft)) continue;
    add_row(sequence, drafts > 0 ? RowWork(Verify{.num_drafts = drafts}) : RowWork(Decode()), draft);
    draft.ends_lease |= handovers_.gives_tail(sequence);
  }
}

// As many drafts as could still be outputs, if the budget bears them, and none where the row could end beyond the
// longest context that drafts are for.
int32_t Scheduler::Impl::num_drafts(const Sequence& sequence, const PlanDraft& draft) const {
  if (rules_.config.num_drafts == 0) return 0;
  const int32_t asked = sequence.request.speculation_max_context;
  const int32_t most = asked < 0 ? rules_.config.speculation_max_context : asked;
  if (most > 0 && sequence.running().scheduled.most + 1 + rules_.config.num_drafts > most) return 0;
  return std::min({rules_.config.num_drafts, sequence.num_samples_left() - 1, draft.budget_tokens - 1});
}

// One that the rest of the budget is too small for is not overtaken: those that came later would take that rest for as
// long as they keep coming.
void Scheduler::Impl::plan_prefills(PlanDraft& draft) {
  for (size_t i = 0; i < running_.size() && draft.budget_tokens > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (!sequence.in_prefill() || waits_for_logits(sequence, draft)) continue;
    const Running& run = sequence.running();
    const int32_t num_tokens = chunk_tokens(sequence, run.scheduled.most, run.chunks_end, draft);
    if (num_tokens > 0)
      add_prefill_row(sequence, num_tokens, draft);
    else
      draft.budget_tokens = 0;
  }
}

// In order of service; stepped over are followers whose leader still computes the common prompt, and who waits for rows
// of logits. A sequence that was preempted in this step stays out: the page that it was preempted for is one that it
// needs.
void Scheduler::Impl::plan_admissions(PlanDraft& draft) {
  size_t i = 0;
  while (i < waiting_.size() && draft.budget_tokens > 0 && !free_slots_.empty() && !draft.awaits_pages) {
    Sequence& sequence = *waiting_[i];
    if (sequence.request.leader.valid() || waits_for_logits(sequence, draft)) {
      ++i;
      continue;
    }
    const bool imports = sequence.request.remote_blocks > 0;
    if (imports ? !begin_import(sequence) : !admit(sequence, draft)) {
      if (!planted(Fault::kQueueOvertaken)) return;
      ++i;
      continue;
    }
    if (imports && !sequence.is_awaiting()) continue;  // now it can be admitted
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// Makes the pages of the next num_tokens positions exist. Pages of use that come back when the plans in flight return
// are waited for: that costs a step, where another victim would cost a recomputation.
bool Scheduler::Impl::ensure_pages(Sequence& sequence, int32_t num_tokens, PlanDraft& draft) {
  while (true) {
    Running& run = sequence.running();
    const int32_t capacity = static_cast<int32_t>(run.pages.size()) * kBlockTokens;
    if (run.scheduled.most + num_tokens <= capacity + (planted(Fault::kPageOffByOne) ? 1 : 0)) return true;
    if (PageHandle page = cache_.pools().allocate_block(run.num_blocks_at)) {
      draft.plan.appends.push_back({run.slot, static_cast<int32_t>(run.pages.size()), page.placement()});
      run.add_block(std::move(page));
      continue;
    }
    const auto block = static_cast<int32_t>(run.pages.size());
    const auto is_of_use = [&](int32_t index) { return cache_.pools().may_lie(block, index); };
    if (plans_.holds_pages(is_of_use) || !draft.traffic.empty()) {
      draft.awaits_pages = true;
      return false;
    }
    if (handovers_.drop_tails()) continue;
    Sequence& victim = victim_for(sequence);
    preempt(victim);
    if (&victim == &sequence) return false;
  }
}

// The last in order of service that has a page where the sequence's next block may lie; itself, if nobody after it has.
Sequence& Scheduler::Impl::victim_for(const Sequence& sequence) {
  const auto block = static_cast<int32_t>(sequence.running().pages.size());
  const auto has_page_of_use = [&](const Running& run) {
    if (rules_.is_recurrent()) return true;  // of its state
    for (int32_t index = 0; index < rules_.config.dcp_size; ++index)
      if (run.num_blocks_at[static_cast<size_t>(index)] > 0 && cache_.pools().may_lie(block, index)) return true;
    return false;
  };
  auto victim = running_.rbegin();
  while (*victim != &sequence && !has_page_of_use((*victim)->running())) ++victim;
  return **victim;
}

// Back to Waiting, to be computed anew from its tokens. Its confirmed blocks stay cached, so that most of it is a hit;
// ids still in flight are dropped and sampled again.
void Scheduler::Impl::preempt(Sequence& sequence) {
  stop_running(sequence);
  handovers_.withdraw(sequence.id());  // whoever reads it would wait for pages here
  if (!sequence.generated.empty()) {
    auto input = std::make_shared<std::vector<int32_t>>(*sequence.input);
    input->insert(input->end(), sequence.generated.begin(), sequence.generated.end());
    sequence.input = std::move(input);
    sequence.generated.clear();
  }
  ++sequence.num_preemptions;
  ++totals_.preemptions;
  insert_in_order(waiting_, sequence);
}

// False: nothing has changed.
bool Scheduler::Impl::admit(Sequence& sequence, PlanDraft& draft) {
  const bool alone = running_.empty() && plans_.empty() && handovers_.num_imports() == 0;
  std::optional<Hit> hit = admission_.find_room(sequence, running_, alone, handovers_.has_tail(sequence.id()));
  if (!hit && handovers_.drop_tails()) hit = admission_.find_room(sequence, running_, alone, false);
  if (!hit) return false;
  int32_t first = hit->num_tokens();
  if (planted(Fault::kStaleLength) && sequence.num_preemptions > 0) first = std::max(first, sequence.num_input() - 1);
  const int32_t end = chunks_end(sequence, first);
  const int32_t num_tokens = first < end ? chunk_tokens(sequence, first, end, draft) : 0;
  if (num_tokens == 0 && first < end) return false;
  start(sequence, *hit, {first, end}, draft);
  if (sequence.in_prefill()) {
    add_prefill_row(sequence, num_tokens, draft);
  } else {
    add_row(sequence, Decode(), draft);
  }
  return true;
}

// With pages for all of its input.
void Scheduler::Impl::start(Sequence& sequence, const Hit& hit, PositionRange chunks, PlanDraft& draft) {
  Running& run = sequence.state.emplace<Running>();
  std::vector<PageHandle> checkpoint = admission_.take(hit, run);
  if (hit.tail_tokens > 0) {
    HandoverBook::Tail tail = handovers_.take_tail(sequence.id());
    run.add_block(std::move(tail.block));
    run.state_pages = std::move(tail.state);
  } else {
    handovers_.drop_tail(sequence.id());
  }
  run.scheduled = run.committed = PositionRange::at(chunks.least);
  run.chunks_end = chunks.most;
  run.num_confirmed = chunks.least;
  if (sequence.request.constraint && !sequence.constraint) sequence.constraint = sequence.request.constraint->begin();
  run.slot = free_slots_.back();
  free_slots_.pop_back();
  at_slot(run.slot) = &sequence;
  insert_in_order(running_, sequence);
  totals_.prefix_queries += sequence.num_input();
  totals_.prefix_hits += hit.num_tokens();
  if (sequence.num_cached_tokens < 0) sequence.num_cached_tokens = hit.num_tokens();

  SequenceStart& start = draft.plan.starts.emplace_back(SequenceStart{
      run.slot, sequence.id(), sequence.input, sequence.num_prompt(), hit.num_tokens(), sequence.request.sampling});
  states_.start(sequence, std::move(checkpoint), start, draft.traffic);
  run.pages.reserve(static_cast<size_t>(sequence.max_blocks()));
  sequence.generated.reserve(static_cast<size_t>(std::min(sequence.max_outputs, kReservedOutputs)));
  while (static_cast<int32_t>(run.pages.size()) < num_blocks(sequence.num_input())) {
    PageHandle page = cache_.pools().allocate_block(run.num_blocks_at);
    CHECK(page, "sequence ", sequence.id(), " was admitted without pages");
    run.add_block(std::move(page));
  }
  for (size_t block = 0; block < run.pages.size(); ++block)
    draft.plan.appends.push_back({run.slot, static_cast<int32_t>(block), run.pages[block].placement()});
  if (sequence.request.lease == LeaseWish::kFromStart && sequence.num_preemptions == 0)
    handovers_.begin_growth(sequence);
}

// Those served before it, under prompt_logprobs too, have taken the step's rows of logits.
bool Scheduler::Impl::waits_for_logits(const Sequence& sequence, const PlanDraft& draft) const {
  return sequence.wants_prompt_logprobs() && draft.prompt_logprob_tokens < rules_.config.attention_alignment;
}

// A token that is left alone runs as a decode row, whose steps are graphs, and so does the last one where another node
// is to have what comes before it. Not under prompt_logprobs, which chunks give, nor where that would change the last
// bits of a recurrent state (StateBook::num_chunked).
int32_t Scheduler::Impl::chunks_end(const Sequence& sequence, int32_t first) const {
  const int32_t end = sequence.num_input();
  const bool whole = rules_.is_recurrent() && rules_.config.deterministic;
  if (whole || sequence.wants_prompt_logprobs()) return end;
  return first == end - 1 || handovers_.gives_tail(sequence) ? end - 1 : end;
}

// Tokens of the prefill chunk that begins at `first`: all that is left, or up to the last multiple of the alignment
// that the budget reaches. Where the alignment is not strict, a chunk shorter than that is better than none. Former
// outputs have chunks of their own: prompts use the expanded form, outputs the absorbed one, except when
// deterministic.
int32_t Scheduler::Impl::chunk_tokens(const Sequence& sequence, int32_t first, int32_t end,
                                      const PlanDraft& draft) const {
  const bool in_prompt = !rules_.config.deterministic && first < sequence.num_prompt();
  const int32_t kind_end = in_prompt ? std::min(sequence.num_prompt(), end) : end;
  const int32_t stop = std::min(states_.chunk_end(sequence, first), kind_end);
  const int32_t alignment = rules_.config.attention_alignment;
  int32_t cap = draft.budget_tokens;
  if (sequence.wants_prompt_logprobs()) cap = std::min(cap, draft.prompt_logprob_tokens / alignment * alignment);
  if (rules_.config.long_prefill_tokens > 0)
    cap = std::min(cap, std::max(rules_.config.long_prefill_tokens, rules_.strict_alignment ? alignment : 1));
  if (stop - first <= cap) return stop - first;
  const int32_t aligned = (first + cap) / alignment * alignment;
  if (aligned > first) return aligned - first;
  return rules_.strict_alignment ? 0 : cap;
}

void Scheduler::Impl::add_prefill_row(Sequence& sequence, int32_t num_tokens, PlanDraft& draft) {
  const int32_t first = sequence.running().scheduled.most, end = first + num_tokens;
  const Prefill chunk{
      .tokens_offset = static_cast<int32_t>(draft.plan.tokens.size()),
      .num_tokens = num_tokens,
      .sample = end == sequence.num_input(),
      .prompt_logprobs = sequence.wants_prompt_logprobs() && end > sequence.prompt_logprobs_known,
  };
  if (chunk.prompt_logprobs) draft.prompt_logprob_tokens -= num_tokens;
  const auto ids = sequence.input->begin() + first;
  draft.plan.tokens.insert(draft.plan.tokens.end(), ids, ids + num_tokens);
  add_row(sequence, chunk, draft);
  if (planted(Fault::kPublishUnconfirmed)) states_.publish_blocks(sequence, end);
}

// A decode or verify row after the others of its kind.
void Scheduler::Impl::add_row(Sequence& sequence, const RowWork& work, PlanDraft& draft) {
  Running& run = sequence.running();
  StepPlan& plan = draft.plan;
  PlanRow added{.slot = run.slot, .sequence = sequence.id(), .position = run.scheduled, .work = work};
  added.masked = sequence.constraint != nullptr && added.samples();
  if (planted(Fault::kPositionRelied)) added.position.least = run.scheduled.most;
  const auto place = added.prefill() != nullptr ? plan.rows.end() : plan.rows.begin() + plan.num_decode_rows++;
  const PlanRow& row = *plan.rows.insert(place, added);
  states_.plan_checkpoints(sequence, row, static_cast<int32_t>(running_.size()), draft);
  run.committed = run.scheduled;
  run.scheduled.least += row.min_tokens();
  run.scheduled.most += row.num_tokens();
  if (row.prefill() != nullptr) run.committed = run.scheduled;
  run.ids_in_flight += row.max_ids();
  run.plans |= PlansInFlight::bit(draft.plan.step);
  draft.budget_tokens -= row.num_tokens();
}

}  // namespace perigee
