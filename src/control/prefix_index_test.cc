#include "control/prefix_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>

#include "base/rng.h"

namespace perigee {
namespace {

using Block = std::array<int32_t, kBlockTokens>;

Block block_of(int32_t value) {
  Block block;
  block.fill(value);
  return block;
}

TEST(PrefixIndex, FindsAChain) {
  PrefixIndex index(8, 1, 128);
  const PrefixNode root = index.root("");
  EXPECT_FALSE(index.find(root, block_of(1), ""));
  const auto first = index.publish(root, block_of(1), "", PlaceId(3));
  ASSERT_TRUE(first);
  const auto second = index.publish(*first, block_of(2), "", PlaceId(5));
  ASSERT_TRUE(second);
  EXPECT_EQ(index.find(root, block_of(1), "")->page, PlaceId(3));
  EXPECT_EQ(index.find(*first, block_of(2), "")->page, PlaceId(5));
  EXPECT_FALSE(index.find(root, block_of(2), "")) << "the same tokens elsewhere are another block";
  EXPECT_EQ(index.size(), 2);
}

TEST(PrefixIndex, TheFirstPageOfABlockStays) {
  PrefixIndex index(8, 1, 128);
  index.publish(index.root(""), block_of(1), "", PlaceId(0));
  const auto again = index.publish(index.root(""), block_of(1), "", PlaceId(1));
  ASSERT_TRUE(again);
  EXPECT_EQ(again->page, PlaceId(0));
  EXPECT_FALSE(index.contains(PlaceId(1)));
}

TEST(PrefixIndex, ErasedParentsTakeNoChildren) {
  PrefixIndex index(8, 1, 128);
  const auto parent = index.publish(index.root(""), block_of(1), "", PlaceId(0));
  const auto child = index.publish(*parent, block_of(2), "", PlaceId(1));
  index.erase(PlaceId(0));
  EXPECT_FALSE(index.publish(*parent, block_of(3), "", PlaceId(2)));
  const auto reborn = index.publish(index.root(""), block_of(1), "", PlaceId(0));
  EXPECT_FALSE(index.find(*reborn, block_of(2), "")) << "a child of the former block in the same page";
  EXPECT_TRUE(index.contains(child->page));
}

TEST(PrefixIndex, AnotherBlockInTheParentsPageTakesNoChildrenEither) {
  PrefixIndex index(8, 1, 128);
  const auto parent = index.publish(index.root(""), block_of(1), "", PlaceId(0));
  index.erase(PlaceId(0));
  const auto other = index.publish(index.root(""), block_of(9), "", PlaceId(0));
  EXPECT_FALSE(index.publish(*parent, block_of(2), "", PlaceId(1)));
  EXPECT_FALSE(index.contains(PlaceId(1)));
  EXPECT_TRUE(index.publish(*other, block_of(2), "", PlaceId(1)));
}

TEST(PrefixIndex, SaltsSeparate) {
  for (const int bits : {128, 4, 1}) {
    PrefixIndex index(8, 7, bits);
    index.publish(index.root("a"), block_of(1), "a", PlaceId(0));
    EXPECT_TRUE(index.find(index.root("a"), block_of(1), "a"));
    EXPECT_FALSE(index.find(index.root("b"), block_of(1), "b")) << bits;
    EXPECT_FALSE(index.find(index.root(""), block_of(1), "")) << bits;
  }
}

// Two images have the same placeholders.
TEST(PrefixIndex, ExtraKeysSeparate) {
  for (const int bits : {128, 4, 1}) {
    PrefixIndex index(8, 7, bits);
    const PrefixNode root = index.root("");
    const auto first = index.publish(root, block_of(1), "", PlaceId(0), {1, 2});
    EXPECT_TRUE(index.find(root, block_of(1), "", {1, 2}));
    for (uint64_t i = 3; i < 20; ++i) {  // some of whose hashes collide
      EXPECT_FALSE(index.find(root, block_of(1), "", {1, i})) << bits;
      EXPECT_FALSE(index.find(root, block_of(1), "", {i, 2})) << bits;
    }
    EXPECT_FALSE(index.find(root, block_of(1), "")) << bits;
    const auto other = index.publish(root, block_of(1), "", PlaceId(1), {1, 3});
    EXPECT_EQ(other->page, PlaceId(1)) << "another block, not the first one again";
    index.publish(*first, block_of(2), "", PlaceId(2));
    EXPECT_FALSE(index.find(*other, block_of(2), "")) << "what follows has the key of its parents";
  }
}

TEST(PrefixIndex, ExtraKeysChangeTheHash) {
  PrefixIndex index(8, 1, 128);
  const auto plain = index.publish(index.root(""), block_of(1), "", PlaceId(0));
  const auto keyed = index.publish(index.root(""), block_of(1), "", PlaceId(1), {0, 1});
  EXPECT_NE(plain->hash, keyed->hash);
}

TEST(PrefixIndex, SeedsChangeTheHash) {
  PrefixIndex a(1, 1, 128);
  PrefixIndex b(1, 2, 128);
  EXPECT_NE(a.root("").hash, b.root("").hash);
  EXPECT_NE(a.publish(a.root(""), block_of(1), "", PlaceId(0))->hash,
            b.publish(b.root(""), block_of(1), "", PlaceId(0))->hash);
}

// Chains named by their whole token history: the index must agree however short its hash.
using Path = std::vector<int32_t>;  // salt, then the value of each block

class Model {
 public:
  explicit Model(int32_t hash_bits) : index_(kPages, 5, hash_bits), rng_(static_cast<uint64_t>(hash_bits)) {}

