// What must hold after every event.

#include <algorithm>

#include "sim/harness.h"

namespace perigee::sim {
namespace {

constexpr int32_t kMaxPlansOvertaken = 500;

}  // namespace

size_t Harness::bit_of(const Placement& place) const {
  judge_.require(place.dcp_index >= 0 && place.dcp_index < config_.dcp_size && place.page.valid() &&
                     place.page.value < config_.num_pages,
                 "no page ", place.page, " at dcp index ", place.dcp_index);
  return static_cast<size_t>(place.dcp_index * config_.num_pages + place.page.value);
}

bool Harness::has_row_in_flight(SequenceId sequence) const {
  for (const Flight& flight : flights_)
    for (const PlanRow& row : flight.plan.rows)
      if (row.sequence == sequence) return true;
  return false;
}

void Harness::check_plan(const StepPlan& plan) {
  judge_.require(flights_.size() < kMaxPlansInFlight, "too many plans in flight");
  judge_.require(plan.num_tokens() <= config_.max_step_tokens, "the token budget is overdrawn");
  check_logit_rows(plan);
  const bool deals = config_.dcp_size > 1;
  const PageSet held = deals ? maybe_held() : PageSet();
  for (const SequenceStart& start : plan.starts) check_start(start);
  check_pages(plan);
  if (deals) check_balance(plan, held | maybe_held() | reach(plan));
  check_checkpoints(plan);
  for (const PlanRow& row : plan.rows) check_row(plan, row);
  check_queue(plan);
  check_progress(plan);
}

// As many rows of logits as a worker has memory for.
void Harness::check_logit_rows(const StepPlan& plan) const {
  int32_t scored = 0, sampled = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.scores_prompt()) scored += row.num_tokens();
    if (row.samples() && !row.scores_prompt()) ++sampled;
  }
  judge_.require(scored <= kPromptLogprobTokens && scored + sampled <= max_logit_rows(config_.max_sequences), scored,
                 " and ", sampled, " rows of logits");
}

// The import whose tail it starts from. That is possible once: the first start uses it or gives it up.
const Import* Harness::tail_of(const SequenceStart& start) const {
  const auto found = tails_.find(start.sequence);
  if (found == tails_.end() || start.num_cached_tokens != found->second.num_tokens) return nullptr;
  return &found->second;
}

// INV-2 for slots; hits are whole blocks of the same salt, short of the last token, at aligned lengths; or a tail.
void Harness::check_start(const SequenceStart& start) {
  for (const Flight& flight : flights_)
    for (const PlanRow& row : flight.plan.rows)
      judge_.require(row.slot != start.slot, "slot ", start.slot, " is reused under flight");
  Request& request = requests_[static_cast<size_t>(start.sequence.value)];
  judge_.require(!request.ended, "ended sequence ", start.sequence, " starts");
  const int32_t hit = start.num_cached_tokens;
  const Import* tail = tail_of(start);
  judge_.require((tail != nullptr || hit % kBlockTokens == 0) && hit < static_cast<int32_t>(start.tokens->size()),
                 "a hit of ", hit, " of ", start.tokens->size());
  judge_.require(tail == nullptr || hit + 1 == static_cast<int32_t>(start.tokens->size()), "a tail of ", hit, " of ",
                 start.tokens->size());
  counts_.tail_starts += tail != nullptr ? 1 : 0;
  if (config_.deterministic)
    judge_.require(hit % config_.attention_alignment == 0, "a hit of ", hit, " is not aligned");
  judge_.require(hit == 0 || config_.prefix_caching, "a hit without prefix caching");
  const auto& prompt = *request.submit.prompt;
  judge_.require(
      start.tokens->size() == prompt.size() + request.ids.size() &&
          std::equal(prompt.begin(), prompt.end(), start.tokens->begin()) &&
          std::equal(request.ids.begin(), request.ids.end(), start.tokens->begin() + start.num_prompt_tokens),
      "sequence ", start.sequence, " starts with other tokens than it has");
  if (hit > 0) ++counts_.hits;
  if (hit > 0 && request.num_lives > 0) ++counts_.resumes_hit;
  ++request.num_lives;
  slots_[static_cast<size_t>(start.slot.value)] = SlotView{.sequence = start.sequence, .pages = {}};
  check_state(start);
}

