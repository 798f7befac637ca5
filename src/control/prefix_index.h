// PrefixIndex: which published page holds the block with these tokens after that prefix.
//
// Blocks form chains: a block is found by its parent's identity, its own 64 token ids and its extra key, the first
// block by the salt too. A chained XXH3-128 hash, seeded per process, nominates candidates; token ids, extra key,
// parent and salt decide (DESIGN D8), so that a collision costs time and never shows one user another's cache. It knows
// no pool: the caller publishes a page after its tokens are confirmed and erases it when the pool evicts it. Memory is
// arrays indexed by page id.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "control/place.h"

namespace perigee {

struct BlockHash {
  uint64_t low = 0, high = 0;
  bool operator==(const BlockHash&) const = default;
};

using BlockTokens = std::span<const int32_t, kBlockTokens>;

// What a block's cache entries depend on beside its tokens and the blocks before it: a digest of the images whose
// placeholders are among the tokens, of an adapter. Zero: nothing. Two of equal value count as the same.
struct ExtraKey {
  uint64_t low = 0, high = 0;
  bool operator==(const ExtraKey&) const = default;
};

// A position in a chain: a published block, or the root of a salt (page not valid). The serial number tells a block
// from a later one in the same page.
struct PrefixNode {
  BlockHash hash;
  PlaceId page;
  int64_t serial = 0;
  bool is_root() const { return !page.valid(); }
};

class PrefixIndex {
 public:
  // hash_bits < 128 truncates the hash: for tests, where every answer must stay right.
  PrefixIndex(int32_t num_pages, uint64_t seed, int32_t hash_bits);

  PrefixNode root(std::string_view salt) const;

  // The block with these tokens after `parent`; `salt` matters where the parent is a root.
  std::optional<PrefixNode> find(const PrefixNode& parent, BlockTokens tokens, std::string_view salt,
                                 const ExtraKey& extra = {}) const;

  // Enters `page` as the block with these tokens after `parent`. When another page holds that block already, returns
  // that one and leaves `page` out. Nothing when the parent itself is gone: its children could not be reached.
  std::optional<PrefixNode> publish(const PrefixNode& parent, BlockTokens tokens, std::string_view salt, PlaceId page,
                                    const ExtraKey& extra = {});

  void erase(PlaceId page);  // requires a published page
  bool contains(PlaceId page) const { return entry(page).serial != 0; }
  bool contains(const PrefixNode& block) const { return block.serial != 0 && entry(block.page).serial == block.serial; }
  int32_t size() const { return size_; }

  // Blocks ever entered and erased: while both stand, every find() gives what it gave before.
  int64_t num_published() const { return next_serial_ - 1; }
  int64_t num_erased() const { return num_published() - size_; }
  int64_t num_hashed() const { return num_hashed_; }  // blocks hashed so far, for tests and metrics

 private:
  static constexpr int32_t kNil = -1;

  struct Entry {
    BlockHash hash;
    int64_t serial = 0;  // 0: not published
    int64_t parent_serial = 0;
    PlaceId parent_page;
    ExtraKey extra;
    int32_t next = kNil;  // in the bucket
    std::string salt;     // of first blocks
  };

  const Entry& entry(PlaceId page) const { return entries_[static_cast<size_t>(page.value)]; }
  BlockHash truncate(BlockHash hash) const;
  BlockHash hash_block(const BlockHash& parent, BlockTokens tokens, const ExtraKey& extra) const;
  bool is_block(PlaceId page, const PrefixNode& parent, BlockTokens tokens, std::string_view salt,
                const ExtraKey& extra) const;
  std::optional<PrefixNode> find_hashed(const BlockHash& hash, const PrefixNode& parent, BlockTokens tokens,
                                        std::string_view salt, const ExtraKey& extra) const;
  int32_t& bucket(const BlockHash& hash) { return buckets_[hash.low & (buckets_.size() - 1)]; }

  std::vector<Entry> entries_;   // by page
  std::vector<int32_t> tokens_;  // [num_pages, kBlockTokens]
  std::vector<int32_t> buckets_;
  uint64_t seed_ = 0;
  int32_t hash_bits_ = 128;
  int64_t next_serial_ = 1;
  int32_t size_ = 0;
  mutable int64_t num_hashed_ = 0;
};

}  // namespace perigee
