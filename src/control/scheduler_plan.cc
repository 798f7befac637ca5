// The next step: decode rows first, then running prefills, then admissions, all within one token budget.

#include <algorithm>
#include <array>
#include <utility>

#include "control/faults.h"
#include "control/scheduler_impl.h"

namespace perigee {

// One that holds all pages that it can ever fill needs none.
int32_t reserve_page_each(std::span<Sequence* const> running, int32_t /*num_pages*/) {
  return static_cast<int32_t>(std::count_if(running.begin(), running.end(), [](const Sequence* sequence) {
    return static_cast<int32_t>(sequence->pages.size()) < sequence->max_blocks();
  }));
}

std::optional<StepPlan> Scheduler::Impl::next_plan(double now_s) {
  expire(now_s);
  if (plans_in_flight() == kMaxPlansInFlight || (running_.empty() && waiting_.empty())) return std::nullopt;
  Draft draft;
  draft.budget_tokens = config_.max_step_tokens;
  draft.plan.step = next_step_;
  draft.plan.rows.reserve(slots_.size());
  draft.plan.appends.reserve(slots_.size());
  plan_decodes(draft);
  plan_prefills(draft);
  plan_admissions(draft);
  if (draft.plan.rows.empty()) return std::nullopt;
  return launch(std::move(draft));
}

StepPlan Scheduler::Impl::launch(Draft draft) {
  InFlight& flight = this->flight(next_step_);
  flight.step = next_step_;
  flight.rows.assign(draft.plan.rows.begin(), draft.plan.rows.end());
  flight.traffic = std::move(draft.traffic);
  next_step_ = StepId(next_step_.value + 1);
  ++totals_.steps;
  return std::move(draft.plan);
}

// Preemption takes from the back of running_, behind the row being planned, so that no planned row loses its pages.
// Decode rows cannot starve a running prefill: see num_slots().
void Scheduler::Impl::plan_decodes(Draft& draft) {
  for (size_t i = 0; i < running_.size() && draft.budget_tokens > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.in_prefill() || !sequence.wants_sample()) continue;
    if (ensure_page(sequence, draft)) add_row(sequence, Decode(), draft);
  }
  draft.plan.num_decode_rows = static_cast<int32_t>(draft.plan.rows.size());
}

// One that the rest of the budget is too small for is not overtaken: those that came later would take that rest for as
// long as they keep coming.
void Scheduler::Impl::plan_prefills(Draft& draft) {
  for (size_t i = 0; i < running_.size() && draft.budget_tokens > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (!sequence.in_prefill() || waits_for_logits(sequence, draft)) continue;
    const int32_t num_tokens = chunk_tokens(sequence, draft);
    if (num_tokens > 0)
      add_prefill_row(sequence, num_tokens, draft);
    else
      draft.budget_tokens = 0;
  }
}

