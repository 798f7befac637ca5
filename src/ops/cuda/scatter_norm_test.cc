// The reduce point of many rows has the bits of the sum over ranks, then the norm.
#include "ops/cuda/scatter_norm.h"

#include <gtest/gtest.h>

#include "base/eventually.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/norm_testing.h"

namespace perigee {
namespace {

using ScatterNorm = PeerSuite<Placed>;

// Rows [begin, begin + count) of both have the same bits.
template <typename T>
void expect_rows(PeerRank& rank, const Tensor& expected, const Tensor& actual, int64_t begin, int64_t count) {
  const auto numbers = static_cast<size_t>(count * actual.cols);
  ASSERT_EQ(rank.download(expected.row<T>(begin), numbers), rank.download(actual.row<T>(begin), numbers))
      << count << " rows of " << actual.cols << " columns from row " << begin << " of " << actual.rows;
}

void check_rows(PeerRank& rank, uint64_t call, int64_t rows, int64_t cols, ScatterForm form) {
  constexpr float kEps = 1e-5f;
  rank.reset();
  rank.comm->set_one_shot_bytes(0);
  const cudaStream_t stream = rank.stream.get();
  const NormOperands apart(rank, call, rows, cols), joined(rank, call, rows, cols);
  ASSERT_TRUE(scatter_norm_pays(rank.comm->view(), joined.residual));
  rank.comm->add_up(apart.y, apart.residual);
  ASSERT_EQ(rms_norm_rows(apart.residual, nullptr, apart.weight, kEps, apart.out, stream), cudaSuccess);
  if (form == ScatterForm::kPush && !scatter_norm_pushes(rank.comm->view(), joined.residual)) form = ScatterForm::kPull;
  ASSERT_EQ(
      scatter_norm_rows(rank.comm->view(), joined.residual, joined.y, joined.weight, kEps, joined.out, stream, form),
      cudaSuccess);
  expect_rows<uint16_t>(rank, apart.out, joined.out, 0, rows);
  const RowShares shares(rows, rank.group.size);
  expect_rows<uint32_t>(rank, apart.residual, joined.residual, rank.rank * shares.each, shares.each);
  expect_rows<uint32_t>(rank, apart.residual, joined.residual, rows - shares.common, shares.common);
}

TEST_P(ScatterNorm, HasTheBitsOfItsParts) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam(), 512 << 20);
    run(group, [](PeerRank& rank) {
      ASSERT_EQ(load_scatter_norm(), cudaSuccess);
      // The kernels that the test compares with, before another rank may wait for this one.
      {
        const NormOperands many(rank, 0, 600, 64), few(rank, 0, 1, 64);
        for (const NormOperands& x : {many, few})
          ASSERT_EQ(rms_norm_rows(x.residual, nullptr, x.weight, 1, x.out, rank.stream.get()), cudaSuccess);
        rank.stream.synchronize();
      }
      rank.meet();
      uint64_t call = 0;
      for (int turn = 0; turn < 4; ++turn)
        for (const int64_t cols : {4, 64, 1000, 2304, 7168, 8192})
          for (const int64_t rows : {1, 2, 3, 33, 64, 117, 601})
            check_rows(rank, ++call, rows, cols, turn % 3 == 1 ? ScatterForm::kPull : ScatterForm::kPush);
      check_rows(rank, ++call, 2049, 2304, ScatterForm::kChosen);
    });
  }
}

TEST_P(ScatterNorm, EndsWhenARankIsLost) {
  PeerGroup group(2, GetParam());
  run(group, [&](PeerRank& rank) {
    ASSERT_EQ(load_scatter_norm(), cudaSuccess);
    const NormOperands x(rank, 1, 300, 2304), few(rank, 1, 64, 2304);
    rank.meet();
    if (rank.rank == 1) {
      EXPECT_TRUE(eventually([&] { return group.comms.num_meetings(0) == 1; }));
      group.comms.abort();
      return;
    }
    for (int i = 0; i < 50; ++i) {
      const NormOperands& rows = i % 2 == 0 ? few : x;
      ASSERT_EQ(scatter_norm_rows(rank.comm->view(), rows.residual, rows.y, rows.weight, 1, rows.out, rank.stream.get(),
                                  i % 2 == 0 ? ScatterForm::kPush : ScatterForm::kPull),
                cudaSuccess);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, ScatterNorm, testing::Values(Placed::kOnOneGpu, Placed::kApart),
                         [](const auto& param) { return kind_name(param.param); });

}  // namespace
}  // namespace perigee
