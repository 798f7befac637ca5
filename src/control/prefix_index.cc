#include "control/prefix_index.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "control/faults.h"

namespace perigee {

PrefixIndex::PrefixIndex(int32_t num_pages, uint64_t seed, int32_t hash_bits)
    : entries_(static_cast<size_t>(num_pages)),
      tokens_(static_cast<size_t>(num_pages) * kBlockTokens),
      buckets_(std::bit_ceil(static_cast<size_t>(num_pages) * 2), kNil),
      seed_(seed),
      hash_bits_(hash_bits) {
  CHECK(hash_bits >= 1 && hash_bits <= 128, "a hash of ", hash_bits, " bits");
}

BlockHash PrefixIndex::truncate(BlockHash hash) const {
  if (hash_bits_ == 128) return hash;
  if (hash_bits_ > 64) return {hash.low, hash.high & ((1ull << (hash_bits_ - 64)) - 1)};
  return {hash_bits_ == 64 ? hash.low : hash.low & ((1ull << hash_bits_) - 1), 0};
}

PrefixNode PrefixIndex::root(std::string_view salt) const {
  if (planted(Fault::kSaltIgnored)) salt = {};
  const XXH128_hash_t hash = XXH3_128bits_withSeed(salt.data(), salt.size(), seed_);
  return PrefixNode{truncate({hash.low64, hash.high64}), PlaceId(), 0};
}

BlockHash PrefixIndex::hash_block(const BlockHash& parent, BlockTokens tokens, const ExtraKey& extra) const {
  ++num_hashed_;
  std::array<uint8_t, sizeof(BlockHash) + sizeof(ExtraKey) + sizeof(int32_t) * kBlockTokens> bytes;
  std::memcpy(bytes.data(), &parent, sizeof(parent));
  std::memcpy(bytes.data() + sizeof(parent), &extra, sizeof(extra));
  std::memcpy(bytes.data() + sizeof(parent) + sizeof(extra), tokens.data(), tokens.size_bytes());
  const XXH128_hash_t hash = XXH3_128bits_withSeed(bytes.data(), bytes.size(), seed_);
  return truncate({hash.low64, hash.high64});
}

bool PrefixIndex::is_block(PlaceId page, const PrefixNode& parent, BlockTokens tokens, std::string_view salt,
                           const ExtraKey& extra) const {
  const Entry& candidate = entry(page);
  if (planted(Fault::kHashDecides)) return true;
  if (candidate.parent_page != parent.page || candidate.parent_serial != parent.serial) return false;
  if (candidate.extra != extra) return false;
  if (parent.is_root() && candidate.salt != salt && !planted(Fault::kSaltIgnored)) return false;
  return std::equal(tokens.begin(), tokens.end(), tokens_.begin() + page.value * int64_t{kBlockTokens});
}

std::optional<PrefixNode> PrefixIndex::find_hashed(const BlockHash& hash, const PrefixNode& parent, BlockTokens tokens,
                                                   std::string_view salt, const ExtraKey& extra) const {
  for (int32_t i = buckets_[hash.low & (buckets_.size() - 1)]; i != kNil; i = entry(PlaceId(i)).next) {
    const PlaceId page(i);
    if (entry(page).hash == hash && is_block(page, parent, tokens, salt, extra))
      return PrefixNode{hash, page, entry(page).serial};
  }
  return std::nullopt;
}

std::optional<PrefixNode> PrefixIndex::find(const PrefixNode& parent, BlockTokens tokens, std::string_view salt,
                                            const ExtraKey& extra) const {
  return find_hashed(hash_block(parent.hash, tokens, extra), parent, tokens, salt, extra);
}

std::optional<PrefixNode> PrefixIndex::publish(const PrefixNode& parent, BlockTokens tokens, std::string_view salt,
                                               PlaceId page, const ExtraKey& extra) {
  if (!parent.is_root() && entry(parent.page).serial != parent.serial) return std::nullopt;
  const BlockHash hash = hash_block(parent.hash, tokens, extra);
  if (auto known = find_hashed(hash, parent, tokens, salt, extra)) return known;

  Entry& added = entries_[static_cast<size_t>(page.value)];
  CHECK(added.serial == 0, "page ", page, " is published twice");
  added.hash = hash;
  added.serial = next_serial_++;
  added.parent_serial = parent.serial;
  added.parent_page = parent.page;
  added.extra = extra;
  added.next = bucket(hash);
  if (parent.is_root()) added.salt = salt;
  std::copy(tokens.begin(), tokens.end(), tokens_.begin() + page.value * int64_t{kBlockTokens});
  bucket(hash) = page.value;
  ++size_;
  return PrefixNode{hash, page, added.serial};
}

void PrefixIndex::erase(PlaceId page) {
  Entry& gone = entries_[static_cast<size_t>(page.value)];
  CHECK(gone.serial != 0, "page ", page, " is not published");
  int32_t* link = &bucket(gone.hash);
  while (*link != page.value) {
    CHECK(*link != kNil, "page ", page, " is missing from its bucket");
    link = &entries_[static_cast<size_t>(*link)].next;
  }
  *link = gone.next;
  gone.serial = 0;
  gone.next = kNil;
  gone.salt.clear();
  --size_;
}

}  // namespace perigee