// In order of service; stepped over are followers whose leader still computes the common prompt, and who waits for rows
// of logits. A sequence that was preempted in this step stays out: the page that it was preempted for is one that it
// needs.
void Scheduler::Impl::plan_admissions(Draft& draft) {
  size_t i = 0;
  while (i < waiting_.size() && draft.budget_tokens > 0 && !free_slots_.empty()) {
    Sequence& sequence = *waiting_[i];
    if (sequence.request.leader.valid() || waits_for_logits(sequence, draft)) {
      ++i;
      continue;
    }
    if (!admit(sequence, draft)) {
      if (!planted(Fault::kQueueOvertaken)) return;
      ++i;
      continue;
    }
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// Makes the page of the next position exist. Pages that come back when the plans in flight return are waited for: that
// costs a step, where another victim would cost a recomputation.
bool Scheduler::Impl::ensure_page(Sequence& sequence, Draft& draft) {
  const int32_t capacity = static_cast<int32_t>(sequence.pages.size()) * kBlockTokens;
  if (sequence.scheduled.most < capacity + (planted(Fault::kPageOffByOne) ? 1 : 0)) return true;
  while (true) {
    if (PageHandle page = pool_.allocate(PageOwner::kLatent)) {
      append_page(sequence, std::move(page), draft);
      return true;
    }
    if (pages_come_back(draft)) return false;
    Sequence& victim = *running_.back();
    preempt(victim);
    if (&victim == &sequence) return false;
  }
}

// Back to Waiting, to be computed anew from its tokens. Its confirmed blocks stay cached, so that most of it is a hit;
// ids still in flight are dropped and sampled again.
void Scheduler::Impl::preempt(Sequence& sequence) {
  stop_running(sequence);
  if (!sequence.generated.empty()) {
    auto input = std::make_shared<std::vector<int32_t>>(*sequence.input);
    input->insert(input->end(), sequence.generated.begin(), sequence.generated.end());
    sequence.input = std::move(input);
    sequence.generated.clear();
  }
  const int32_t stale = planted(Fault::kStaleLength) ? sequence.num_confirmed : 0;
  sequence.num_confirmed = stale;
  sequence.scheduled = PositionRange::at(stale);
  sequence.ids_in_flight = 0;
  sequence.num_chained = 0;
  sequence.chain_broken = false;
  sequence.newest_checkpoint = {};
  ++sequence.num_preemptions;
  ++totals_.preemptions;
  enqueue(sequence);
}

// The longest confirmed prefix that leaves at least one token to compute, for its logits.
void Scheduler::Impl::match_prefix(const Sequence& sequence) {
  const int32_t last =
      planted(Fault::kFullPromptHit) ? sequence.num_input() : std::min(sequence.num_input() - 1, num_chunked(sequence));
  const bool may_hit = config_.prefix_caching && !sequence.wants_prompt_logprobs();
  match_.update(sequence, may_hit ? last / kBlockTokens : 0);
}

// What of the match every kind of cache can serve: a recurrent model needs a checkpoint at exactly its end.
Scheduler::Impl::Hit Scheduler::Impl::find_hit() const {
  const std::vector<PrefixNode>& blocks = match_.blocks();
  const auto end_of = [&](int32_t num_blocks) { return blocks[static_cast<size_t>(num_blocks) - 1].page; };
  Hit hit;
  hit.num_matched = static_cast<int32_t>(blocks.size()) / hit_blocks_ * hit_blocks_;
  hit.num_blocks = hit.num_matched;
  if (is_recurrent() && !planted(Fault::kHitMaxOverGroups))
    while (hit.num_blocks > 0 && checkpoints_.at(end_of(hit.num_blocks)).serial == 0) hit.num_blocks -= hit_blocks_;
  for (int32_t block = 1; block <= hit.num_blocks; ++block)
    hit.num_idle_pages += pool_.num_holders(end_of(block)) == 0 ? 1 : 0;
  if (is_recurrent() && hit.num_blocks > 0) hit.checkpoint = checkpoints_.at(end_of(hit.num_blocks));
  if (hit.checkpoint.serial != 0) hit.num_idle_pages += checkpoints_.num_idle_pages(hit.checkpoint);
  return hit;
}

// The sequence holds the hit's blocks; returns handles of its checkpoint.
std::vector<PageHandle> Scheduler::Impl::take_hit(Sequence& sequence, const Hit& hit) {
  const auto end = static_cast<size_t>(hit.num_blocks);
  for (size_t block = 0; block < end; ++block) sequence.pages.push_back(pool_.share(match_.blocks()[block].page));
  sequence.chain = end > 0 ? match_.blocks()[end - 1] : match_.root();
  sequence.num_chained = hit.num_blocks;
  sequence.newest_checkpoint = hit.checkpoint;
  sequence.newest_is_turn = false;
  std::vector<PageHandle> checkpoint;
  if (hit.checkpoint.serial != 0) checkpoints_.share(hit.checkpoint, checkpoint);
  return checkpoint;
}

// Starts the sequence if all pages of its input, of its state and one for its next tokens are at hand, and those that
// run keep what they are about to need. False: nothing has changed.
bool Scheduler::Impl::admit(Sequence& sequence, Draft& draft) {
  const bool alone = running_.empty() && plans_in_flight() == 0;
  const int32_t num_pages = std::min(num_blocks(sequence.num_input()) + 1, sequence.max_blocks()) + config_.state_pages;
  const int32_t num_available = pool_.num_available();
  const int32_t reserve =
      config_.admission_reserve && !alone ? config_.admission_reserve(running_, config_.num_pages) : 0;
  match_prefix(sequence);
  // Looked at before each step while it waits: most of the time no hit could be long enough.
  if (!alone && num_available < num_pages + reserve - static_cast<int32_t>(match_.blocks().size())) return false;
  Hit hit = find_hit();
  // A hit holds a checkpoint's pages for a while. Where even an empty pool has none for that, it is computed instead.
  if (alone && num_available - hit.num_idle_pages < num_pages - hit.num_blocks)
    hit = Hit{.num_matched = hit.num_matched};
  if (num_available - hit.num_idle_pages < num_pages + reserve - hit.num_blocks) return false;
  sequence.junction = policy_.junction(hit.num_blocks * kBlockTokens, hit.num_matched * kBlockTokens);
  const PositionRange stale = sequence.scheduled;
  sequence.scheduled = PositionRange::at(std::max(stale.most, hit.num_blocks * kBlockTokens));
  const int32_t num_tokens = chunk_tokens(sequence, draft);
  if (num_tokens == 0 && sequence.in_prefill()) {
    sequence.scheduled = stale;
    return false;
  }
  start(sequence, hit, draft);
  if (sequence.in_prefill()) {
    add_prefill_row(sequence, num_tokens, draft);
  } else {
    add_row(sequence, Decode(), draft);
  }
  return true;
}

void Scheduler::Impl::start(Sequence& sequence, const Hit& hit, Draft& draft) {
  const int32_t num_hits = hit.num_blocks;
  const int32_t num_hit_tokens = num_hits * kBlockTokens;
  std::vector<PageHandle> checkpoint = take_hit(sequence, hit);
  sequence.num_confirmed = sequence.scheduled.least;
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  at_slot(sequence.slot) = &sequence;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence,
                                   [](const Sequence* a, const Sequence* b) { return a->before(*b); }),
                  &sequence);
  totals_.prefix_queries += sequence.num_input();
  totals_.prefix_hits += num_hit_tokens;
  if (sequence.num_cached_tokens < 0) sequence.num_cached_tokens = num_hit_tokens;

  SequenceStart& start = draft.plan.starts.emplace_back(SequenceStart{
      sequence.slot, sequence.id(), sequence.input, sequence.num_prompt(), num_hit_tokens, sequence.request.sampling});
  if (is_recurrent()) start_state(sequence, std::move(checkpoint), start, draft);
  for (int32_t block = 0; block < num_hits; ++block)
    draft.plan.appends.push_back({sequence.slot, block, sequence.pages[static_cast<size_t>(block)].placement()});
  const int32_t num_input_blocks = num_blocks(sequence.num_input());
  sequence.pages.reserve(static_cast<size_t>(sequence.max_blocks()));
  while (static_cast<int32_t>(sequence.pages.size()) < num_input_blocks) {
    PageHandle page = pool_.allocate(PageOwner::kLatent);
    CHECK(page, "sequence ", sequence.id(), " was admitted without pages");
    append_page(sequence, std::move(page), draft);
  }
}