// INV-7, INV-11: the whole state is there, and a hit has a checkpoint of it at exactly its length.
void Harness::check_state(const SequenceStart& start) {
  check_everywhere(start.state_pages, "a state");
  const size_t num_copied = start.num_cached_tokens > 0 ? start.state_pages.size() : 0;
  judge_.require(start.checkpoint.size() == num_copied, "sequence ", start.sequence, " hits ", start.num_cached_tokens,
                 " tokens and a checkpoint of ", start.checkpoint.size(), " pages");
  if (num_copied > 0) check_everywhere(start.checkpoint, "a checkpoint");
  if (const Import* tail = tail_of(start))
    judge_.require(start.state_pages == tail->tail_state && start.checkpoint == tail->tail_state, "sequence ",
                   start.sequence, " starts from another state than its tail's");
  bool is_shared = false;
  for (size_t i = 0; i < num_copied; ++i) {
    const Placement& place = start.checkpoint[i];
    judge_.require(ranks_[0].state_position(place, i) == start.num_cached_tokens, "sequence ", start.sequence, " hits ",
                   start.num_cached_tokens, " tokens, the checkpoint is at ", ranks_[0].state_position(place, i));
    check_salt(place, start.sequence);
    for (const Flight& flight : flights_) is_shared |= flight.copied.test(bit_of(place));
  }
  counts_.shared_copies += is_shared ? 1 : 0;
}

// As many pages at every index, index after index.
void Harness::check_everywhere(const std::vector<Placement>& places, const char* what) const {
  judge_.require(static_cast<int32_t>(places.size()) == num_state_pages(), what, " of ", places.size(), " pages");
  for (int32_t i = 0; i < num_state_pages(); ++i)
    judge_.require(places[static_cast<size_t>(i)].dcp_index == i / config_.state_pages, what, " has page ", i,
                   " at dcp index ", places[static_cast<size_t>(i)].dcp_index);
}

// They come in the order of the rows, those of a row ascending, and are no more than a worker has room for.
void Harness::check_checkpoints(const StepPlan& plan) {
  const auto num_rows = static_cast<int32_t>(plan.rows.size());
  judge_.require(std::ssize(plan.checkpoints) <= max_checkpoint_writes(num_rows, plan.num_tokens()),
                 plan.checkpoints.size(), " checkpoints in a step of ", plan.num_tokens(), " tokens");
  size_t next = 0;
  for (const PlanRow& row : plan.rows) {
    const size_t first = next;
    for (int32_t last = 0; next < plan.checkpoints.size() && plan.checkpoints[next].slot == row.slot; ++next) {
      const CheckpointWrite& write = plan.checkpoints[next];
      judge_.require(write.is_valid(), "a checkpoint at no block boundary inside (", write.lower, ", ", write.upper,
                     "]");
      judge_.require(write.boundary() > last, "a checkpoint at ", write.boundary(), " after one at ", last);
      last = write.boundary();
      check_checkpoint(plan, write);
    }
    counts_.rows_of_several += next - first > 1 ? 1 : 0;
  }
  judge_.require(next == plan.checkpoints.size(), "a checkpoint that no row writes");
}

// A checkpoint lies where a row of its plan commits the state, at a length that a hit may have. A decode row commits
// what the row before it kept.
void Harness::check_checkpoint(const StepPlan& plan, const CheckpointWrite& write) const {
  judge_.require(config_.state_pages > 0 && config_.prefix_caching, "a checkpoint that nobody can use");
  check_everywhere(write.pages, "a checkpoint");
  if (config_.deterministic)
    judge_.require(write.boundary() % config_.attention_alignment == 0, "a checkpoint at ", write.boundary());
  const auto may_commit = [&](const PlanRow& row) {
    if (row.slot != write.slot) return false;
    if (row.prefill() == nullptr) {
      const int32_t before = row.position.least - write.lower;
      return before >= 1 && before <= 1 + config_.num_drafts && write.boundary() <= row.position.most;
    }
    return row.position.least < write.boundary() && write.boundary() <= row.position.least + row.num_tokens();
  };
  judge_.require(std::count_if(plan.rows.begin(), plan.rows.end(), may_commit) == 1, "no row commits ",
                 write.boundary());
}