  // Walks a random path to its first unknown block, then publishes that in a random page, erased first if need be.
  void step() {
    Path path = {static_cast<int32_t>(rng_.below(3))};
    const std::string salt(static_cast<size_t>(path[0]), 's');
    PrefixNode node = index_.root(salt);
    while (true) {
      path.push_back(static_cast<int32_t>(rng_.below(3)));
      const auto found = index_.find(node, block_of(path.back()), salt);
      const auto known = reachable_.find(path);
      ASSERT_EQ(found.has_value(), known != reachable_.end());
      if (!found) break;
      ASSERT_EQ(found->page, known->second);
      node = *found;
    }
    const PlaceId page(static_cast<int32_t>(rng_.below(kPages)));
    if (index_.contains(page)) erase(page);
    const bool parent_reachable = node.is_root() || reachable_.contains(Path(path.begin(), path.end() - 1));
    const auto added = index_.publish(node, block_of(path.back()), salt, page);
    if (!parent_reachable) return;
    ASSERT_TRUE(added && added->page == page);
    reachable_[path] = page;
  }

  int32_t size() const { return index_.size(); }

 private:
  static constexpr int32_t kPages = 64;

  // Whatever lies below an erased block can be reached no more.
  void erase(PlaceId page) {
    index_.erase(page);
    const auto gone =
        std::find_if(reachable_.begin(), reachable_.end(), [&](const auto& entry) { return entry.second == page; });
    if (gone == reachable_.end()) return;
    const Path path = gone->first;
    std::erase_if(reachable_, [&](const auto& entry) {
      return entry.first.size() >= path.size() && std::equal(path.begin(), path.end(), entry.first.begin());
    });
  }

  PrefixIndex index_;
  Rng rng_;
  std::map<Path, PlaceId> reachable_;
};

class Agreement : public testing::TestWithParam<int> {};

TEST_P(Agreement, WithAMapOfWholePrefixes) {
  Model model(GetParam());
  for (int i = 0; i < 20000; ++i) ASSERT_NO_FATAL_FAILURE(model.step()) << i;
  EXPECT_GT(model.size(), 10);
}

INSTANTIATE_TEST_SUITE_P(HashBits, Agreement, testing::Values(1, 4, 16, 64, 65, 128));

}  // namespace
}  // namespace perigee
