#include "control/prefix_cache.h"

#include <array>

namespace perigee {

PrefixCache::PrefixCache(int32_t num_pages, uint64_t hash_seed, int32_t hash_bits)
    : index_(num_pages, hash_seed, hash_bits),
      pool_(num_pages, [this](PageId page) { page_evicted(page); }),
      checkpoints_(pool_) {}

std::vector<PageHandle> PrefixCache::take_pages(PageOwner owner, int32_t count) {
  std::vector<PageHandle> pages;
  pages.reserve(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    pages.push_back(pool_.allocate(owner));
    CHECK(pages.back(), "pages that were counted are not there");
  }
  return pages;
}

void PrefixCache::publish_blocks(Sequence& sequence, int32_t num_tokens) {
  Running& run = sequence.running();
  std::array<int32_t, kBlockTokens> scratch;
  while (!run.chain_broken && (run.num_chained + 1) * kBlockTokens <= num_tokens) {
    const int32_t block = run.num_chained;
    const PageId page = run.pages[static_cast<size_t>(block)].page();
    const auto node = index_.publish(run.chain, sequence.block_tokens(block, scratch), sequence.request.cache_salt,
                                     page, sequence.extra_key(block));
    if (!node) {
      run.chain_broken = true;
      return;
    }
    if (node->page == page) pool_.publish(page);
    run.chain = *node;
    ++run.num_chained;
  }
}

// A block leaves the prefix index, and its checkpoint with it.
void PrefixCache::forget_block(PageId page) {
  index_.erase(page);
  checkpoints_.drop(page);
}

void PrefixCache::forget_and_free(PageId page) {
  if (!index_.contains(page)) return;
  forget_block(page);
  pool_.unpublish(page);
}

void PrefixCache::forget_blocks(const Sequence& sequence) {
  for (const PageHandle& handle : sequence.running().pages) forget_and_free(handle.page());
}

void PrefixCache::forget_all() {
  for (int32_t i = 0; i < pool_.num_pages(); ++i) forget_and_free(PageId(i));
}

void PrefixCache::page_evicted(PageId page) {
  const int32_t before = checkpoints_.size();
  if (pool_.owner(page) == PageOwner::kLatent) {
    forget_block(page);
  } else {
    checkpoints_.page_evicted(page);
  }
  num_evicted_checkpoints_ += before - checkpoints_.size();
}

void PrefixCache::check_pages(int32_t first, const std::vector<int32_t>& holders) const {
  for (size_t i = 0; i < holders.size(); ++i) {
    const PageId page(first + static_cast<int32_t>(i));
    CHECK(pool_.num_holders(page) == holders[i], "page ", page, " has ", pool_.num_holders(page), " holders, ",
          holders[i], " known");
    const PageId block = checkpoints_.block_of(page);
    const bool is_block = index_.contains(page);
    CHECK(pool_.is_published(page) == (is_block || block.valid()), "page ", page, " is published and unknown");
    CHECK(!is_block || pool_.owner(page) == PageOwner::kLatent, "page ", page, " is no block");
    CHECK(is_block || checkpoints_.at(page).serial == 0, "the checkpoint at page ", page, " has lost its block");
    CHECK(!block.valid() || pool_.owner(page) == PageOwner::kCheckpoint, "page ", page, " is of no checkpoint");
  }
}

void PrefixCache::check_totals(int32_t pages_of_checkpoint) const {
  int32_t num_blocks = 0, num_checkpoint_pages = 0;
  for (int32_t i = 0; i < pool_.num_pages(); ++i) {
    num_blocks += index_.contains(PageId(i)) ? 1 : 0;
    num_checkpoint_pages += checkpoints_.block_of(PageId(i)).valid() ? 1 : 0;
  }
  CHECK(num_blocks == index_.size(), "the prefix index miscounts");
  CHECK(num_checkpoint_pages == checkpoints_.size() * pages_of_checkpoint, "a checkpoint is not whole");
}

}  // namespace perigee
