#include "control/handover_book.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace perigee {

// Of the sequence's own pages, as far as it has them: what the prefix index has of these tokens may lie elsewhere, or
// be forgotten. A checkpoint is in the index alone.
std::shared_ptr<const Lease> HandoverBook::lease(const Sequence& sequence) {
  const int32_t most = rules_.handover_blocks(sequence.num_prompt());
  PrefixMatch match(cache_.index());
  match.update(sequence, most);
  const auto matched = static_cast<int32_t>(match.blocks().size());
  const int32_t own = sequence.is_running() ? std::min(sequence.running().num_confirmed / kBlockTokens, most) : 0;
  int32_t num_blocks = std::max(matched, own) / rules_.hit_blocks * rules_.hit_blocks;
  const bool has_tail = num_blocks == most && leaves_tail(sequence);  // with a state of its own
  if (rules_.is_recurrent() && !has_tail) {
    num_blocks = std::min(num_blocks, matched / rules_.hit_blocks * rules_.hit_blocks);
    const auto has_checkpoint = [&](int32_t block) {
      return cache_.checkpoints().at(match.blocks()[static_cast<size_t>(block)].page).serial != 0;
    };
    while (num_blocks > 0 && !has_checkpoint(num_blocks - 1)) num_blocks -= rules_.hit_blocks;
  }
  if (num_blocks == 0) return nullptr;

  auto lease = std::make_shared<Lease>();
  lease->sequence = sequence.id();
  lease->num_tokens = num_blocks * kBlockTokens;
  Lent lent;
  for (int32_t block = 0; block < num_blocks; ++block) {
    const auto at = static_cast<size_t>(block);
    const PlaceId page = block < own ? sequence.running().pages[at].place() : match.blocks()[at].page;
    lent.handles.push_back(cache_.pools().share(page));
    lease->blocks.push_back(lent.handles.back().placement());
  }
  add_checkpoint(sequence, lent, *lease);
  if (has_tail) add_tail(sequence, lent, *lease);
  const bool fresh = leases_.emplace(sequence.id(), std::move(lent)).second;
  CHECK(fresh, "sequence ", sequence.id(), " is leased twice");
  return lease;
}

void HandoverBook::report(Lent& lent, LeaseStage stage) {
  lent.growth.stage = stage;
  growth_.push_back(lent.growth);
}

void HandoverBook::begin_growth(const Sequence& sequence) {
  const int32_t num_blocks = rules_.handover_blocks(sequence.num_prompt());
  if (num_blocks == 0) return;
  const int32_t num_tokens = gives_tail(sequence) ? sequence.num_prompt() - 1 : num_blocks * kBlockTokens;
  auto lease = std::make_shared<Lease>();
  lease->sequence = sequence.id();
  const auto [entry, fresh] = leases_.emplace(
      sequence.id(),
      Lent{.growth = {.stage = LeaseStage::kGrows, .num_tokens = num_tokens, .lease = std::move(lease)}});
  CHECK(fresh, "sequence ", sequence.id(), " is leased twice");
  report(entry->second, LeaseStage::kGrows);
  grow(sequence);
}

// The sequence's own pages, as in lease().
void HandoverBook::grow(const Sequence& sequence) {
  const auto found = leases_.find(sequence.id());
  if (found == leases_.end() || found->second.growth.stage != LeaseStage::kGrows) return;
  Lent& lent = found->second;
  const Running& run = sequence.running();
  const auto num_ready = static_cast<size_t>(std::min(run.num_confirmed / kBlockTokens, lent.growth.full_blocks()));
  if (num_ready == lent.growth.lease->blocks.size()) return;
  auto lease = std::make_shared<Lease>(*lent.growth.lease);  // others may read what it was
  for (size_t block = lease->blocks.size(); block < num_ready; ++block) {
    lent.handles.push_back(cache_.pools().share(run.pages[block].place()));
    lease->blocks.push_back(lent.handles.back().placement());
  }
  lease->num_tokens = static_cast<int32_t>(num_ready) * kBlockTokens;
  const bool all = static_cast<int32_t>(num_ready) == lent.growth.full_blocks();
  const bool has_state = all && add_checkpoint(sequence, lent, *lease);
  lent.growth.lease = std::move(lease);
  const bool tail_comes = lent.growth.has_tail();  // with a state of its own
  const bool whole = has_state && !tail_comes, in_vain = all && !has_state && !tail_comes;
  report(lent, whole ? LeaseStage::kWhole : in_vain ? LeaseStage::kWithdrawn : LeaseStage::kGrows);
}

