// The exchanges of attention over a shared cache have the bits of the collectives and kernels that they stand for.
#include "ops/cuda/mla/shared_exchange.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/eventually.h"
#include "base/rng.h"
#include "comm/cuda/peer_testing.h"
#include "ops/cuda/mla/shared_latents.h"

namespace perigee {
namespace {

constexpr size_t kPush = std::numeric_limits<size_t>::max(), kPull = 0;

using SharedExchange = PeerSuite<Placed>;

// `heads` are a rank's.
struct Shape {
  int64_t rows = 1, heads = 1, latent = 512, rope = 64;

  std::string text() const { return str_cat(rows, " rows of ", heads, " heads, ", latent, " latents"); }
};

Tensor tensor(PeerRank& rank, DType dtype, int64_t rows, int64_t cols) {
  return {.data = rank.reserve(static_cast<size_t>(rows * cols * dtype_bytes(dtype))),
          .dtype = dtype,
          .rows = rows,
          .cols = cols,
          .row_stride = cols};
}

// Nearly any bits: queries are moved, not computed with, but two NaNs of ones alone may become others.
Tensor queries_of(PeerRank& rank, uint64_t call, const Shape& s) {
  const int64_t cols = s.heads * (s.latent + s.rope);
  std::vector<uint16_t> values(static_cast<size_t>(s.rows * cols));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<uint16_t>(random_u64(call * 64 + static_cast<uint64_t>(rank.rank), i) % 0xFFFF);
  return {.data = rank.upload(values), .dtype = DType::kBF16, .rows = s.rows, .cols = cols, .row_stride = cols};
}

// Of all heads. Every third row saw nothing and holds NaN.
Tensor results_of(PeerRank& rank, uint64_t call, const Shape& s) {
  const int64_t rows = s.rows * s.heads * rank.comm->size(), cols = s.latent + 4;
  std::vector<float> values(static_cast<size_t>(rows * cols));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < cols; ++c) {
      const bool nothing = random_u64(call * 8 + static_cast<uint64_t>(rank.rank), static_cast<uint64_t>(row)) % 3 == 0;
      const float x = peer_value(call, rank.rank, row * cols + c) * 1e-5f;
      values[static_cast<size_t>(row * cols + c)] = !nothing        ? x
                                                    : c == s.latent ? -std::numeric_limits<float>::infinity()
                                                                    : std::numeric_limits<float>::quiet_NaN();
    }
  return {.data = rank.upload(values), .rows = rows, .cols = cols, .row_stride = cols};
}

struct Outcome {
  Tensor queries, merged;  // [rows, ranks * heads * (L + dr)], [rows * heads, L]; bf16
};

Outcome outcome(PeerRank& rank, const Shape& s) {
  return {.queries = tensor(rank, DType::kBF16, s.rows, rank.comm->size() * s.heads * (s.latent + s.rope)),
          .merged = tensor(rank, DType::kBF16, s.rows * s.heads, s.latent)};
}

// By collectives and kernels around them.
Outcome by_parts(PeerRank& rank, const Tensor& mine, const Tensor& results, const Shape& s) {
  const cudaStream_t stream = rank.stream.get();
  const int ranks = rank.comm->size();
  Outcome out = outcome(rank, s);
  const Tensor by_rank = tensor(rank, DType::kBF16, ranks * s.rows, mine.cols);
  rank.comm->all_gather(mine.data, static_cast<size_t>(mine.rows * mine.cols) * 2, by_rank.data);
  EXPECT_EQ(join_queries(by_rank.row<uint16_t>(0), ranks, out.queries, stream), cudaSuccess);
  const Tensor whole = tensor(rank, DType::kF32, s.rows * s.heads, ranks * results.cols);
  auto* to = static_cast<int32_t*>(rank.reserve(static_cast<size_t>(results.rows) * 4));
  EXPECT_EQ(list_owners(to, results.rows, static_cast<int>(s.heads), ranks, stream), cudaSuccess);
  rank.comm->all_to_all(results, {to, static_cast<size_t>(results.rows)}, whole);
  EXPECT_EQ(merge_results(whole, ranks, out.merged, stream), cudaSuccess);
  return out;
}

Outcome exchanged(PeerRank& rank, const Tensor& mine, const Tensor& results, const Shape& s) {
  Outcome out = outcome(rank, s);
  EXPECT_EQ(exchange_queries(rank.comm->view(), mine, out.queries, rank.stream.get()), cudaSuccess);
  EXPECT_EQ(exchange_results(rank.comm->view(), results, static_cast<int>(s.heads), out.merged, rank.stream.get()),
            cudaSuccess);
  return out;
}

std::vector<uint16_t> bits(PeerRank& rank, const Tensor& x) {
  return rank.download(x.row<uint16_t>(0), static_cast<size_t>(x.rows * x.cols));
}

void expect_same(PeerRank& rank, const Outcome& got, const Outcome& wanted, const std::string& what) {
  ASSERT_EQ(bits(rank, got.queries), bits(rank, wanted.queries)) << what;
  ASSERT_EQ(bits(rank, got.merged), bits(rank, wanted.merged)) << what;
}

// Every kernel of the test, before another rank may wait for this one.
void load_kernels(PeerRank& rank) {
  ASSERT_EQ(load_exchanges(), cudaSuccess);
  rank.comm->set_silent(true);
  const Shape s;
  by_parts(rank, queries_of(rank, 0, s), results_of(rank, 0, s), s);
  rank.stream.synchronize();
  rank.comm->set_silent(false);
  rank.meet();
}

TEST_P(SharedExchange, HasTheBitsOfItsParts) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam(), 512 << 20);
    run(group, [](PeerRank& rank) {
      load_kernels(rank);
      uint64_t call = 0;
      for (const size_t how : {kPush, kPull, one_shot_bytes(rank.group.size), kPush})
        for (const Shape& s : {Shape{}, Shape{.rows = 2, .heads = 3}, Shape{.rows = 5, .heads = 8, .latent = 256},
                               Shape{.rows = 33, .heads = 4, .latent = 128, .rope = 16}, Shape{.rows = 67, .heads = 8},
                               Shape{.rows = 130, .heads = 16}}) {
          rank.reset();
          rank.comm->set_one_shot_bytes(how);
          rank.comm->set_flagged_bytes(call < 12 ? 0 : kFlaggedBytes);
          const Tensor mine = queries_of(rank, ++call, s), results = results_of(rank, call, s);
          const Outcome wanted = by_parts(rank, mine, results, s), got = exchanged(rank, mine, results, s);
          rank.comm->barrier();  // results may go
          expect_same(rank, got, wanted, str_cat(s.text(), how == kPush ? ", pushed" : how == kPull ? ", pulled" : ""));
        }
    });
  }
}