// Every page that the plan reads or writes.
Harness::PageSet Harness::reach(const StepPlan& plan) const {
  PageSet pages;
  for (const PlanRow& row : plan.rows) pages |= slots_[static_cast<size_t>(row.slot.value)].pages;
  for (const SequenceStart& start : plan.starts)
    for (const Placement& place : start.checkpoint) pages.set(bit_of(place));
  for (const CheckpointWrite& write : plan.checkpoints)
    for (const Placement& place : write.pages) pages.set(bit_of(place));
  return pages;
}

void Harness::check_salt(const Placement& place, SequenceId reader) const {
  const auto& salt_of = [&](SequenceId id) { return requests_[static_cast<size_t>(id.value)].submit.cache_salt; };
  judge_.require(salt_of(ranks_[0].writer(place)) == salt_of(reader), "sequence ", reader,
                 " reads a page of another salt");
}

void Harness::check_fresh(const Placement& place, PageSet& fresh) const {
  const size_t bit = bit_of(place);
  judge_.require(!fill_or_lease_.test(bit), "page ", place.page, " is reused while another node reads or fills it");
  judge_.require(!fresh.test(bit), "page ", place.page, " is given twice");
  fresh.set(bit);
  for (const Flight& flight : flights_)
    judge_.require(!flight.pages.test(bit), "page ", place.page, " is reused under flight");
}

// INV-2 for pages: a fresh page is reachable from no plan in flight and from no other row of this plan.
void Harness::check_pages(const StepPlan& plan) {
  PageSet fresh;
  const PageSet filled = filling();
  fill_or_lease_ = held_for_others();
  std::vector<PageSet> own(slots_.size());  // the fresh ones of each slot
  for (const SequenceStart& start : plan.starts) {
    const size_t slot = static_cast<size_t>(start.slot.value);
    for (const Placement& place : start.state_pages) {
      if (tail_of(start) == nullptr) check_fresh(place, fresh);
      own[slot].set(bit_of(place));
      slots_[slot].pages.set(bit_of(place));
    }
  }
  for (const CheckpointWrite& write : plan.checkpoints)
    for (const Placement& place : write.pages) check_fresh(place, fresh);
  for (const BlockAppend& append : plan.appends) {
    SlotView& slot = slots_[static_cast<size_t>(append.slot.value)];
    const auto start = std::find_if(plan.starts.begin(), plan.starts.end(),
                                    [&](const SequenceStart& candidate) { return candidate.slot == append.slot; });
    const bool cached = start != plan.starts.end() && append.block_index * kBlockTokens < start->num_cached_tokens;
    const auto& [page, dcp_index] = append.place;
    const size_t bit = bit_of(append.place);
    judge_.require(!slot.pages.test(bit), "page ", page, " is twice in slot ", append.slot);
    slot.pages.set(bit);
    note(static_cast<uint64_t>(page.value) * 64 + static_cast<uint64_t>(append.slot.value) +
         (static_cast<uint64_t>(dcp_index) << 32));
    if (cached) {
      judge_.require(!filled.test(bit), "page ", page, " is read while an import fills it");
      check_salt(append.place, slot.sequence);
      continue;
    }
    check_fresh(append.place, fresh);
    own[static_cast<size_t>(append.slot.value)].set(bit);
  }
  saved_ &= ~fresh;
  for (const CheckpointWrite& write : plan.checkpoints)
    for (const Placement& place : write.pages) saved_.set(bit_of(place));
  for (const PlanRow& row : plan.rows) {
    const size_t slot = static_cast<size_t>(row.slot.value);
    judge_.require((slots_[slot].pages & fresh & ~own[slot]).none(), "sequence ", row.sequence,
                   " has lost a page to another");
  }
  for (const SequenceStart& start : plan.starts) {
    if (tails_.contains(start.sequence) && tail_of(start) == nullptr) ++counts_.tails_given_up;
    tails_.erase(start.sequence);
  }
  for (const SequenceStart& start : plan.starts)
    for (const Placement& place : start.checkpoint)
      judge_.require(!fresh.test(bit_of(place)), "page ", place.page, " is copied from and given away at once");
}

// Pages that somebody holds, and some that nobody may hold any more: of sequences that were preempted.
Harness::PageSet Harness::maybe_held() const {
  PageSet held = saved_ | held_for_others();
  for (const Flight& flight : flights_) held |= flight.pages;
  for (const auto& [sequence, tail] : tails_) {
    held.set(bit_of(tail.blocks.back()));
    for (const Placement& place : tail.tail_state) held.set(bit_of(place));
  }
  for (const SlotView& slot : slots_)
    if (slot.sequence.valid() && !requests_[static_cast<size_t>(slot.sequence.value)].ended) held |= slot.pages;
  return held;
}

