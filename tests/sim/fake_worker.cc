#include "sim/fake_worker.h"

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
    if (!row.is_decode()) {
      const auto first = plan.tokens.begin() + row.tokens_offset;
      work.tokens.assign(first, first + row.num_tokens);
    }
    queue_.push_back(std::move(work));
  }
}

bool FakeWorker::is_first_of_slot(size_t index) const {
  for (size_t i = 0; i < index; ++i)
    if (!queue_[i].done && queue_[i].row.slot == queue_[index].row.slot) return false;
  return true;
}

void FakeWorker::run_one(Rng& rng) {
  if (queue_.empty()) return;
  const size_t index = rng.below(queue_.size());
  if (!queue_[index].done && is_first_of_slot(index)) run(queue_[index]);
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

SequenceId FakeWorker::writer(PageId page) const {
  return pages_[static_cast<size_t>(page.value)].writer;
}

void FakeWorker::run(Work& work) {
  Slot& slot = slots_[static_cast<size_t>(work.row.slot.value)];
  for (const SequenceStart& start : work.starts) {
    slot = Slot{};
    slot.start = start;
    slot.length = start.num_cached_tokens;
    slot.num_outputs = static_cast<int32_t>(start.tokens->size()) - start.num_prompt_tokens;
  }
  judge_.require(slot.start.sequence == work.row.sequence, "slot ", work.row.slot, " runs a row of sequence ",
                 work.row.sequence, " but holds ", slot.start.sequence);
  for (const BlockAppend& added : work.appends) append(slot, added);
  work.result.slot = work.row.slot;
  work.result.sequence = work.row.sequence;
  compute(slot, work);
  work.done = true;
}

void FakeWorker::append(Slot& slot, const BlockAppend& append) {
  judge_.require(append.block_index == static_cast<int32_t>(slot.table.size()), "sequence ", slot.start.sequence,
                 ": block ", append.block_index, " arrives as number ", slot.table.size());
  slot.table.push_back(append.page);
  if (append.block_index * kBlockTokens < slot.start.num_cached_tokens) return;
  Page& page = pages_[static_cast<size_t>(append.page.value)];
  page.writer = slot.start.sequence;
  page.entries.fill(kPoison);
}

uint64_t& FakeWorker::entry(Slot& slot, int32_t position) {
  const size_t block = static_cast<size_t>(position / kBlockTokens);
  judge_.require(block < slot.table.size(), "sequence ", slot.start.sequence, " has no page for position ", position);
  Page& page = pages_[static_cast<size_t>(slot.table[block].value)];
  return page.entries[static_cast<size_t>(position % kBlockTokens)];
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
  judge_.require(row.position == slot.length, "sequence ", row.sequence, ": row at ", row.position, ", length ",
                 slot.length);
  if (row.is_decode()) {
    judge_.require(slot.last_id >= 0 && row.num_tokens == 1, "sequence ", row.sequence, " decodes without an id");
    work.tokens.assign(1, slot.last_id);
  }
  Reading reading = read_cache(slot);
  for (const int32_t token : work.tokens) {
    const auto& known = *slot.start.tokens;
    const size_t position = static_cast<size_t>(slot.length);
    if (position < known.size())
      judge_.require(known[position] == token, "sequence ", row.sequence, ": wrong token at ", position);
    const uint64_t value = entry_of(token, slot.length, reading);
    entry(slot, slot.length++) = value;
    reading.read(value);
    if (!row.prompt_logprobs) continue;
    TokenLogprobs logprobs;
    logprobs.id = position + 1 < known.size() ? known[position + 1] : -1;
    logprobs.logprob = prompt_logprob(reading);
    work.result.prompt_logprobs.push_back(logprobs);
  }
  slot.last_id = -1;
  if (row.sample) sample(slot, reading, work.result);
}

void FakeWorker::sample(Slot& slot, const Reading& reading, RowResult& result) {
  const uint64_t seed = slot.start.sampling->seed;
  result.finite = is_finite(seed, slot.num_outputs);
  slot.last_id = next_id(reading, seed, slot.num_outputs);
  ++slot.num_outputs;
  result.ids.assign(1, slot.last_id);
}

}  // namespace perigee::sim