// As layers do it: operands in the same memory, written anew as soon as this rank's next exchange has ended.
TEST_P(SharedExchange, OperandsServeLayerAfterLayer) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam(), 512 << 20);
    run(group, [](PeerRank& rank) {
      load_kernels(rank);
      rank.reset();
      constexpr int kLayers = 24;
      const Shape s{.rows = 9, .heads = 8};
      const Tensor mine = queries_of(rank, 0, s), results = results_of(rank, 0, s);
      Tensor results_as_pairs = results;  // to be copied
      results_as_pairs.dtype = DType::kBF16;
      results_as_pairs.cols = results_as_pairs.row_stride = 2 * results.cols;
      std::vector<std::pair<Tensor, Tensor>> operands;
      std::vector<Outcome> wanted, got;
      for (uint64_t layer = 0; layer < kLayers; ++layer) {
        operands.emplace_back(queries_of(rank, layer, s), results_of(rank, layer, s));
        wanted.push_back(by_parts(rank, operands.back().first, operands.back().second, s));
        got.push_back(outcome(rank, s));
      }
      for (int layer = 0; layer < kLayers; ++layer) {
        rank.comm->set_one_shot_bytes(layer % 3 == 0 ? kPush : kPull);
        rank.comm->set_flagged_bytes(layer % 4 < 2 ? 0 : kFlaggedBytes);
        const cudaStream_t stream = rank.stream.get();
        const auto& [queries, of_layer] = operands[static_cast<size_t>(layer)];
        Outcome& out = got[static_cast<size_t>(layer)];
        ASSERT_EQ(join_queries(queries.row<uint16_t>(0), 1, mine, stream), cudaSuccess);  // a copy
        ASSERT_EQ(exchange_queries(rank.comm->view(), mine, out.queries, stream), cudaSuccess);
        ASSERT_EQ(join_queries(of_layer.row<uint16_t>(0), 1, results_as_pairs, stream), cudaSuccess);
        rank.comm->set_one_shot_bytes(layer % 2 == 0 ? kPush : kPull);
        ASSERT_EQ(exchange_results(rank.comm->view(), results, static_cast<int>(s.heads), out.merged, stream),
                  cudaSuccess);
      }
      for (size_t layer = 0; layer < kLayers; ++layer)
        expect_same(rank, got[layer], wanted[layer], str_cat("layer ", layer));
    });
  }
}

TEST_P(SharedExchange, EndsWhenARankIsLost) {
  for (const size_t how : {kPush, kPull}) {
    PeerGroup group(2, GetParam());
    run(group, [&](PeerRank& rank) {
      load_kernels(rank);
      const Shape s{.rows = 4, .heads = 8};
      const Tensor mine = queries_of(rank, 1, s), results = results_of(rank, 1, s);
      const Outcome out = outcome(rank, s);
      rank.comm->set_one_shot_bytes(how);
      rank.meet();
      if (rank.rank == 1) {
        EXPECT_TRUE(eventually([&] { return group.comms.num_meetings(0) == 1; }));
        group.comms.abort();
        return;
      }
      for (int i = 0; i < 50; ++i) {
        ASSERT_EQ(exchange_queries(rank.comm->view(), mine, out.queries, rank.stream.get()), cudaSuccess);
        ASSERT_EQ(
            exchange_results(rank.comm->view(), results, static_cast<int>(s.heads), out.merged, rank.stream.get()),
            cudaSuccess);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, SharedExchange, testing::Values(Placed::kOnOneGpu, Placed::kApart),
                         [](const auto& param) { return kind_name(param.param); });

}  // namespace
}  // namespace perigee
