// Drafting on the GPU: prompt lookup against the host's, and the passes of a draft model over rows of every kind.
#include "exec/cuda/draft_kernels.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "exec/cuda/device_arrays.h"
#include "exec/ngram_drafter.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr int32_t kSlots = 6, kPlaces = 4, kMaxBlocks = 8, kHistory = 3000;

using Numbers = std::vector<int32_t>;

template <typename T>
void put(T* device, const std::vector<T>& values) {
  device_copy(device, values.data(), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> fetch(const T* device, size_t count) {
  std::vector<T> out(count);
  device_copy(out.data(), device, count * sizeof(T));
  return out;
}

class DraftKernels : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    if (const Status gpu = select_device(0); !gpu.ok()) GTEST_SKIP() << gpu.error().message;
    arrays_ = std::make_unique<DeviceArrays>(ArraySizes{.slots = kSlots,
                                                        .tokens = 64,
                                                        .max_blocks = kMaxBlocks,
                                                        .vocab = 100,
                                                        .places = kPlaces,
                                                        .history = kHistory,
                                                        .shared = GetParam() > 1,
                                                        .draft_tables = GetParam() > 2});
  }
  // Sequence s is sampled for that slot; -1: not.
  void sample(const Numbers& slots) {
    std::vector<SampleRecord> samples;
    for (const int32_t slot : slots)
      for (int32_t place = 0; place < kPlaces; ++place)
        samples.push_back({.slot = slot, .logit_row = 0, .mask_row = -1, .rank = 0});
    put(arrays_->batch().samples, samples);
  }
  Numbers drafts(int32_t slot) const { return fetch(arrays_->slots().drafts + slot * kMaxDrafts, kPlaces - 1); }
  static void expect_ok(cudaError_t error) {
    ASSERT_EQ(error, cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  std::unique_ptr<DeviceArrays> arrays_;
};

class DraftLookup : public DraftKernels {};

TEST_P(DraftLookup, FindsWhatTheHostFinds) {
  const SlotArrays& slots = arrays_->slots();
  sample({3, -1, 0, 5, 1, 2});
  int found = 0, none = 0;
  for (uint64_t turn = 0; turn < 40; ++turn) {
    std::vector<Numbers> texts(kSlots);
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      auto draw = [&, n = uint64_t{0}](uint64_t end) mutable {
        return static_cast<int32_t>(random_u64(100 * turn + slot, n++) % end);
      };
      texts[slot].resize(static_cast<size_t>(turn < 3 ? static_cast<int32_t>(turn) : 1 + draw(kHistory)));
      const uint64_t alphabet = 2 + static_cast<uint64_t>(draw(turn % 2 == 0 ? 4 : 300));
      for (int32_t& id : texts[slot]) id = draw(alphabet);
      put(slots.history + slot * kHistory, texts[slot]);
      put(slots.num_known + slot, Numbers{static_cast<int32_t>(texts[slot].size())});
      put(slots.drafts + slot * kMaxDrafts, Numbers(kMaxDrafts, 77));
    }
    const NgramMatch match = turn % 3 == 0 ? NgramMatch{1, 3} : turn % 3 == 1 ? NgramMatch{2, 64} : NgramMatch{5, 5};
    expect_ok(look_up_drafts(slots, arrays_->batch(), kSlots, match, nullptr));
    for (const int32_t slot : {3, 0, 5, 1, 2}) {
      const DraftIds want = draft_from(texts[static_cast<size_t>(slot)], match, kPlaces - 1);
      Numbers ids(want.begin(), want.end());
      ids.resize(kPlaces - 1, -1);
      EXPECT_EQ(drafts(slot), ids) << "turn " << turn << ", slot " << slot;
      ++(want.empty() ? none : found);
    }
    EXPECT_EQ(drafts(4), Numbers(kPlaces - 1, 77)) << "a slot that was not sampled";
  }
  EXPECT_GT(found, 20);
  EXPECT_GT(none, 10);
}

INSTANTIATE_TEST_SUITE_P(All, DraftLookup, testing::Values(1));

// A chunk that samples, one that does not, a verify row of which two tokens count, one whose blocks end, padding.
class DraftPassesOf : public DraftKernels {
 protected:
  void SetUp() override {
    DraftKernels::SetUp();
    if (IsSkipped()) return;
    const BatchArrays& batch = arrays_->batch();
    sample({2, -1, 4, 1, -1});
    put(batch.tokens, Numbers{10, 11, 12, 20, 21, 22, 30, 31, 32, 33, 40, 41, 42, 43, -1});
    put(batch.first_row, Numbers{0, 3, 6, 10, 14, 15});
    put(batch.lengths, Numbers{63, 67, 104, 190, 0});
    put(batch.chunk_tokens, Numbers{3, 3, 0, 0, 0});
    put(batch.next_token, Numbers{-1, 23, -1, -1, -1});
    put(batch.num_blocks, Numbers{2, 2, 2, 3, 0});
    put(batch.blocks_here, Numbers{2, 2, 2, 3, 0});
    Numbers tables;
    for (int32_t s = 0; s < 5; ++s)
      for (int32_t block = 0; block < kMaxBlocks; ++block) tables.push_back(100 * s + block);
    put(batch.block_tables, tables);
    if (GetParam() > 2) {  // blocks of all ranks
      Numbers draft_tables;
      for (const int32_t page : tables) draft_tables.push_back(3 * page + 1);
      put(batch.draft_tables, draft_tables);
    }
    if (GetParam() > 1) {  // sequence 0 has its second block elsewhere, and none of a third one
      Numbers index;
      for (int32_t s = 0; s < 5; ++s)
        for (int32_t block = 0; block < kMaxBlocks; ++block) index.push_back(s == 0 && block > 0 ? block + 1 : block);
      put(batch.block_index, index);
      put(batch.blocks_here, Numbers{1, 2, 2, 3, 0});
    }
    put(arrays_->slots().newest + 1, Numbers{91, 92, 0, 94});
    put(arrays_->slots().length + 1, Numbers{190, 63, 0, 102});
    passes_.num_drafts = kPlaces - 1;
    passes_.slots = kSlots;
    size_t used = 0;
    memory_ = device_buffer(1 << 16);
    for (int32_t** array : {&passes_.first_tokens, &passes_.last_rows, &passes_.tokens, &passes_.positions,
                            &passes_.lengths, &passes_.row_page, &passes_.local_blocks}) {
      *array = reinterpret_cast<int32_t*>(memory_.data() + used);
      used += 1024;
    }
    passes_.largest = reinterpret_cast<unsigned long long*>(memory_.data() + used);
    passes_.picks = reinterpret_cast<Pick*>(memory_.data() + used + 1024);
    passes_.all_picks = reinterpret_cast<Pick*>(memory_.data() + used + 2048);
    expect_ok(begin_passes(arrays_->slots(), batch, kRows, passes_, nullptr));
  }
  Numbers of_pass(const int32_t* array, int32_t pass) const { return fetch(array + pass * kSlots, kRows); }

  static constexpr int32_t kRows = 5;
  DraftPasses passes_;
  Buffer memory_;
};

TEST_P(DraftPassesOf, RunTheTokenAfterEach) {
  const Numbers first = fetch(passes_.first_tokens, 15);
  EXPECT_EQ(Numbers(first.begin(), first.begin() + 8), (Numbers{11, 12, 92, 21, 22, 23, 31, 94}));
  EXPECT_EQ(Numbers(first.begin() + 10, first.begin() + 14), (Numbers{41, 42, 43, 91}));
  EXPECT_EQ(first[14], -1);
  EXPECT_EQ(fetch(passes_.last_rows, kRows), (Numbers{2, 5, 7, 13, 14}));
  EXPECT_EQ(of_pass(passes_.positions, 1), (Numbers{63, -1, 102, 190, -1}));
  EXPECT_EQ(of_pass(passes_.positions, 2), (Numbers{64, -1, 103, 191, -1}));
  EXPECT_EQ(of_pass(passes_.lengths, 2), (Numbers{65, 0, 104, 192, 0}));
  if (GetParam() > 2) {
    EXPECT_EQ(of_pass(passes_.row_page, 1), (Numbers{1, -1, 604, 907, -1}));
    EXPECT_EQ(of_pass(passes_.row_page, 2), (Numbers{4, -1, 604, 907, -1}));
    return;
  }
  EXPECT_EQ(of_pass(passes_.row_page, 1), (Numbers{0, -1, 201, 302, -1}));
  EXPECT_EQ(of_pass(passes_.row_page, 2), (Numbers{GetParam() > 1 ? -1 : 1, -1, 201, 302, -1}));
  if (GetParam() == 1) return;
  EXPECT_EQ(of_pass(passes_.local_blocks, 1), (Numbers{1, 0, 2, 3, 0}));
  EXPECT_EQ(of_pass(passes_.local_blocks, 2), (Numbers{1, 0, 2, 3, 0}));
}

// By one rank, or by two that have half of the ids each; ties go to the lowest. Drafted ids are mapped to others.
TEST_P(DraftPassesOf, TakeTheLargestLogit) {
  constexpr int32_t kVocab = 5003 * 2;
  const auto ranks = static_cast<size_t>(std::min(GetParam(), 2));
  std::vector<float> logits(static_cast<size_t>(kRows * kVocab));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = random_unit(8, i);
  const Numbers best = {4000, 17, 5003, 10005, 0};
  for (size_t s = 0; s < kRows; ++s)
    for (const int32_t id : {best[s], 10005}) logits[s * kVocab + static_cast<size_t>(id)] = 2;
  Numbers ids(kVocab);
  for (int32_t i = 0; i < kVocab; ++i) ids[static_cast<size_t>(i)] = i + 3;
  const Buffer mapped = device_buffer(ids.size() * 4);
  put(reinterpret_cast<int32_t*>(mapped.data()), ids);
  passes_.target_ids = reinterpret_cast<const int32_t*>(mapped.data());
  put(passes_.lengths + 2 * kSlots, Numbers{0});  // as where the blocks of sequence 0 end
  for (int32_t pass = 0; pass < 3; ++pass) {
    std::vector<Pick> all;
    SlotArrays slots = arrays_->slots();
    slots.ranks = static_cast<int32_t>(ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      const auto share = static_cast<std::ptrdiff_t>(kVocab / ranks);
      std::vector<float> mine;
      for (size_t s = 0; s < kRows; ++s) {
        const auto from = logits.begin() + static_cast<std::ptrdiff_t>(s * kVocab) + share * static_cast<int32_t>(rank);
        mine.insert(mine.end(), from, from + share);
      }
      const Buffer memory = device_buffer(mine.size() * 4);
      put(reinterpret_cast<float*>(memory.data()), mine);
      slots.rank = static_cast<int32_t>(rank);
      const std::vector<unsigned long long> none(kRows, ~0ull);
      put(passes_.largest, none);
      expect_ok(
          guess_drafts({.data = memory.data(), .dtype = DType::kF32, .rows = kRows, .cols = share, .row_stride = share},
                       slots, arrays_->batch(), pass, passes_, nullptr));
      if (ranks == 1) continue;
      const std::vector<Pick> picks = fetch(passes_.picks, kRows);
      all.insert(all.end(), picks.begin(), picks.end());
    }
    if (ranks > 1) {
      put(passes_.all_picks, all);
      expect_ok(agree_on_drafts(slots, arrays_->batch(), kRows, pass, passes_, nullptr));
    }
    EXPECT_EQ(fetch(passes_.largest, kRows), std::vector<unsigned long long>(kRows, ~0ull)) << "for the next pass";
    if (pass == 0) {
      EXPECT_EQ(of_pass(passes_.tokens, 1), (Numbers{4003, -1, 5006, 10008, -1}));
    }
    if (pass == 1) {
      EXPECT_EQ(of_pass(passes_.tokens, 2), (Numbers{-1, -1, 5006, 10008, -1}));
    }
  }
  EXPECT_EQ(drafts(2), (Numbers{4003, 4003, -1}));
  EXPECT_EQ(drafts(4), (Numbers{5006, 5006, 5006}));
  EXPECT_EQ(drafts(1), (Numbers{10008, 10008, 10008}));
}

// The last with a cache of its own, which has the blocks of all ranks.
INSTANTIATE_TEST_SUITE_P(All, DraftPassesOf, testing::Values(1, 2, 3));

}  // namespace
}  // namespace perigee