void HandoverBook::add_tail(const Sequence& sequence) {
  const auto found = leases_.find(sequence.id());
  if (found == leases_.end() || found->second.growth.stage != LeaseStage::kGrows) return;
  Lent& lent = found->second;
  if (std::ssize(lent.growth.lease->blocks) != lent.growth.full_blocks() || !leaves_tail(sequence)) return;
  auto lease = std::make_shared<Lease>(*lent.growth.lease);
  add_tail(sequence, lent, *lease);
  lent.growth.lease = std::move(lease);
  report(lent, LeaseStage::kWhole);
}

// The row of the last token was the sequence's last one, and has left the state before that token: nothing writes its
// pages any more. False: another row was, or is under way.
bool HandoverBook::leaves_tail(const Sequence& sequence) const {
  if (!gives_tail(sequence) || !sequence.is_running()) return false;
  const Running& run = sequence.running();
  return run.plans == 0 && run.committed == PositionRange::at(sequence.num_prompt() - 1);
}

// Of a sequence that leaves one; the lease has all full blocks.
void HandoverBook::add_tail(const Sequence& sequence, Lent& lent, Lease& lease) {
  const Running& run = sequence.running();
  lease.num_tokens = sequence.num_prompt() - 1;
  lent.handles.push_back(cache_.pools().share(run.pages[lease.blocks.size()].place()));
  lease.blocks.push_back(lent.handles.back().placement());
  for (const PageHandle& handle : run.state_pages) {
    lent.handles.push_back(cache_.pools().share(handle.place()));
    lease.tail_state.push_back(handle.placement());
  }
}

// Of the state after its last block. False: there is none; checkpoints are not written where pages are short.
bool HandoverBook::add_checkpoint(const Sequence& sequence, Lent& lent, Lease& lease) {
  if (!rules_.is_recurrent()) return true;
  PrefixMatch match(cache_.index());
  match.update(sequence, static_cast<int32_t>(lease.blocks.size()));
  if (match.blocks().size() < lease.blocks.size()) return false;
  const CheckpointRef checkpoint = cache_.checkpoints().at(match.blocks().back().page);
  if (checkpoint.serial == 0) return false;
  std::vector<PageHandle> handles;
  cache_.checkpoints().share(checkpoint, handles);
  for (const PageHandle& handle : handles) lease.checkpoint.push_back(handle.placement());
  std::move(lent.handles.begin(), lent.handles.end(), std::back_inserter(handles));
  lent.handles = std::move(handles);
  return true;
}

void HandoverBook::withdraw(SequenceId lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.growth.stage != LeaseStage::kGrows) return;
  report(found->second, LeaseStage::kWithdrawn);
}

void HandoverBook::finish_growth(SequenceId lease, bool failed) {
  if (!failed) return withdraw(lease);
  const auto found = leases_.find(lease);
  if (found == leases_.end() || found->second.growth.stage == LeaseStage::kWithdrawn) return;
  report(found->second, LeaseStage::kFailed);
}

void HandoverBook::release(SequenceId lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return;
  release_back_to_front(found->second.handles);
  leases_.erase(found);
}

