#include "exec/slots.h"

#include <algorithm>

#include "base/check.h"

namespace perigee {
namespace {

constexpr DraftIds kUnknownDrafts = {-1, -1, -1, -1, -1, -1, -1};
static_assert(kUnknownDrafts.size() == kMaxDrafts);

void count(Slot& slot, int32_t id, bool output) {
  if (slot.seen.empty()) return;
  slot.seen[static_cast<size_t>(id) / 8] |= static_cast<uint8_t>(1u << (id % 8));
  if (output && slot.output_counts[static_cast<size_t>(id)] < UINT16_MAX) ++slot.output_counts[static_cast<size_t>(id)];
}

}  // namespace

Slots::Slots(int32_t num_slots, int64_t vocab, int32_t max_blocks, const TensorParallel& ranks, DcpShare dcp)
    : vocab_(vocab), max_blocks_(max_blocks), ranks_(ranks), dcp_(dcp) {
  const auto most = static_cast<size_t>(max_blocks);
  slots_.resize(static_cast<size_t>(num_slots));
  for (Slot& slot : slots_) {
    slot.pages.reserve(most);
    slot.draft_blocks.reserve(dcp.keeps_all ? most : 0);
    slot.blocks_here.reserve(dcp.size > 1 ? most : 0);
    slot.block_owners.reserve(dcp.size > 1 ? most : 0);
  }
}

void Slots::start(const SequenceStart& start) {
  Slot& slot = (*this)[start.slot];
  slot.sequence = start.sequence;
  slot.tokens = start.tokens;
  slot.sampling = start.sampling;
  slot.num_tokens = static_cast<int32_t>(start.tokens->size());
  slot.num_logprobs = start.sampling->logprobs;
  slot.num_prompt_tokens = start.num_prompt_tokens;
  slot.num_cached_tokens = start.num_cached_tokens;
  slot.length = start.num_cached_tokens;
  slot.num_outputs = slot.num_tokens - start.num_prompt_tokens;
  slot.newest_id = start.tokens->back();  // a decode row may run it
  slot.drafts.clear();
  if (on_device()) slot.drafts.append(kUnknownDrafts.begin(), kUnknownDrafts.end());
  slot.num_blocks = 0;
  slot.pages.clear();
  slot.draft_blocks.clear();
  slot.blocks_here.clear();
  slot.block_owners.clear();
  slot.state_pages.clear();
  for (const Placement& place : start.state_pages)
    if (place.dcp_index == dcp_.index) slot.state_pages.push_back(place.page.value);
  slot.committed = start.num_cached_tokens;
  slot.seen.clear();
  slot.output_counts.clear();
  if (vocab_ == 0 || !start.sampling->has_penalties()) return;
  if (rank_of_slot(start.slot, ranks_.size) != ranks_.rank) return;
  slot.seen.assign(static_cast<size_t>((vocab_ + 7) / 8), 0);
  slot.output_counts.assign(static_cast<size_t>(vocab_), 0);
  for (size_t i = 0; i < start.tokens->size(); ++i)
    count(slot, (*start.tokens)[i], i >= static_cast<size_t>(start.num_prompt_tokens));
}

void Slots::append(const BlockAppend& append) {
  Slot& slot = (*this)[append.slot];
  CHECK(append.block_index == slot.num_blocks && append.block_index < max_blocks_, "block ", append.block_index,
        " after ", slot.num_blocks, " blocks of slot ", append.slot, ", which has room for ", max_blocks_);
  const int32_t owner = append.place.dcp_index;
  CHECK(owner >= 0 && owner < dcp_.size, "a page at dcp index ", owner, " of ", dcp_.size);
  ++slot.num_blocks;
  if (dcp_.size > 1) slot.block_owners.push_back(static_cast<uint8_t>(owner));
  if (dcp_.keeps_all) slot.draft_blocks.push_back(dcp_.draft_block(append.place));
  if (owner != dcp_.index) return;
  if (dcp_.size > 1) slot.blocks_here.push_back(append.block_index);
  slot.pages.push_back(append.place.page.value);
}

int32_t Slots::place_here(SlotId id, int32_t block) const {
  if (dcp_.size == 1) return block;
  const std::vector<int32_t>& here = (*this)[id].blocks_here;
  const auto at = std::lower_bound(here.begin(), here.end(), block);
  CHECK(at != here.end() && *at == block, "block ", block, " of slot ", id, " is not here");
  return static_cast<int32_t>(at - here.begin());
}

void Slots::advance(SlotId id, int32_t num_tokens, bool commit_all) {
  Slot& slot = (*this)[id];
  slot.committed = slot.length + (commit_all ? num_tokens : 0);
  slot.length += num_tokens;
}

void Slots::reject(SlotId id, int32_t num_tokens) {
  Slot& slot = (*this)[id];
  CHECK(num_tokens >= 0 && slot.length - num_tokens > slot.committed, "slot ", id, " of length ", slot.length,
        ", committed ", slot.committed, ", rejects ", num_tokens, " tokens");
  slot.length -= num_tokens;
}

void Slots::lower(SlotId id, int32_t num_tokens) {
  Slot& slot = (*this)[id];
  CHECK(on_device() && num_tokens >= 0 && num_tokens < slot.length, "slot ", id, " of length ", slot.length, " less ",
        num_tokens);
  slot.length -= num_tokens;
}

void Slots::accept(SlotId id, int32_t token) {
  Slot& slot = (*this)[id];
  slot.newest_id = token;
  ++slot.num_outputs;
  count(slot, token, true);
}

}  // namespace perigee