// DESIGN D6: a new block goes where its sequence has fewest, except that a full index takes none; when deterministic,
// to the index that its number names. `held` has at least the pages that were held at any time while the plan was made.
void Harness::check_balance(const StepPlan& plan, const PageSet& held) {
  const auto has_room = [&](int32_t index) {
    for (int32_t page = 0; page < config_.num_pages; ++page)
      if (!held.test(bit_of({PageId(page), index}))) return true;
    return false;
  };
  // An import holds cached blocks, too, and nobody is told which.
  const bool knows_all =
      std::none_of(imports_.begin(), imports_.end(), [](const auto& entry) { return entry.second.first_block > 0; });
  for (const BlockAppend& append : plan.appends) {
    SlotView& slot = slots_[static_cast<size_t>(append.slot.value)];
    if (config_.deterministic) {
      judge_.require(append.place.dcp_index == append.block_index % config_.dcp_size, "block ", append.block_index,
                     " of sequence ", slot.sequence, " is at dcp index ", append.place.dcp_index);
      ++counts_.dealt_in_turn;
      continue;
    }
    const auto own = static_cast<size_t>(append.place.dcp_index);
    const auto start = std::find_if(plan.starts.begin(), plan.starts.end(),
                                    [&](const SequenceStart& candidate) { return candidate.slot == append.slot; });
    const bool cached = start != plan.starts.end() && append.block_index * kBlockTokens < start->num_cached_tokens;
    const auto end = slot.num_blocks.begin() + config_.dcp_size;
    const bool is_fewest = slot.num_blocks[own] == *std::min_element(slot.num_blocks.begin(), end);
    counts_.dealt += cached ? 0 : 1;
    counts_.spilled += cached || is_fewest ? 0 : 1;
    for (int32_t index = 0; index < config_.dcp_size && knows_all && !cached && !is_fewest; ++index)
      judge_.require(slot.num_blocks[static_cast<size_t>(index)] >= slot.num_blocks[own] || !has_room(index),
                     "sequence ", slot.sequence, " has fewer blocks at dcp index ", index, " than at ", own,
                     " and its next one is there");
    ++slot.num_blocks[own];
  }
}

void Harness::check_row(const StepPlan& plan, const PlanRow& row) const {
  const size_t index = static_cast<size_t>(&row - plan.rows.data());
  const Request& request = requests_[static_cast<size_t>(row.sequence.value)];
  judge_.require(!request.ended, "ended sequence ", row.sequence, " has a row");
  judge_.require(slots_[static_cast<size_t>(row.slot.value)].sequence == row.sequence, "a row in a foreign slot");
  const bool is_chunk = row.prefill() != nullptr;
  judge_.require(is_chunk == (static_cast<int32_t>(index) >= plan.num_decode_rows), "decode rows come first");
  judge_.require(row.num_tokens() > 0, "an empty row");
  const int32_t position = row.position.most, end = position + row.num_tokens();
  const auto num_prompt = static_cast<int32_t>(request.submit.prompt->size());
  const bool is_output = end >= num_prompt;  // of a former life
  judge_.require(config_.deterministic || position >= num_prompt || end <= num_prompt, "a row of ", position, " to ",
                 end, " with a prompt of ", num_prompt);
  if (is_chunk && config_.deterministic && !row.samples() && !(config_.state_pages > 0 && is_output))
    judge_.require(end % config_.attention_alignment == 0, "a chunk ends at ", end);
  if (is_chunk && config_.deterministic && config_.state_pages > 0)
    judge_.require(row.num_tokens() == 1 || end <= static_cast<int32_t>(request.submit.prompt->size()),
                   "outputs run again in a chunk that ends at ", end);
  judge_.require(end < static_cast<int32_t>(request.submit.prompt->size()) + request.max_outputs, "sequence ",
                 row.sequence, " computes its last output");
}

// The order of service, as the scheduler's interface promises it.
bool Harness::is_before(int64_t a, int64_t b) const {
  const Submit& x = requests_[static_cast<size_t>(a)].submit;
  const Submit& y = requests_[static_cast<size_t>(b)].submit;
  return std::tie(x.priority, x.arrival_s, a) < std::tie(y.priority, y.arrival_s, b);
}

