#include "control/prefix_cache.h"

#include <array>

namespace perigee {

PrefixCache::PrefixCache(const SchedulerConfig& config)
    : index_(config.dcp_size * config.num_pages, config.hash_seed, config.hash_bits),
      pools_(
          config.dcp_size, config.num_pages, [this](PlaceId page) { page_evicted(page); }, config.dealing()),
      checkpoints_(pools_),
      pages_of_checkpoint_(config.dcp_size * config.state_pages) {}

std::optional<PrefixNode> PrefixCache::publish_block(const PrefixNode& chain, const Sequence& sequence, int32_t block,
                                                     PlaceId page) {
  std::array<int32_t, kBlockTokens> scratch;
  const auto node = index_.publish(chain, sequence.block_tokens(block, scratch), sequence.request.cache_salt, page,
                                   sequence.extra_key(block));
  if (node && node->page == page) pools_.publish(page);
  return node;
}

void PrefixCache::publish_blocks(Sequence& sequence, int32_t num_tokens) {
  Running& run = sequence.running();
  while (!run.chain_broken && (run.num_chained + 1) * kBlockTokens <= num_tokens) {
    const PlaceId page = run.pages[static_cast<size_t>(run.num_chained)].place();
    const auto node = publish_block(run.chain, sequence, run.num_chained, page);
    if (!node) {
      run.chain_broken = true;
      return;
    }
    run.chain = *node;
    ++run.num_chained;
  }
}

// A block leaves the prefix index, and its checkpoint with it.
void PrefixCache::forget_block(PlaceId page) {
  index_.erase(page);
  checkpoints_.drop(page);
}

void PrefixCache::forget_and_free(PlaceId page) {
  if (!index_.contains(page)) return;
  forget_block(page);
  pools_.unpublish(page);
}

void PrefixCache::forget_blocks(const Sequence& sequence) {
  for (const PageHandle& handle : sequence.running().pages) forget_and_free(handle.place());
}

void PrefixCache::forget_all() {
  for (int32_t i = 0; i < pools_.num_pages(); ++i) forget_and_free(PlaceId(i));
}

void PrefixCache::page_evicted(PlaceId page) {
  const int32_t before = checkpoints_.size();
  if (pools_.owner(page) == PageOwner::kLatent) {
    forget_block(page);
  } else {
    checkpoints_.page_evicted(page);
  }
  num_evicted_checkpoints_ += before - checkpoints_.size();
}

void PrefixCache::check_pages(int32_t first, const std::vector<int32_t>& holders) const {
  for (size_t i = 0; i < holders.size(); ++i) {
    const PlaceId page(first + static_cast<int32_t>(i));
    CHECK(pools_.num_holders(page) == holders[i], "page ", page, " has ", pools_.num_holders(page), " holders, ",
          holders[i], " known");
    const PlaceId block = checkpoints_.block_of(page);
    const bool is_block = index_.contains(page);
    CHECK(pools_.is_published(page) == (is_block || block.valid()), "page ", page, " is published and unknown");
    CHECK(!is_block || pools_.owner(page) == PageOwner::kLatent, "page ", page, " is no block");
    CHECK(is_block || checkpoints_.at(page).serial == 0, "the checkpoint at page ", page, " has lost its block");
    CHECK(!block.valid() || pools_.owner(page) == PageOwner::kCheckpoint, "page ", page, " is of no checkpoint");
  }
}

void PrefixCache::check_totals() const {
  int32_t num_blocks = 0, num_checkpoint_pages = 0;
  for (int32_t i = 0; i < pools_.num_pages(); ++i) {
    num_blocks += index_.contains(PlaceId(i)) ? 1 : 0;
    num_checkpoint_pages += checkpoints_.block_of(PlaceId(i)).valid() ? 1 : 0;
  }
  CHECK(num_blocks == index_.size(), "the prefix index miscounts");
  CHECK(num_checkpoint_pages == checkpoints_.size() * pages_of_checkpoint_, "a checkpoint is not whole");
}

}  // namespace perigee
