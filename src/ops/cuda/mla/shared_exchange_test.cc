// The exchanges of attention over a shared cache have the bits of the collectives and kernels that they stand for.
#include "ops/cuda/mla/shared_exchange.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/eventually.h"
#include "base/rng.h"
#include "comm/cuda/peer_testing.h"
#include "ops/cuda/mla/result_row.h"
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

constexpr uint16_t kInfinityF16 = 0x7C00, kNanF16 = 0xFFFF;  // two such NaNs are what an empty box holds
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What that rank found of all heads, as result_row.h. Every third row saw nothing and holds NaN.
struct HostResults {
  HostResults(uint64_t call, int32_t rank, int32_t ranks, const Shape& s)
      : latent(s.latent), values(static_cast<size_t>(s.rows * s.heads * ranks * result_columns(s.latent))) {
    for (int64_t i = 0; i < std::ssize(values); ++i) {
      const uint64_t any = random_u64(call * 64 + static_cast<uint64_t>(rank), static_cast<uint64_t>(i));
      values[static_cast<size_t>(i)] = static_cast<uint16_t>(any % 2 << 15 | any / 2 % kInfinityF16);
    }
    for (int64_t row = 0; row < s.rows * s.heads * ranks; ++row) {
      set_lse(row, peer_value(call, rank, row) * 1e-5f);
      if (random_u64(call * 8 + static_cast<uint64_t>(rank), static_cast<uint64_t>(row)) % 3 != 0) continue;
      set_lse(row, kNothing);
      std::fill_n(&mean(row, 0), latent, kNanF16);
    }
  }
  uint16_t& mean(int64_t row, int64_t column) {
    return values[static_cast<size_t>(row * result_columns(latent) + column)];
  }
  void set_lse(int64_t row, float lse) { std::memcpy(&mean(row, latent), &lse, sizeof(lse)); }
  float lse(int64_t row) {
    float lse = 0;
    std::memcpy(&lse, &mean(row, latent), sizeof(lse));
    return lse;
  }

  int64_t latent;
  std::vector<uint16_t> values;
};

Tensor on_device(PeerRank& rank, const HostResults& results) {
  const int64_t cols = result_columns(results.latent);
  return {.data = rank.upload(results.values),
          .dtype = DType::kF16,
          .rows = std::ssize(results.values) / cols,
          .cols = cols,
          .row_stride = cols};
}

Tensor results_of(PeerRank& rank, uint64_t call, const Shape& s) {
  return on_device(rank, HostResults(call, rank.rank, rank.comm->size(), s));
}

// Of the ranks' results row `row`, merged: [L].
std::vector<double> merged(std::vector<HostResults>& of_ranks, int64_t row) {
  double sum = 0;
  std::vector<double> means(static_cast<size_t>(of_ranks.front().latent));
  for (HostResults& results : of_ranks) {
    if (results.lse(row) == kNothing) continue;
    const double weight = std::exp(static_cast<double>(results.lse(row)));
    sum += weight;
    for (size_t c = 0; c < means.size(); ++c)
      means[c] += weight * kMeanUnit * f16_to_f32(results.mean(row, static_cast<int64_t>(c)));
  }
  for (double& x : means) x = sum == 0 ? 0 : x / sum;
  return means;
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
  const Tensor whole = tensor(rank, DType::kF16, s.rows * s.heads, ranks * results.cols);
  auto* to = static_cast<int32_t*>(rank.reserve(static_cast<size_t>(results.rows) * 4));
  EXPECT_EQ(list_owners(to, results.rows, static_cast<int>(s.heads), ranks, stream), cudaSuccess);
  rank.comm->all_to_all(as_words(results), {to, static_cast<size_t>(results.rows)}, as_words(whole));
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

// How a row travels: with flags, without, or read where it lies.
void set_way(PeerRank& rank, int way) {
  rank.comm->set_one_shot_bytes(way == 2 ? kPull : kPush);
  rank.comm->set_flagged_bytes(way == 0 ? std::numeric_limits<size_t>::max() : 0);
}

// This rank's heads of what `mine` and the others' results are.
std::vector<uint16_t> exchange_alone(PeerRank& rank, const Tensor& mine, const Shape& s) {
  const Tensor y = tensor(rank, DType::kBF16, s.rows * s.heads, s.latent);
  EXPECT_EQ(exchange_results(rank.comm->view(), mine, static_cast<int>(s.heads), y, rank.stream.get()), cudaSuccess);
  rank.comm->barrier();  // mine may go
  return bits(rank, y);
}

TEST_P(SharedExchange, MergesByTheDefinition) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam(), 512 << 20);
    run(group, [](PeerRank& rank) {
      load_kernels(rank);
      const int32_t ranks = rank.comm->size();
      const Shape s{.rows = 11, .heads = 5, .latent = 384};
      for (const int way : {0, 1, 2}) {
        std::vector<HostResults> of_ranks;
        for (int32_t r = 0; r < ranks; ++r) of_ranks.emplace_back(7, r, ranks, s);
        set_way(rank, way);
        const Tensor mine = on_device(rank, of_ranks[static_cast<size_t>(rank.rank)]);
        const std::vector<uint16_t> got = exchange_alone(rank, mine, s);
        for (int64_t row = 0; row < s.rows * s.heads; ++row) {
          const int64_t head = (row / s.heads * ranks + rank.rank) * s.heads + row % s.heads;
          const std::vector<double> wanted = merged(of_ranks, head);
          for (size_t c = 0; c < wanted.size(); ++c)
            ASSERT_NEAR(bf16_to_f32(got[static_cast<size_t>(row * s.latent) + c]), wanted[c],
                        std::abs(wanted[c]) / 256 + 0.02)
                << "way " << way << ", row " << row << ", column " << c;
        }
      }
    });
  }
}

