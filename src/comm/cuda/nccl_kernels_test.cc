// What NcclRank's collectives do beside gathering, on one GPU and without NCCL.
#include "comm/cuda/nccl_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "comm/cuda/peer_testing.h"
#include "comm/cuda/term.h"

namespace perigee {
namespace {

class NcclKernels : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = no_peers(Placed::kOnOneGpu)) GTEST_SKIP() << *why;
    ASSERT_EQ(load_nccl_kernels(), cudaSuccess);
  }
  template <typename T>
  Buffer upload(const std::vector<T>& values) {
    Buffer there = device_buffer(values.size() * sizeof(T));
    device_copy(there.data(), values.data(), there.size());
    return there;
  }
  template <typename T>
  std::vector<T> download(const Buffer& there) {
    std::vector<T> values(there.size() / sizeof(T));
    stream_.synchronize();
    device_copy(values.data(), there.data(), there.size());
    return values;
  }
  Stream stream_;
};

constexpr int64_t kRows = 5, kCols = 70, kStride = 72;
constexpr int32_t kSize = 3;

TEST_F(NcclKernels, SumsAreTakenInRankOrder) {
  std::vector<float> gathered(static_cast<size_t>(kSize * kRows * kCols));
  for (size_t i = 0; i < gathered.size(); ++i) gathered[i] = peer_value(1, 0, static_cast<int64_t>(i));
  std::vector<uint16_t> narrow(gathered.size());
  std::transform(gathered.begin(), gathered.end(), narrow.begin(), f32_to_bf16);
  const Buffer from = upload(gathered), from_narrow = upload(narrow);
  const Buffer to = upload(std::vector<float>(static_cast<size_t>(kRows * kStride), -1.0f));
  const Buffer to_narrow = upload(std::vector<uint16_t>(static_cast<size_t>(kRows * kStride), 1));
  Tensor x{.data = to.data(), .rows = kRows, .cols = kCols, .row_stride = kStride};
  ASSERT_EQ(sum_gathered(from.data(), kSize, x, stream_.get()), cudaSuccess);
  x.data = to_narrow.data();
  x.dtype = DType::kBF16;
  ASSERT_EQ(sum_gathered(from_narrow.data(), kSize, x, stream_.get()), cudaSuccess);
  const auto sums = download<float>(to);
  const auto narrow_sums = download<uint16_t>(to_narrow);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < kStride; ++c) {
      const auto at = static_cast<size_t>(r * kStride + c), i = static_cast<size_t>(r * kCols + c),
                 all = gathered.size() / 3;
      const bool sum = c < kCols;
      ASSERT_EQ(sums[at], sum ? gathered[i] + gathered[i + all] + gathered[i + 2 * all] : -1.0f) << r << ", " << c;
      const auto wide = [&](size_t k) { return bf16_to_f32(narrow[k]); };
      ASSERT_EQ(narrow_sums[at], sum ? f32_to_bf16(wide(i) + wide(i + all) + wide(i + 2 * all)) : 1) << r << ", " << c;
    }
}

TEST_F(NcclKernels, TermsAreAddedInRankOrder) {
  std::vector<uint16_t> gathered(static_cast<size_t>(kSize * kRows * kCols));
  for (size_t i = 0; i < gathered.size(); ++i) gathered[i] = to_term(peer_value(2, 0, static_cast<int64_t>(i))).bits;
  std::vector<float> before(static_cast<size_t>(kRows * kStride));
  for (size_t i = 0; i < before.size(); ++i) before[i] = peer_value(3, 0, static_cast<int64_t>(i));
  const Buffer from = upload(gathered), to = upload(before);
  const Tensor residual{.data = to.data(), .rows = kRows, .cols = kCols, .row_stride = kStride};
  ASSERT_EQ(add_gathered(from.data(), kSize, residual, stream_.get()), cudaSuccess);
  const auto sums = download<float>(to);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < kStride; ++c) {
      const auto at = static_cast<size_t>(r * kStride + c), i = static_cast<size_t>(r * kCols + c),
                 all = gathered.size() / 3;
      const auto wide = [&](size_t k) { return from_term(gathered[k]); };
      ASSERT_EQ(sums[at], c < kCols ? before[at] + (wide(i) + wide(i + all) + wide(i + 2 * all)) : before[at])
          << r << ", " << c;
    }
}

TEST_F(NcclKernels, RowsOfADealFindTheirPlaces) {
  constexpr int64_t kDealt = 700, kBegin = 300;
  std::vector<int32_t> to(static_cast<size_t>(kDealt));
  for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<int32_t>(i * i % 4) - 1;
  const int64_t here = std::count(to.begin(), to.end(), 0), before = std::count(to.begin(), to.begin() + kBegin, 0);
  std::vector<float> gathered(static_cast<size_t>(kSize * (kDealt - kBegin) * kCols));
  for (size_t i = 0; i < gathered.size(); ++i) gathered[i] = static_cast<float>(i);
  const Buffer from = upload(gathered), rows = upload(to);
  const Buffer out = upload(std::vector<float>(static_cast<size_t>(here * kSize * kCols), -1.0f));
  const Tensor whole{.data = out.data(), .rows = here, .cols = kSize * kCols, .row_stride = kSize * kCols};
  ASSERT_EQ(take_dealt(from.data(), {.rank = 0, .size = kSize, .begin = kBegin, .end = kDealt},
                       reinterpret_cast<const int32_t*>(rows.data()), kCols, whole, stream_.get()),
            cudaSuccess);
  const auto got = download<float>(out);
  int64_t at = 0;
  for (int64_t row = 0; row < kDealt; ++row) {
    if (to[static_cast<size_t>(row)] != 0) continue;
    for (int64_t c = 0; c < kSize * kCols; ++c) {
      const int64_t i = (c / kCols * (kDealt - kBegin) + row - kBegin) * kCols + c % kCols;
      ASSERT_EQ(got[static_cast<size_t>(at * kSize * kCols + c)],
                at < before ? -1.0f : gathered[static_cast<size_t>(i)])
          << row << ", " << c;
    }
    ++at;
  }
}

TEST_F(NcclKernels, CallsAreCounted) {
  const Buffer counter = upload(std::vector<uint64_t>{41}), words = pinned_buffer(sizeof(uint64_t));
  auto* come_to = reinterpret_cast<uint64_t*>(words.data());
  for (int i = 0; i < 2; ++i)
    ASSERT_EQ(count_call(reinterpret_cast<uint64_t*>(counter.data()), come_to, stream_.get()), cudaSuccess);
  stream_.synchronize();
  EXPECT_EQ(*come_to, 43u);
}

}  // namespace
}  // namespace perigee