// Those served before it, under prompt_logprobs too, have taken the step's rows of logits.
bool Scheduler::Impl::waits_for_logits(const Sequence& sequence, const Draft& draft) const {
  return sequence.wants_prompt_logprobs() && draft.prompt_logprob_tokens < config_.attention_alignment;
}

// Tokens of the next prefill chunk: all that is left, or up to the last multiple of the alignment that the budget
// reaches. Where the alignment is not strict, a chunk shorter than that is better than none. Former outputs have chunks
// of their own: their attention takes another form than the prompt's, but for deterministic runs.
int32_t Scheduler::Impl::chunk_tokens(const Sequence& sequence, const Draft& draft) const {
  const int32_t first = sequence.scheduled.most;
  const bool in_prompt = !config_.deterministic && first < sequence.num_prompt();
  const int32_t kind_end = in_prompt ? sequence.num_prompt() : sequence.num_input();
  const int32_t stop = is_recurrent() ? std::min(chunk_stop(sequence), kind_end) : kind_end;
  const int32_t alignment = config_.attention_alignment;
  int32_t cap = draft.budget_tokens;
  if (sequence.wants_prompt_logprobs()) cap = std::min(cap, draft.prompt_logprob_tokens / alignment * alignment);
  if (config_.long_prefill_tokens > 0)
    cap = std::min(cap, std::max(config_.long_prefill_tokens, strict_alignment_ ? alignment : 1));
  if (stop - first <= cap) return stop - first;
  const int32_t end = (first + cap) / alignment * alignment;
  if (end > first) return end - first;
  return strict_alignment_ ? 0 : cap;
}

void Scheduler::Impl::append_page(Sequence& sequence, PageHandle page, Draft& draft) {
  draft.plan.appends.push_back({sequence.slot, static_cast<int32_t>(sequence.pages.size()), page.placement()});
  sequence.pages.push_back(std::move(page));
}

void Scheduler::Impl::add_prefill_row(Sequence& sequence, int32_t num_tokens, Draft& draft) {
  const int32_t first = sequence.scheduled.most, end = first + num_tokens;
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
  if (planted(Fault::kPublishUnconfirmed)) publish_blocks(sequence, sequence.scheduled.most);
}

void Scheduler::Impl::add_row(Sequence& sequence, const RowWork& work, Draft& draft) {
  const PlanRow& row = draft.plan.rows.emplace_back(
      PlanRow{.slot = sequence.slot, .sequence = sequence.id(), .position = sequence.scheduled, .work = work});
  if (keeps_checkpoints()) plan_checkpoints(sequence, row, draft);
  sequence.scheduled.least += row.min_tokens();
  sequence.scheduled.most += row.num_tokens();
  sequence.ids_in_flight += row.max_ids();
  sequence.plans |= plan_bit(draft.plan.step);
  draft.budget_tokens -= row.num_tokens();
}

}  // namespace perigee