// Of each rank's row of a head, some numbers are not finite: they show in the columns they are in, whatever the way.
TEST_P(SharedExchange, InfinityAndNanShow) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam(), 512 << 20);
    run(group, [](PeerRank& rank) {
      load_kernels(rank);
      const int32_t ranks = rank.comm->size();
      const Shape s{.rows = 3, .heads = 2};
      constexpr int64_t kInfinite = 100, kNans = 302;  // columns
      for (const int way : {0, 1, 2})
        for (int32_t from = 0; from < ranks; ++from) {
          HostResults mine(3, rank.rank, ranks, s);
          for (int64_t row = 0; row < s.rows * s.heads * ranks; ++row) {
            std::fill_n(&mine.mean(row, 0), s.latent, uint16_t{0x2C00});  // a sixteenth
            mine.set_lse(row, 1.5f);
            if (rank.rank != from) continue;
            mine.mean(row, kInfinite) = kInfinityF16;
            mine.mean(row, kNans) = mine.mean(row, kNans + 1) = kNanF16;
          }
          set_way(rank, way);
          const std::vector<uint16_t> got = exchange_alone(rank, on_device(rank, mine), s);
          for (int64_t i = 0; i < std::ssize(got); ++i) {
            const float x = bf16_to_f32(got[static_cast<size_t>(i)]);
            const int64_t column = i % s.latent;
            const bool good = column == kInfinite                      ? std::isinf(x)
                              : column == kNans || column == kNans + 1 ? std::isnan(x)
                                                                       : x == 1;
            ASSERT_TRUE(good) << "way " << way << ", rank " << from << ", row " << i / s.latent << ", column " << column
                              << ": " << x;
          }
        }
    });
  }
}

// A row's bits do not depend on how it travels, nor on the rows beside it.
TEST_P(SharedExchange, ARowHasTheSameBitsAloneAndInABatch) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam(), 512 << 20);
    run(group, [](PeerRank& rank) {
      load_kernels(rank);
      const Shape batch{.rows = 37, .heads = 6}, alone{.rows = 1, .heads = 6};
      const Tensor results = results_of(rank, 5, batch);
      set_way(rank, 1);
      const std::vector<uint16_t> wanted = exchange_alone(rank, results, batch);
      for (const int way : {0, 2}) {
        set_way(rank, way);
        ASSERT_EQ(exchange_alone(rank, results, batch), wanted) << "way " << way;
      }
      const int64_t count = results.rows / batch.rows;
      for (const int64_t row : {0, 1, 18, 36})
        for (const int way : {0, 1, 2}) {
          set_way(rank, way);
          const auto first = wanted.begin() + row * alone.heads * alone.latent;
          ASSERT_EQ(exchange_alone(rank, results.row_range(row * count, count), alone),
                    std::vector<uint16_t>(first, first + alone.heads * alone.latent))
              << "way " << way << ", row " << row;
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
        ASSERT_EQ(join_queries(of_layer.row<uint16_t>(0), 1, results, stream), cudaSuccess);
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
