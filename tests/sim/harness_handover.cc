// Pages that leases hold and that imports fill: INV-14.

#include <algorithm>

#include "sim/harness.h"

namespace perigee::sim {
namespace {

// Of a lease or an import.
template <typename T>
std::vector<Placement> pages_of(const T& of) {
  std::vector<Placement> pages = of.blocks;
  pages.insert(pages.end(), of.checkpoint.begin(), of.checkpoint.end());
  pages.insert(pages.end(), of.tail_state.begin(), of.tail_state.end());
  return pages;
}

}  // namespace

// Of the newest plan.
void Harness::take_imports() {
  for (Import& import : scheduler_.take_imports()) {
    const auto known = static_cast<size_t>(import.sequence.value);
    judge_.require(known < requests_.size() && !requests_[known].ended, "an import for nobody");
    judge_.require(!imports_.contains(import.sequence), "sequence ", import.sequence, " imports twice");
    if (!import.empty()) begin_import(import);
    new_imports_.push_back(std::move(import));
  }
}

void Harness::begin_import(const Import& import) {
  if (!import.checkpoint.empty() || config_.state_pages > 0) check_everywhere(import.checkpoint, "a checkpoint");
  if (!import.tail_state.empty()) check_everywhere(import.tail_state, "a tail's state");
  judge_.require((import.num_tokens + kBlockTokens - 1) / kBlockTokens ==
                     import.first_block + static_cast<int32_t>(import.blocks.size()),
                 "sequence ", import.sequence, " imports ", import.num_tokens, " tokens in ", import.blocks.size(),
                 " blocks after ", import.first_block);
  const PageSet taken = held_for_others();
  PageSet fresh;
  for (const Placement& place : pages_of(import)) {
    const size_t bit = bit_of(place);
    judge_.require(!fresh.test(bit) && !taken.test(bit), "page ", place.page, " is to be filled twice");
    fresh.set(bit);
    for (const Flight& flight : flights_)
      judge_.require(!flight.pages.test(bit), "page ", place.page, " is reused under flight");
  }
  for (size_t i = 0; config_.deterministic && i < import.blocks.size(); ++i)
    judge_.require(import.blocks[i].dcp_index == (import.first_block + static_cast<int32_t>(i)) % config_.dcp_size,
                   "an imported block is at dcp index ", import.blocks[i].dcp_index);
  imports_.emplace(import.sequence, import);
}

void Harness::end_import(SequenceId sequence, ImportEnd end) {
  const auto found = imports_.find(sequence);
  judge_.require(found != imports_.end(), "sequence ", sequence, " ends an import that it has not");
  const Import import = std::move(found->second);
  imports_.erase(found);
  Request& request = requests_[static_cast<size_t>(sequence.value)];
  if (has_arrived(end)) {
    const int32_t in_blocks = import.num_tokens / kBlockTokens * kBlockTokens;
    for (const Placement& place : import.blocks) ranks_[0].filled(place, sequence);
    for (size_t i = 0; end != ImportEnd::kWithoutCheckpoint && i < import.checkpoint.size(); ++i)
      ranks_[0].filled_state(import.checkpoint[i], sequence, in_blocks, i);
    const bool tail_too = end != ImportEnd::kWithoutTail && import.has_tail() && !request.ended;
    for (size_t i = 0; tail_too && i < import.tail_state.size(); ++i)
      ranks_[0].filled_state(import.tail_state[i], sequence, import.num_tokens, i);
    if (tail_too) tails_[sequence] = import;
  }
  if (end == ImportEnd::kFail) request.may_fail = true;
}

// Of one that is whole: that another node can start from its end, or from that of its last full block.
void Harness::check_lease(const Lease& lease) {
  const bool has_tail = lease.num_tokens % kBlockTokens != 0;
  const bool has_state = std::ssize(lease.checkpoint) == num_state_pages() || (has_tail && lease.checkpoint.empty());
  const bool has_tail_state = std::ssize(lease.tail_state) == (has_tail ? num_state_pages() : 0);
  const bool has_blocks = std::ssize(lease.blocks) == (lease.num_tokens + kBlockTokens - 1) / kBlockTokens;
  judge_.require(has_blocks && has_state && has_tail_state, "lease ", lease.sequence, " is not whole");
  for (size_t i = 0; i < lease.tail_state.size(); ++i)
    judge_.require(ranks_[0].state_position(lease.tail_state[i], i) == lease.num_tokens, "lease ", lease.sequence,
                   " has a state after other tokens");
}

void Harness::begin_lease(const std::shared_ptr<const Lease>& lease) {
  const LeaseGrowth whole{.stage = LeaseStage::kWhole, .num_tokens = lease->num_tokens, .lease = lease};
  judge_.require(leases_.emplace(lease->sequence, whole).second, "sequence ", lease->sequence, " is leased twice");
  for (const Placement& place : pages_of(*lease)) ++leased_[bit_of(place)];
  check_lease(*lease);
}

void Harness::take_growth() {
  for (LeaseGrowth& growth : scheduler_.take_lease_growth()) {
    grow_lease(growth);
    new_growth_.push_back(std::move(growth));
  }
}

// What is announced is written: no plan in flight has rows that write it.
void Harness::grow_lease(const LeaseGrowth& growth) {
  const SequenceId sequence = growth.lease->sequence;
  const auto [entry, fresh] = leases_.try_emplace(sequence, growth);
  const LeaseGrowth before = entry->second;
  const auto& blocks = growth.lease->blocks;
  const auto& known = before.lease->blocks;
  judge_.require(fresh ? growth.stage == LeaseStage::kGrows && blocks.empty() : before.stage != LeaseStage::kWithdrawn,
                 "lease ", sequence, " grows before its begin or after its end");
  judge_.require(blocks.size() >= known.size() && std::equal(known.begin(), known.end(), blocks.begin()), "lease ",
                 sequence, " loses blocks that were announced");
  if (growth.stage == LeaseStage::kWhole) {
    judge_.require(growth.lease->num_tokens == growth.num_tokens, "lease ", sequence, " is not whole");
    check_lease(*growth.lease);
  }
  for (const Flight& flight : flights_)
    for (const PlanRow& row : flight.plan.rows)
      judge_.require(row.sequence != sequence || row.position.least >= std::ssize(blocks) * kBlockTokens, "lease ",
                     sequence, " announces blocks whose result is not in");
  for (size_t i = known.size(); i < blocks.size(); ++i) ++leased_[bit_of(blocks[i])];
  if (before.lease->checkpoint.empty())
    for (const Placement& place : growth.lease->checkpoint) ++leased_[bit_of(place)];
  for (const Placement& place : growth.lease->tail_state) ++leased_[bit_of(place)];
  entry->second = growth;
}

void Harness::end_lease(SequenceId lease) {
  const auto found = leases_.find(lease);
  judge_.require(found != leases_.end(), "lease ", lease, " ends twice");
  for (const Placement& place : pages_of(*found->second.lease)) --leased_[bit_of(place)];
  leases_.erase(found);
}

Harness::PageSet Harness::filling() const {
  PageSet pages;
  for (const auto& [sequence, import] : imports_)
    for (const Placement& place : pages_of(import)) pages.set(bit_of(place));
  return pages;
}

Harness::PageSet Harness::held_for_others() const {
  PageSet pages = filling();
  for (size_t bit = 0; bit < leased_.size(); ++bit)
    if (leased_[bit] > 0) pages.set(bit);
  return pages;
}

}  // namespace perigee::sim