// Whether the plan, or one in flight, has all that the sequence could run now.
bool Harness::is_served(int64_t sequence, const StepPlan& plan) const {
  const Request& request = requests_[static_cast<size_t>(sequence)];
  const auto is_own = [&](const PlanRow& row) { return row.sequence.value == sequence; };
  if (std::any_of(plan.rows.begin(), plan.rows.end(), is_own)) return true;
  auto num_outputs = static_cast<int32_t>(request.ids.size());
  for (const Flight& flight : flights_)
    for (const PlanRow& row : flight.plan.rows) num_outputs += is_own(row) ? row.max_ids() : 0;
  return num_outputs >= request.max_outputs;
}

// Under prompt_logprobs, in a step whose rows of logits others took.
bool Harness::waits_for_logits(int64_t sequence, const StepPlan& plan) const {
  int32_t scored = 0;
  for (const PlanRow& row : plan.rows) scored += row.scores_prompt() ? row.num_tokens() : 0;
  return requests_[static_cast<size_t>(sequence)].submit.sampling->prompt_logprobs >= 0 &&
         scored + config_.attention_alignment > kPromptLogprobTokens;
}

// Nobody is admitted past a sequence that does not move, except past one that waits for its leader's prompt or for
// logits.
void Harness::check_queue(const StepPlan& plan) const {
  const auto may_follow = [&](int64_t sequence) {
    const SequenceId leader = requests_[static_cast<size_t>(sequence)].submit.leader;
    return waits_for_logits(sequence, plan) || imports_.contains(SequenceId(sequence)) ||
           (leader.valid() && requests_[static_cast<size_t>(leader.value)].ids.empty());
  };
  for (const SequenceStart& start : plan.starts)
    for (const int64_t other : live_)
      judge_.require(!is_before(other, start.sequence.value) || is_served(other, plan) || may_follow(other),
                     "sequence ", start.sequence, " overtakes sequence ", other);
}

// INV-10: nobody starves. A sequence without a row may see others go on that are served before it, for as long as those
// take; of those that are served after it, only what ran already when it came.
void Harness::check_progress(const StepPlan& plan) {
  if (plan.rows.empty()) return;
  const auto served_after = [&](const PlanRow& a, const PlanRow& b) {
    return is_before(a.sequence.value, b.sequence.value);
  };
  const int64_t last = std::max_element(plan.rows.begin(), plan.rows.end(), served_after)->sequence.value;
  for (const int64_t sequence : live_) {
    Request& request = requests_[static_cast<size_t>(sequence)];
    const bool moved = std::any_of(plan.rows.begin(), plan.rows.end(),
                                   [&](const PlanRow& row) { return row.sequence.value == sequence; });
    const bool awaits = imports_.contains(SequenceId(sequence));
    if (moved || awaits) request.num_overtaken = 0;
    if (moved || awaits || !is_before(sequence, last) || waits_for_logits(sequence, plan)) continue;
    ++request.num_overtaken;
    counts_.most_overtaken = std::max<int64_t>(counts_.most_overtaken, request.num_overtaken);
    judge_.require(request.num_overtaken < kMaxPlansOvertaken, "sequence ", sequence, " does not move while ", last,
                   " does, which is served after it");
  }
}

void Harness::take_updates() {
  take_growth();
  for (const SequenceUpdate& update : scheduler_.take_updates()) take_update(update);
}