Import HandoverBook::begin(const Sequence& sequence, std::vector<PageHandle> cached, const PrefixNode& chain,
                           const Admission::ImportRoom& room) {
  Import import{.sequence = sequence.id(),
                .first_block = static_cast<int32_t>(cached.size()),
                .num_tokens = room.has_tail ? sequence.num_prompt() - 1 : room.num_blocks * kBlockTokens};
  Pages pages{.blocks = std::move(cached), .num_cached = import.first_block, .has_tail = room.has_tail, .chain = chain};
  // States before blocks, which have a choice of indices.
  const auto take_state = [&](PageOwner owner, std::vector<PageHandle>& handles, std::vector<Placement>& places) {
    handles = cache_.pools().allocate_everywhere(owner, rules_.config.state_pages);
    for (const PageHandle& handle : handles) places.push_back(handle.placement());
  };
  if (rules_.is_recurrent()) take_state(PageOwner::kCheckpoint, pages.checkpoint, import.checkpoint);
  if (rules_.is_recurrent() && room.has_tail) take_state(PageOwner::kState, pages.tail_state, import.tail_state);
  CountAtIndex num_blocks_at = {};
  for (const PageHandle& handle : pages.blocks) ++num_blocks_at[static_cast<size_t>(handle.placement().dcp_index)];
  while (static_cast<int32_t>(pages.blocks.size()) < room.num_blocks + (room.has_tail ? 1 : 0)) {
    PageHandle page = cache_.pools().allocate_block(num_blocks_at);
    CHECK(page, "sequence ", sequence.id(), " imports without pages");
    ++num_blocks_at[static_cast<size_t>(page.placement().dcp_index)];
    import.blocks.push_back(page.placement());
    pages.blocks.push_back(std::move(page));
  }
  imports_.emplace(sequence.id(), std::move(pages));
  return import;
}

void HandoverBook::abandon(SequenceId sequence) {
  const auto found = imports_.find(sequence);
  CHECK(found != imports_.end(), "sequence ", sequence, " imports nothing");
  found->second.abandoned = true;
}

std::optional<int32_t> HandoverBook::end(SequenceId id, Sequence* sequence, ImportEnd end) {
  const auto found = imports_.find(id);
  if (found == imports_.end()) return std::nullopt;
  Pages pages = std::move(found->second);
  imports_.erase(found);
  CHECK(pages.abandoned == (sequence == nullptr), "sequence ", id, " has lost its import");
  auto num_blocks = static_cast<int32_t>(pages.blocks.size()) - pages.num_cached;
  if (pages.has_tail) {
    Tail tail{std::move(pages.blocks.back()), std::move(pages.tail_state)};
    pages.blocks.pop_back();
    if (sequence != nullptr && has_arrived(end) && end != ImportEnd::kWithoutTail) tails_.emplace(id, std::move(tail));
    if (end == ImportEnd::kWithoutTail) --num_blocks;
  }
  if (end == ImportEnd::kWithoutCheckpoint) pages.checkpoint.clear();
  if (sequence != nullptr && has_arrived(end)) publish(*sequence, pages);
  release_back_to_front(pages.blocks);  // so that the checkpoint survives them
  release_back_to_front(pages.checkpoint);
  return num_blocks;
}

HandoverBook::Tail HandoverBook::take_tail(SequenceId sequence) {
  auto entry = tails_.extract(sequence);
  CHECK(!entry.empty(), "sequence ", sequence, " has no tail");
  return std::move(entry.mapped());
}

bool HandoverBook::drop_tails() {
  const bool any = !tails_.empty();
  tails_.clear();
  return any;
}

// A block that another page holds by now keeps that page there, and so does a checkpoint.
void HandoverBook::publish(const Sequence& sequence, Pages& pages) {
  PrefixNode chain = pages.chain;
  for (auto block = static_cast<size_t>(pages.num_cached); block < pages.blocks.size(); ++block) {
    const auto node = cache_.publish_block(chain, sequence, static_cast<int32_t>(block), pages.blocks[block].place());
    if (!node) return;  // a block before it was forgotten: a request that read it was not finite
    chain = *node;
  }
  if (pages.checkpoint.empty() || chain.is_root() || !cache_.index().contains(chain)) return;
  Checkpoints& checkpoints = cache_.checkpoints();
  if (checkpoints.at(chain.page).serial != 0) return;
  checkpoints.share(checkpoints.attach(chain.page, std::exchange(pages.checkpoint, {})), pages.checkpoint);
}

}  // namespace perigee
