#include "sim/fake_worker.h"

#include <utility>

#include "control/faults.h"
#include "exec/mask_box.h"

namespace perigee::sim {

void FakeWorker::launch(const StepPlan& plan) {
  for (const PlanRow& row : plan.rows) {
    Work work;
    work.step = plan.step;
    work.row = row;
    for (const SequenceStart& start : plan.starts)
      if (start.slot == row.slot) work.starts.push_back(start);
    for (const BlockAppend& append : plan.appends)
      if (append.slot == row.slot) work.appends.push_back(append);
    for (const CheckpointWrite& write : plan.checkpoints)
      if (write.slot == row.slot) work.checkpoints.push_back(write);
    if (const Prefill* prefill = row.prefill()) {
      const auto first = plan.tokens.begin() + prefill->tokens_offset;
      work.tokens.assign(first, first + prefill->num_tokens);
    }
    queue_.push_back(std::move(work));
  }
}

void FakeWorker::set_masks(std::shared_ptr<const StepMasks> masks) {
  bool asked = false;
  for (Work& work : queue_) {
    if (work.step != masks->step || !work.row.masked) continue;
    judge_.require(!work.masks, "step ", masks->step, " gets masks twice");
    work.masks = masks;
    asked = true;
  }
  judge_.require(asked, "step ", masks->step, " gets masks and has no masked rows");
}

// The first of its slot, with its masks.
bool FakeWorker::may_run(size_t index) const {
  if (queue_[index].row.masked && !queue_[index].masks) return false;
  for (size_t i = 0; i < index; ++i)
    if (!queue_[i].done && queue_[i].row.slot == queue_[index].row.slot) return false;
  return true;
}

void FakeWorker::run_one(Rng& rng) {
  if (queue_.empty()) return;
  const size_t index = rng.below(queue_.size());
  if (!queue_[index].done && may_run(index)) run(queue_[index]);
}

StepResult FakeWorker::collect(StepId step) {
  for (size_t i = 0; i < queue_.size(); ++i) {
    if (queue_[i].step != step) continue;
    for (size_t j = 0; j <= i; ++j)
      if (!queue_[j].done && queue_[j].row.slot == queue_[i].row.slot) run(queue_[j]);
  }
  StepResult result;
  result.step = step;
  std::deque<Work> rest;
  for (Work& work : queue_) {
    if (work.step == step) {
      result.rows.push_back(std::move(work.result));
    } else {
      rest.push_back(std::move(work));
    }
  }
  queue_ = std::move(rest);
  return result;
}

const FakeWorker::Page& FakeWorker::page(const Placement& place) const {
  judge_.require(place.dcp_index >= 0 && place.dcp_index < std::ssize(pools_), "no rank has dcp index ",
                 place.dcp_index);
  const std::vector<Page>& pages = pools_[static_cast<size_t>(place.dcp_index)].pages;
  judge_.require(place.page.valid() && place.page.value < std::ssize(pages), "the pool at index ", place.dcp_index,
                 " has no page ", place.page);
  return pages[static_cast<size_t>(place.page.value)];
}

const FakeWorker::Words& FakeWorker::words(const Placement& place) const {
  (void)page(place);
  return pools_[static_cast<size_t>(place.dcp_index)].words[static_cast<size_t>(place.page.value)];
}

void FakeWorker::filled(const Placement& place, SequenceId writer) {
  page(place) = {.writer = writer};
}

void FakeWorker::filled_state(const Placement& place, SequenceId writer, int32_t position, size_t index) {
  page(place) = {.writer = writer, .state_position = position, .state_index = index};
}

SequenceId FakeWorker::writer(const Placement& place) const {
  return page(place).writer;
}

void FakeWorker::run(Work& work) {
  judge_.require(!work.row.masked || work.masks, "step ", work.step, " is to end and has no masks");
  Slot& slot = slots_[static_cast<size_t>(work.row.slot.value)];
  for (const SequenceStart& start : work.starts) {
    slot = Slot{};
    slot.start = start;
    slot.length = start.num_cached_tokens;
    slot.last_id = start.tokens->back();
    slot.num_outputs = static_cast<int32_t>(start.tokens->size()) - start.num_prompt_tokens;
    start_state(slot);
  }
  judge_.require(slot.start.sequence == work.row.sequence, "slot ", work.row.slot, " runs a row of sequence ",
                 work.row.sequence, " but holds ", slot.start.sequence);
  for (const BlockAppend& added : work.appends) append(slot, added);
  work.result.slot = work.row.slot;
  work.result.sequence = work.row.sequence;
  compute(slot, work);
  if (work.row.samples()) slot.drafts = guess(slot);
  if (work.row.masked) work.result.drafts = slot.drafts;
  work.done = true;
}

void FakeWorker::append(Slot& slot, const BlockAppend& append) {
  judge_.require(append.block_index == static_cast<int32_t>(slot.table.size()), "sequence ", slot.start.sequence,
                 ": block ", append.block_index, " arrives as number ", slot.table.size());
  slot.table.push_back(append.place);
  if (append.block_index * kBlockTokens < slot.start.num_cached_tokens) return;
  filled(append.place, slot.start.sequence);
  words(append.place).fill(kPoison);
}

uint64_t& FakeWorker::entry(Slot& slot, int32_t position) {
  const size_t block = static_cast<size_t>(position / kBlockTokens);
  judge_.require(block < slot.table.size(), "sequence ", slot.start.sequence, " has no page for position ", position);
  return words(slot.table[block])[static_cast<size_t>(position % kBlockTokens)];
}

Reading FakeWorker::read_cache(Slot& slot) {
  Reading reading;
  for (int32_t first = 0; first < slot.length; first += kBlockTokens) {
    const uint64_t* entries = &entry(slot, first);
    const int32_t count = std::min(kBlockTokens, slot.length - first);
    for (int32_t i = 0; i < count; ++i) reading.read(entries[i]);
  }
  return reading;
}

void FakeWorker::compute(Slot& slot, Work& work) {
  const PlanRow& row = work.row;
  judge_.require(row.position.contains(slot.length), "sequence ", row.sequence, ": row at ", row.position.least, " to ",
                 row.position.most, ", length ", slot.length);
  if (row.prefill() == nullptr) {
    judge_.require(slot.last_id >= 0, "sequence ", row.sequence, " decodes without an id");
    work.tokens.assign(1, slot.last_id);
    if (row.num_drafts() > 0) return verify(slot, work);
  }
  Context context{.cache = read_cache(slot), .state = commit_state(slot, work)};
  for (const int32_t token : work.tokens) {
    const auto& known = *slot.start.tokens;
    const size_t position = static_cast<size_t>(slot.length);
    if (position < known.size())
      judge_.require(known[position] == token, "sequence ", row.sequence, ": wrong token at ", position);
    const uint64_t value = entry_of(token, slot.length, context);
    entry(slot, slot.length++) = value;
    context.cache.read(value);
    context.state.read(token);
    if (!row.scores_prompt()) continue;
    TokenLogprobs logprobs;
    logprobs.id = position + 1 < known.size() ? known[position + 1] : -1;
    logprobs.logprob = prompt_logprob(context);
    work.result.prompt_logprobs.push_back(logprobs);
  }
  if (row.samples()) sample(slot, context, work);
}

// Guesses that are right three times in four. One drafter in four finds fewer than there is room for.
DraftIds FakeWorker::guess(const Slot& slot) const {
  DraftIds drafts;
  const std::vector<int32_t>& known = oracle_(slot.start.sequence);
  const uint64_t find = mix64(slot.start.sampling->seed + static_cast<uint64_t>(slot.num_outputs));
  const uint64_t num_drafts = find % 4 == 0 ? (find >> 32) % (kMaxDrafts + 1) : kMaxDrafts;
  for (uint64_t i = 0; i < num_drafts; ++i) {
    const size_t output = static_cast<size_t>(slot.num_outputs) + i;
    const uint64_t luck = mix64(find + i);
    const bool right = output < known.size() && luck % 4 != 0;
    drafts.push_back(right ? known[output] : static_cast<int32_t>(luck % kVocabulary));
  }
  return drafts;
}

// All tokens are written; the length moves past those that are accepted.
void FakeWorker::verify(Slot& slot, Work& work) {
  Context context{.cache = read_cache(slot), .state = commit_state(slot, work)};
  const int32_t first = slot.length;
  const DraftIds drafts = slot.drafts;
  work.result.num_drafts = std::min(work.row.num_drafts(), static_cast<int32_t>(drafts.size()));
  const int32_t num_tokens = 1 + work.result.num_drafts;
  bool accepted = true;
  for (int32_t i = 0; i < num_tokens; ++i) {
    const int32_t token = work.tokens[static_cast<size_t>(i)];
    const uint64_t value = entry_of(token, first + i, context);
    entry(slot, first + i) = value;
    context.cache.read(value);
    context.state.read(token);
    if (accepted) {
      ++slot.length;
      sample(slot, context, work);
    }
    if (i + 1 == num_tokens) break;
    work.tokens.push_back(drafts[static_cast<size_t>(i)]);
    accepted = accepted && work.result.finite && work.tokens.back() == slot.last_id;
  }
  if (!slot.start.state_pages.empty()) slot.ring = work.tokens;
}

// At the row's next place.
void FakeWorker::sample(Slot& slot, const Context& context, Work& work) {
  constexpr size_t kWords = (kVocabulary + 31) / 32;
  RowResult& result = work.result;
  const uint64_t seed = slot.start.sampling->seed;
  std::span<const uint32_t> mask;
  if (work.masks)
    for (const RowMask& row : work.masks->rows)
      if (row.slot == work.row.slot) mask = row.words;
  if (!mask.empty()) {
    const auto num_drafts = std::min(static_cast<size_t>(work.row.num_drafts()), slot.drafts.size());
    judge_.require(mask.size() == kWords * (work.row.prefill() == nullptr ? 1 + num_drafts : 1), "sequence ",
                   work.row.sequence, " has masks of ", mask.size(), " words");
    mask = mask.subspan(kWords * result.ids.size(), kWords);
  }
  result.finite = is_finite(seed, slot.num_outputs);
  slot.last_id = next_allowed(next_id(context, seed, slot.num_outputs), [&](int32_t id) {
    return mask.empty() || (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1u) != 0;
  });
  ++slot.num_outputs;
  if (result.finite) result.ids.push_back(slot.last_id);
}

int32_t FakeWorker::state_position(const Placement& place, size_t index) const {
  const Page& entry = page(place);
  return entry.state_index == index ? entry.state_position : -1;
}

// A copy of the checkpoint, word by word, or zeros.
void FakeWorker::start_state(Slot& slot) {
  const SequenceStart& start = slot.start;
  slot.committed = start.num_cached_tokens;
  if (start.checkpoint.empty() && !planted(Fault::kStateNotCleared))
    write_state(slot, start.state_pages, State{std::vector<uint64_t>(start.state_pages.size(), 0)});
  judge_.require(start.checkpoint.empty() || start.checkpoint.size() == start.state_pages.size(), "sequence ",
                 start.sequence, " starts from half a checkpoint");
  for (size_t i = 0; i < start.checkpoint.size(); ++i) {
    judge_.require(start.state_pages[i].dcp_index == start.checkpoint[i].dcp_index, "sequence ", start.sequence,
                   " copies a state from another rank");
    if (start.state_pages[i] == start.checkpoint[i]) continue;
    page(start.state_pages[i]) = page(start.checkpoint[i]);
    words(start.state_pages[i]) = words(start.checkpoint[i]);
  }
}

// A state page has its value in the first word; the others follow from it, so that no foreign word goes unnoticed.
State FakeWorker::read_state(const std::vector<Placement>& pages) const {
  State state;
  for (const Placement& place : pages) {
    const Words& all = words(place);
    uint64_t value = all[0];
    for (size_t i = 1; i < all.size(); ++i) value ^= all[i] ^ mix64(all[0] + i);
    state.values.push_back(value);
  }
  return state;
}

void FakeWorker::write_state(Slot& slot, const std::vector<Placement>& pages, const State& state) {
  judge_.require(pages.size() == state.values.size(), "sequence ", slot.start.sequence, " has no whole state");
  for (size_t i = 0; i < pages.size(); ++i) {
    filled_state(pages[i], slot.start.sequence, slot.committed, i);
    Words& all = words(pages[i]);
    all[0] = state.values[i];
    for (size_t j = 1; j < all.size(); ++j) all[j] = mix64(state.values[i] + j);
  }
}

// Replays the ring, which brings the state to the row's position; a prefill chunk commits its own tokens too. Returns
// the state at the row's position, for the row's tokens to go on from.
State FakeWorker::commit_state(Slot& slot, Work& work) {
  const std::vector<Placement>& pages = slot.start.state_pages;
  if (pages.empty()) return {};
  State state = read_state(pages);
  std::vector<int32_t> tokens = std::exchange(slot.ring, {});
  if (planted(Fault::kRingDropped)) tokens.clear();
  const auto num_kept = static_cast<size_t>(slot.length - slot.committed);
  if (tokens.size() > num_kept && !planted(Fault::kRingNotCut)) tokens.resize(num_kept);
  const int32_t before = slot.committed;
  State at_row;
  auto next = work.checkpoints.begin();  // passed once, as a device does
  const auto commit = [&](int32_t token) {
    state.read(token);
    ++slot.committed;
    if (next == work.checkpoints.end() || next->boundary() != slot.committed) return;
    write_state(slot, (next++)->pages, state);
    work.result.checkpoints.push_back(slot.committed);
  };
  for (const int32_t token : tokens) commit(token);
  if (planted(Fault::kRingDropped)) slot.committed = slot.length;
  judge_.require(slot.committed == slot.length, "sequence ", work.row.sequence, ": the state is at ", slot.committed,
                 ", the row at ", slot.length);
  at_row = state;
  if (work.row.prefill() == nullptr) {
    slot.ring = work.tokens;
    if (planted(Fault::kCommitUnconfirmed)) state.read(work.tokens[0]);
  } else {
    for (const int32_t token : work.tokens) commit(token);
  }
  write_state(slot, pages, state);
  for (const CheckpointWrite& write : work.checkpoints) {
    const int32_t boundary = write.boundary();
    if (boundary <= before || boundary > slot.committed) continue;
    judge_.require(state_position(write.pages[0], 0) == boundary, "sequence ", work.row.sequence, " did not commit ",
                   boundary);
  }
  return at_row;
}

}  // namespace perigee::sim
