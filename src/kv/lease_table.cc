#include "kv/lease_table.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

namespace perigee {

LeaseTable::LeaseTable(PageStore store, CacheShape shape, uint64_t incarnation, double lifetime_s, const Clock& clock,
                       std::function<void(SequenceId)> on_free)
    : store_(std::move(store)),
      shape_(std::move(shape)),
      incarnation_(incarnation),
      lifetime_s_(lifetime_s),
      clock_(clock),
      on_free_(std::move(on_free)) {}

LeaseHold LeaseTable::Entry::hold() const {
  if (growth.stage == LeaseStage::kWithdrawn) return {.stage = growth.stage};
  const auto num_blocks = static_cast<int32_t>(growth.lease->blocks.size());
  const bool has_checkpoint = !growth.lease->checkpoint.empty();
  if (tail_fits) return {num_blocks, growth.stage, growth.num_tokens, has_checkpoint};
  const int32_t in_blocks = growth.full_blocks() * kBlockTokens;
  return {std::min(num_blocks, growth.full_blocks()), growth.stage, in_blocks, has_checkpoint};
}

LeaseName LeaseTable::grant(std::shared_ptr<const Lease> lease, Tokens tokens) {
  const int32_t num_tokens = lease->num_tokens;
  return grant(LeaseGrowth{.stage = LeaseStage::kWhole, .num_tokens = num_tokens, .lease = std::move(lease)},
               std::move(tokens));
}

LeaseName LeaseTable::grant(LeaseGrowth growth, Tokens tokens) {
  const SequenceId sequence = growth.lease->sequence;
  CHECK(std::ssize(*tokens) >= growth.num_tokens, "a lease of more than its prompt");
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      Entry entry{.growth = std::move(growth), .tokens = std::move(tokens), .end_s = clock_.now_s() + lifetime_s_};
      const bool fresh = entries_.emplace(sequence.value, std::move(entry)).second;
      CHECK(fresh, "sequence ", sequence, " is leased twice");
      ++counts_.granted;
      return {incarnation_, sequence.value};
    }
  }
  on_free_(sequence);
  return {incarnation_, sequence.value};
}

void LeaseTable::grow(const LeaseGrowth& growth) {
  std::vector<SequenceId> freed;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(growth.lease->sequence.value);
    if (found == entries_.end() || found->second.over) return;
    found->second.growth = growth;
    if (growth.stage == LeaseStage::kWithdrawn) {
      ++counts_.withdrawn;
      let_go(found->second, freed);
    }
    if (growth.stage == LeaseStage::kFailed) end(found, freed);
    ++growth_;
    grown_.notify_all();
  }
  free(freed);
}

// Requires the mutex.
Result<LeaseTable::Entries::iterator> LeaseTable::find(const LeaseName& name) {
  const auto found = entries_.find(name.number);
  if (name.incarnation != incarnation_ || found == entries_.end() || found->second.over) {
    ++counts_.refused_reads;
    return Error(Code::kNotFound,
                 "the lease is over: its time has passed, it was released, or its node was started anew", "lease");
  }
  return found;
}

// Requires the mutex. Nothing is read of it from now on; the last of its readers lets it go.
void LeaseTable::let_go(Entry& entry, std::vector<SequenceId>& freed) {
  if (entry.num_readers > 0 || std::exchange(entry.free, true)) return;
  freed.push_back(entry.growth.lease->sequence);
}

// Requires the mutex.
void LeaseTable::end(Entries::iterator entry, std::vector<SequenceId>& freed) {
  entry->second.over = true;
  if (entry->second.num_readers > 0) return;  // the last of them frees it
  let_go(entry->second, freed);
  entries_.erase(entry);
}

void LeaseTable::free(const std::vector<SequenceId>& freed) const {
  for (const SequenceId sequence : freed) on_free_(sequence);
}

void LeaseTable::expire() {
  std::vector<SequenceId> freed;
  {
    const std::lock_guard lock(mutex_);
    const double now_s = clock_.now_s();
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const auto next = std::next(entry);
      if (!entry->second.over && entry->second.end_s <= now_s) {
        ++counts_.expired;
        end(entry, freed);
      }
      entry = next;
    }
  }
  free(freed);
}

void LeaseTable::close() {
  std::vector<SequenceId> freed;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    grown_.notify_all();
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const auto next = std::next(entry);
      if (!entry->second.over) end(entry, freed);
      entry = next;
    }
    read_.wait(lock, [&] { return entries_.empty(); });
  }
  free(freed);
}

