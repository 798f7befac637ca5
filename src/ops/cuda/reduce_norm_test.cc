// The kernel of a layer's reduce point has the bits of the sum over ranks, then the norm.
#include "ops/cuda/reduce_norm.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/eventually.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/norm_testing.h"

namespace perigee {
namespace {

using ReduceNorm = PeerSuite<PeerKind>;

void check_rows(PeerRank& rank, uint64_t call, bool clusters, int64_t rows, int64_t cols) {
  constexpr float kEps = 1e-5f;
  rank.reset();
  rank.comm->set_one_shot_bytes(std::numeric_limits<size_t>::max());
  rank.comm->set_flagged_bytes(call % 2 == 0 ? 0 : kFlaggedBytes);
  const cudaStream_t stream = rank.stream.get();
  const NormOperands apart(rank, call, rows, cols), joined(rank, call, rows, cols);
  ASSERT_TRUE(reduce_norm_pays(rank.comm->view(), joined.residual, joined.y, joined.out)) << rows << "x" << cols;
  rank.comm->add_up(apart.y, apart.residual);
  ASSERT_EQ(rms_norm_rows(apart.residual, nullptr, apart.weight, kEps, apart.out, stream), cudaSuccess);
  ASSERT_EQ(
      reduce_norm_rows(rank.comm->view(), joined.residual, joined.y, joined.weight, kEps, joined.out, stream, clusters),
      cudaSuccess);
  const auto count = static_cast<size_t>(rows * cols);
  ASSERT_EQ(rank.download(apart.residual.row<uint32_t>(0), count),
            rank.download(joined.residual.row<uint32_t>(0), count))
      << rows << "x" << cols;
  ASSERT_EQ(rank.download(apart.out.row<uint16_t>(0), count), rank.download(joined.out.row<uint16_t>(0), count))
      << rows << "x" << cols;
}

// With clusters of blocks where the GPU has them, and as on a GPU without.
TEST_P(ReduceNorm, HasTheBitsOfItsParts) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam(), 512 << 20);
    run(group, [](PeerRank& rank) {
      for (const bool clusters : {has_clusters(), false}) ASSERT_EQ(load_reduce_norm(clusters), cudaSuccess);
      // The kernels that the test compares with, before another rank may wait for this one.
      {
        const NormOperands first(rank, 0, 600, 64), few(rank, 0, 1, 64);
        for (const NormOperands& x : {first, few})
          ASSERT_EQ(rms_norm_rows(x.residual, nullptr, x.weight, 1, x.out, rank.stream.get()), cudaSuccess);
        rank.stream.synchronize();
      }
      rank.meet();
      uint64_t call = 0;
      const auto most = static_cast<int64_t>(number_box_bytes(rank.group.size)) / 2;  // terms
      for (int turn = 0; turn < 4; ++turn)
        for (const int64_t cols : {4, 64, 1000, 2048, 2304, 5120, 7168, 8192})
          for (const int64_t rows : {1, 2, 7, 8, 16, 31, 32})
            if (rows <= rank.comm->view().most_blocks() / 16 && rows * cols <= most)
              check_rows(rank, ++call, has_clusters() && turn != 1, rows, cols);
    });
  }
}

TEST_P(ReduceNorm, EndsWhenARankIsLost) {
  PeerGroup group(2, GetParam());
  run(group, [&](PeerRank& rank) {
    ASSERT_EQ(load_reduce_norm(), cudaSuccess);
    const NormOperands x(rank, 1, 8, 2304);
    rank.meet();
    if (rank.rank == 1) {
      EXPECT_TRUE(eventually([&] { return group.comms.num_meetings(0) == 1; }));
      group.comms.abort();
      return;
    }
    for (int i = 0; i < 50; ++i)
      ASSERT_EQ(reduce_norm_rows(rank.comm->view(), x.residual, x.y, x.weight, 1, x.out, rank.stream.get()),
                cudaSuccess);
  });
}

INSTANTIATE_TEST_SUITE_P(All, ReduceNorm,
                         testing::Values(Placed::kOnOneGpu, Placed::kApart,
                                         PeerKind(Placed::kOnOneGpu, Carrier::kHost)),
                         [](const auto& param) { return kind_name(param.param); });

}  // namespace
}  // namespace perigee