// INV-3, INV-6: exactly one end, and no id that the request would not get alone.
void Harness::take_update(const SequenceUpdate& update) {
  judge_.require(update.sequence.valid() && update.sequence.value < static_cast<int64_t>(requests_.size()),
                 "an update for nobody");
  Request& request = requests_[static_cast<size_t>(update.sequence.value)];
  judge_.require(!request.ended, "sequence ", update.sequence, " goes on after its end");
  for (const int32_t id : update.ids) {
    const size_t index = request.ids.size();
    judge_.require(index < request.expected.ids.size() && request.expected.ids[index] == id, "sequence ",
                   update.sequence, " output ", index, " is not what it gives alone");
    request.ids.push_back(id);
    note(static_cast<uint64_t>(id));
  }
  counts_.ids += static_cast<int64_t>(update.ids.size());
  for (const TokenLogprobs& logprobs : update.prompt_logprobs) {
    const size_t index = static_cast<size_t>(request.num_prompt_logprobs++);
    judge_.require(index < request.expected.prompt_logprobs.size() &&
                       request.expected.prompt_logprobs[index] == logprobs.logprob &&
                       (*request.submit.prompt)[index + 1] == logprobs.id,
                   "sequence ", update.sequence, ": wrong prompt logprob ", index);
  }
  judge_.require(update.num_cached_tokens < static_cast<int32_t>(request.submit.prompt->size()),
                 "a hit that covers the prompt");
  if (!update.finish) return see_update(update);
  check_finish(request, update);
  if (update.lease) begin_lease(update.lease);
  request.ended = true;
  tails_.erase(update.sequence);
  live_.erase(std::find(live_.begin(), live_.end(), update.sequence.value));
  note(static_cast<uint64_t>(*update.finish) + 1000000);
  counts_.expired += *update.finish == FinishReason::kDeadline ? 1 : 0;
  counts_.errors += *update.finish == FinishReason::kError ? 1 : 0;
  see_update(update);
}

void Harness::check_finish(const Request& request, const SequenceUpdate& update) const {
  const FinishReason finish = *update.finish;
  if (finish == FinishReason::kDeadline) {
    judge_.require(request.submit.deadline_s > 0 && request.submit.deadline_s <= now_s_, "an early deadline");
    return;
  }
  if (request.may_fail && finish == FinishReason::kError) return;
  if (request.cancelled) {
    judge_.require(finish == FinishReason::kCancelled || finish == FinishReason::kStop, "a cancel ends otherwise");
    return;
  }
  judge_.require(finish == request.expected.finish, "sequence ", update.sequence,
                 " ends for another reason than alone");
  judge_.require(request.ids.size() == request.expected.ids.size(), "sequence ", update.sequence, " ends at ",
                 request.ids.size(), " outputs, alone at ", request.expected.ids.size());
  judge_.require(update.stop_id == (finish == FinishReason::kStop ? request.ids.back() : -1), "a wrong stop id");
  judge_.require(update.error.empty() == (finish != FinishReason::kError), "an error without text");
  if (request.submit.sampling->prompt_logprobs >= 0 && finish != FinishReason::kError)
    judge_.require(request.num_prompt_logprobs == static_cast<int32_t>(request.submit.prompt->size()) - 1,
                   "prompt logprobs are missing");
}

// INV-1, INV-5: pages and sequences are all accounted for.
void Harness::check_books() {
  scheduler_.check_some(13);
  scheduler_.check_integrity();
  const SchedulerGauges gauges = scheduler_.gauges();
  judge_.require(gauges.free_pages + gauges.cached_pages + gauges.used_pages == gauges.total_pages, "pages are lost");
  judge_.require(
      gauges.free_pages + gauges.latent_pages + gauges.state_pages + gauges.checkpoint_pages == gauges.total_pages,
      "pages are of no type");
  judge_.require(config_.state_pages == 0 || gauges.state_pages % num_state_pages() == 0, "half a state");
  const int32_t known = gauges.running + gauges.waiting + gauges.awaiting;
  judge_.require(known == static_cast<int32_t>(live_.size()), live_.size(), " sequences live, ", known, " known");
  judge_.require(gauges.leases == std::ssize(leases_), leases_.size(), " leases, ", gauges.leases, " known");
  if (flights_.empty() && gauges.running == 0 && imports_.empty() && leases_.empty() && tails_.empty())
    judge_.require(gauges.used_pages == 0, gauges.used_pages, " pages used by nobody");
}

void Harness::check_deadlines() const {
  for (const int64_t sequence : live_) {
    const double deadline_s = requests_[static_cast<size_t>(sequence)].submit.deadline_s;
    judge_.require(deadline_s <= 0 || deadline_s > now_s_, "sequence ", sequence, " lives past its deadline");
  }
}

void Harness::check_end() {
  judge_.require(live_.empty(), live_.size(), " sequences never ended");
  judge_.require(imports_.empty() && leases_.empty(), imports_.size(), " imports and ", leases_.size(),
                 " leases never ended");
  scheduler_.drop_prefix_cache();
  const SchedulerGauges gauges = scheduler_.gauges();
  judge_.require(gauges.free_pages == gauges.total_pages, "a page is not free in the end");
  scheduler_.check_integrity();
}

}  // namespace perigee::sim