Result<LeaseHold> LeaseTable::open(const LeaseName& name, std::span<const int32_t> tokens, int32_t num_blocks) {
  const std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const auto entry, find(name));
  Entry& held = entry->second;
  // All of them: the checkpoint is the state after the last one.
  if (num_blocks != held.growth.full_blocks()) return bad_input("the lease has another number of blocks", "num_blocks");
  const auto in_blocks = static_cast<size_t>(num_blocks) * kBlockTokens;
  const auto first_other = std::mismatch(tokens.begin(), tokens.end(), held.tokens->begin(), held.tokens->end()).first;
  const auto num_same = static_cast<size_t>(first_other - tokens.begin());
  held.tail_fits = num_same == tokens.size() && std::ssize(tokens) == held.growth.num_tokens;
  if (num_same < in_blocks) {
    ++counts_.refused_reads;
    return bad_input("the lease is of other tokens", "tokens");
  }
  return held.hold();
}

Status LeaseTable::read(const LeaseName& name, UnitRange units, std::span<uint8_t> out) {
  return read(name, units, [&](const PageStore& store, const UnitPages& pages) -> Status {
    if (std::ssize(out) != units.count * shape_.unit_bytes(units.group)) return bad_input("a wrong size", "units");
    return store.gather(pages, units, out);
  });
}

Status LeaseTable::read(const LeaseName& name, UnitRange units, const Take& take) {
  std::shared_ptr<const Lease> lease;
  Entries::iterator entry;
  {
    const std::lock_guard lock(mutex_);
    ASSIGN_OR_RETURN(entry, find(name));
    if (entry->second.growth.stage == LeaseStage::kWithdrawn)
      return Error(Code::kNotFound, "the lease was withdrawn before it was whole", "lease");
    lease = entry->second.growth.lease;
    int64_t first = lease->checkpoint.empty() ? shape_.state_units() : 0;
    int64_t end = shape_.state_units() * (lease->tail_state.empty() ? 1 : 2);
    if (units.group != UnitGroup::kState) first = 0;
    if (units.group == UnitGroup::kBlocks) end = std::ssize(lease->blocks);
    if (units.group == UnitGroup::kDraft) end = std::ssize(lease->blocks) * shape_.draft_parts;
    if (units.first < first || units.count < 1 || units.first > end - units.count)
      return bad_input("units that the lease has not", "units");
    ++entry->second.num_readers;
  }
  Status taken;
  try {
    taken = take(store_, unit_pages(*lease));
  } catch (const std::bad_alloc&) {  // the pages are to be freed all the same
    taken = Error(Code::kExhausted, "no memory to read a lease");
  }
  std::vector<SequenceId> freed;
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    --entry->second.num_readers;
    if (taken.ok()) counts_.bytes += units.count * shape_.unit_bytes(units.group);
    over = entry->second.over;
    if (entry->second.growth.stage == LeaseStage::kWithdrawn) let_go(entry->second, freed);
    if (over) end(entry, freed);
    if (over) read_.notify_all();
  }
  free(freed);
  if (over) return Error(Code::kNotFound, "the lease has ended while it was read", "lease");
  return taken;
}

// One that was withdrawn, too: its reader must learn that, and not that its time is over.
Result<LeaseHold> LeaseTable::extend(const LeaseName& name) {
  const std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const auto entry, find(name));
  entry->second.end_s = clock_.now_s() + lifetime_s_;
  return entry->second.hold();
}

Result<uint64_t> LeaseTable::await_growth(uint64_t known, double wait_s) {
  std::unique_lock lock(mutex_);
  grown_.wait_for(lock, std::chrono::duration<double>(wait_s), [&] { return closed_ || growth_ != known; });
  if (closed_) return Error(Code::kUnavailable, "the node is closing");
  return growth_;
}

void LeaseTable::release(const LeaseName& name) {
  std::vector<SequenceId> freed;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(name.number);
    if (name.incarnation != incarnation_ || found == entries_.end() || found->second.over) return;
    ++counts_.released;
    end(found, freed);
  }
  free(freed);
}

LeaseCounts LeaseTable::counts() const {
  const std::lock_guard lock(mutex_);
  LeaseCounts counts = counts_;
  counts.held = std::ssize(entries_);
  return counts;
}

}  // namespace perigee
