// MLA attention on CUDA against plain loops in f64 over the same rounded inputs: generated shapes, odd ones included,
// caches and outputs poisoned with NaN before.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>

#include "base/rng.h"
#include "base/soak.h"
#include "cuda_arrays.h"
#include "ops/cuda/mla/mla_decode.h"

namespace perigee {
namespace {

constexpr float kScale = 0.07f;
constexpr float kClimbingQuery = 1024;  // so large that keys of few bits climb

struct Sequence {
  int length;  // with the new tokens
  int query;
};

struct Case {
  int heads = 8;
  std::vector<Sequence> sequences;
  LatentFormat format = LatentFormat::kBF16;
  int ranks = 1;  // blocks dealt over this many ranks; this one holds every ranks-th
  int rank = 0;
  int spare_sequences = 0;  // empty ones at the end, as in a padded batch
  bool force_portable = false;
  float climb = 0;  // by which scores grow from block to block, in nats: the last column's doing
};

// The batch of a case on the host: keys as f32 by position, and their cache image with NaN in every unused byte.
struct Problem {
  explicit Problem(const Case& c, uint64_t seed) : rng(seed), test(c) {
    first_row.push_back(0);
    for (const Sequence& s : c.sequences) {
      table_width = std::max(table_width, (s.length + 63) / 64 + 1);
      first_row.push_back(first_row.back() + s.query);
      lengths.push_back(s.length);
    }
    for (int i = 0; i < c.spare_sequences; ++i) first_row.push_back(first_row.back()), lengths.push_back(1);
    q.resize(static_cast<size_t>(first_row.back()) * c.heads * kMlaWidth);
    for (uint16_t& x : q) x = bf16_bits(gauss());
    if (c.climb != 0)
      for (size_t i = kMlaWidth - 1; i < q.size(); i += kMlaWidth) q[i] = bf16_bits(kClimbingQuery);
    row_bytes = latent_row_bytes(c.format, kMlaLatent, kMlaWidth - kMlaLatent);
    page_bytes = 64 * row_bytes + 256;
    const int pages = table_width * static_cast<int>(lengths.size()) + 3;
    cache.assign(pages * page_bytes, c.format == LatentFormat::kF8E4M3 ? 0x7F : 0xFF);
    table.assign(table_width * lengths.size(), -1), index.assign(table.size(), -1);
    std::vector<int> free_pages(pages);
    for (int i = 0; i < pages; ++i) free_pages[i] = i;
    for (int i = pages - 1; i > 0; --i) std::swap(free_pages[i], free_pages[rng.below(i + 1)]);
    for (size_t s = 0; s < lengths.size(); ++s) fill_sequence(s, free_pages);
  }

  float gauss() {
    float sum = 0;
    for (int i = 0; i < 6; ++i) sum += random_unit(rng.next(), 0) - 0.5f;
    return sum * 1.4f;
  }

  void fill_sequence(size_t s, std::vector<int>& free_pages) {
    keys.emplace_back(static_cast<size_t>(lengths[s]) * kMlaWidth);
    int count = 0;
    for (int block = 0; block * 64 < lengths[s]; ++block) {
      const bool mine = block % test.ranks == test.rank;
      const int page = mine ? free_pages.back() : -1;
      if (mine) {
        free_pages.pop_back();
        table[s * table_width + count] = page, index[s * table_width + count++] = block;
      }
      for (int p = block * 64; p < std::min(lengths[s], block * 64 + 64); ++p) store_key(s, p, page);
    }
    local_blocks.push_back(count);
  }

  void store_key(size_t s, int position, int page) {
    uint8_t* row = page < 0 ? nullptr : cache.data() + page * page_bytes + position % 64 * row_bytes;
    const LatentTiles tiles(row, kMlaLatent);
    float scale = kv_scale;
    for (int j = 0; j < kMlaWidth; ++j) {
      float& key = keys[s][static_cast<size_t>(position) * kMlaWidth + j];
      key = gauss();
      if (test.climb != 0 && j == kMlaWidth - 1)
        key = test.climb * static_cast<float>(position) / 64 / static_cast<float>(kScale * kClimbingQuery);
      const bool records = test.format == LatentFormat::kF8Tiles;
      if (test.format == LatentFormat::kF8E4M3 || (records && j < kMlaLatent)) {
        if (records && j % kLatentTile == 0) {
          scale = kv_scale * static_cast<float>(1 + rng.below(1000)) * 1e-2f;
          if (row) std::memcpy(tiles.scales + j / kLatentTile * 4, &scale, 4);
        }
        const uint8_t bits = __nv_cvt_float_to_fp8(key / scale, __NV_SATFINITE, __NV_E4M3);
        key = e4m3_value(bits) * scale;
        if (records) key = bf16_value(bf16_bits(key));
        if (row) row[j] = bits;
      } else {
        const uint16_t bits = bf16_bits(key);
        key = bf16_value(bits);
        if (row) std::memcpy(records ? tiles.k_rope + 2 * (j - kMlaLatent) : row + 2 * j, &bits, 2);
      }
    }
  }

  // Row `flat` = token * heads + head -> out [512] and the log-sum-exp.
  double reference(int flat, double* out) const {
    const int token = flat / test.heads;
    size_t s = 0;
    while (first_row[s + 1] <= token) ++s;
    const int last = lengths[s] - (first_row[s + 1] - token);
    std::vector<double> score;
    std::vector<const float*> seen;
    for (int p = 0; p <= last; ++p) {
      if (p / 64 % test.ranks != test.rank) continue;
      seen.push_back(keys[s].data() + static_cast<size_t>(p) * kMlaWidth);
      double dot = 0;
      for (int j = 0; j < kMlaWidth; ++j)
        dot += static_cast<double>(bf16_value(q[static_cast<size_t>(flat) * kMlaWidth + j])) * seen.back()[j];
      score.push_back(dot * kScale);
    }
    std::fill_n(out, kMlaLatent, 0.0);
    double largest = -INFINITY, sum = 0;
    for (const double x : score) largest = std::max(largest, x);
    for (double& x : score) sum += x = std::exp(x - largest);
    for (size_t i = 0; i < seen.size(); ++i)
      for (int j = 0; j < kMlaLatent; ++j) out[j] += score[i] / sum * seen[i][j];
    return seen.empty() ? -INFINITY : largest + std::log(sum);
  }

  Rng rng;
  Case test;
  int table_width = 1;
  int64_t row_bytes = 0, page_bytes = 0;
  float kv_scale = 0.03f;
  std::vector<int32_t> first_row, lengths, table, index, local_blocks;
  std::vector<uint16_t> q;
  std::vector<std::vector<float>> keys;
  std::vector<uint8_t> cache;
};

struct Answer {
  std::vector<uint16_t> out;
  std::vector<float> lse;
};

MlaDecodeConfig config_of(const Problem& p, MlaLists lists) {
  const Case& c = p.test;
  MlaDecodeShape shape;
  shape.heads = c.heads;
  shape.max_sequences = static_cast<int>(p.lengths.size());
  shape.max_tokens = p.first_row.back() + c.spare_sequences;
  for (const Sequence& s : c.sequences) {
    shape.max_query = std::max(shape.max_query, s.query);
    shape.max_pieces += (s.query * c.heads + 31) / 32 * mla_pieces((s.length + 63) / 64);
  }
  shape.format = c.format;
  shape.lists = lists;
  must(cudaDeviceGetAttribute(&shape.multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  shape.compute_capability = compute_capability(c.force_portable);
  return mla_decode_config(shape);
}

// In launches that end with the rows `ends` and with the last.
Answer run(const Problem& p, MlaLists lists, std::vector<int> ends = {}) {
  const Case& c = p.test;
  const MlaDecodeConfig config = config_of(p, lists);
  const size_t rows = static_cast<size_t>(config.max_tokens) * c.heads;
  Device first_row(p.first_row), lengths(p.lengths), table(p.table), index(p.index), blocks(p.local_blocks);
  Device q(p.q);
  Device cache(p.cache);
  Device<uint16_t> out(rows * kMlaLatent, 0xFF);
  Device<float> lse(rows, 0xFF);
  Device<uint8_t> workspace(config.workspace_bytes(), 0xFF);
  MlaBatch batch;
  batch.first_row = first_row.data, batch.lengths = lengths.data, batch.block_table = table.data;
  if (c.ranks > 1) batch.block_index = index.data, batch.local_blocks = blocks.data;
  batch.sequences = static_cast<int>(p.lengths.size()), batch.table_width = p.table_width;
  MlaDecodeArgs args;
  args.q = q.data, args.kv = cache.data, args.page_bytes = p.page_bytes;
  args.softmax_scale = kScale, args.kv_scale = c.format == LatentFormat::kF8E4M3 ? p.kv_scale : 1;
  args.out = out.data, args.lse = lse.data;
  must(mla_decode_prepare());
  ends.push_back(p.first_row.back());
  for (const int end : ends) {
    batch.row_end = end;
    must(mla_plan(config, batch, workspace.data, nullptr));
    must(mla_decode(config, batch, args, workspace.data, nullptr));
    batch.row_begin = end;
  }
  must(cudaDeviceSynchronize());
  return {download(out), download(lse)};
}

void check_row(const Problem& p, const Answer& answer, int row) {
  std::vector<double> want(kMlaLatent);
  const double lse = p.reference(row, want.data());
  double error = 0, norm = 0, largest = 0, worst = 0;
  for (int j = 0; j < kMlaLatent; ++j) {
    const double got = bf16_value(answer.out[static_cast<size_t>(row) * kMlaLatent + j]);
    ASSERT_TRUE(std::isfinite(got)) << "row " << row << " column " << j;
    error += (got - want[j]) * (got - want[j]), norm += want[j] * want[j];
    largest = std::max(largest, std::fabs(want[j])), worst = std::max(worst, std::fabs(got - want[j]));
  }
  // Weights and outputs are rounded to 8 bits: 2^-9 each, independent; 6e-3 is about twice their sum in quadrature.
  EXPECT_LE(std::sqrt(error), 6e-3 * std::sqrt(norm)) << "row " << row;
  EXPECT_LE(worst, 1.2e-2 * largest) << "row " << row;
  if (std::isinf(lse)) {
    EXPECT_EQ(answer.lse[row], -INFINITY) << "row " << row;
    EXPECT_EQ(largest, 0);
  } else {
    EXPECT_NEAR(answer.lse[row], lse, 2e-3) << "row " << row;
  }
}

void check(const Case& c, uint64_t seed, int checked_rows = 192) {
  const Problem p(c, seed);
  const int rows = p.first_row.back() * c.heads, step = std::max(1, rows / (gpu_sanitizer() ? 24 : checked_rows));
  for (const MlaLists lists : {MlaLists::kBalanced, MlaLists::kFixed}) {
    const Answer answer = run(p, lists);
    if (testing::Test::HasFatalFailure()) return;
    SCOPED_TRACE(config_of(p, lists).name() + ", heads " + std::to_string(c.heads));
    for (int row = 0; row < rows; row += step) check_row(p, answer, row);
    check_row(p, answer, rows - 1);
  }
}

std::vector<Sequence> odd_lengths(int query) {
  std::vector<Sequence> out;
  for (const int length : {1, 63, 64, 65, 31, 32, 33, 127, 128, 129, 700, 1025}) {
    if (length >= query) out.push_back({length, query});
  }
  return out;
}

TEST(CudaMlaConfig, ChoiceIsPure) {
  MlaDecodeShape shape;
  shape.heads = 8, shape.max_sequences = 1, shape.max_tokens = 1, shape.multiprocessors = 132;
  shape.compute_capability = 90;
  EXPECT_EQ(mla_decode_config(shape).name(), "mla_decode mma16 bf16 balanced, 264 slots");
  shape.heads = 64;
  EXPECT_EQ(mla_decode_config(shape).kernel, MlaKernel::kWgmma64);
  shape.compute_capability = 120;
  EXPECT_EQ(mla_decode_config(shape).kernel, MlaKernel::kMma32);
}

TEST(CudaMlaConfig, PiecesAreAtFixedPlaces) {
  EXPECT_EQ(mla_pieces(0), 0);
  for (int blocks = 1, piece = 0; blocks <= 16384; ++blocks) {
    if (blocks - 1 == mla_piece_begin(piece + 1)) ++piece;
    ASSERT_EQ(mla_pieces(blocks), piece + 1) << blocks;
    ASSERT_LE(mla_piece_begin(piece + 1) - mla_piece_begin(piece), kMlaPieceBlocks + mla_piece_begin(piece) / 8);
  }
  EXPECT_EQ(mla_piece_begin(1) * kMlaBlock, 512);
  EXPECT_EQ(mla_piece_begin(8) * kMlaBlock, 4096);
  EXPECT_EQ(mla_piece_begin(9) * kMlaBlock, 5120);
  EXPECT_EQ(mla_pieces(16384), 65);
}

TEST(CudaMlaConfig, FixedListsHaveOneKernel) {
  MlaDecodeShape shape;
  shape.heads = 8, shape.max_sequences = 1, shape.max_tokens = 1, shape.multiprocessors = 132;
  shape.max_pieces = 100, shape.lists = MlaLists::kFixed;
  for (const int capability : {80, 90}) {
    shape.compute_capability = capability, shape.max_query = 1;
    const MlaDecodeConfig one = mla_decode_config(shape);
    EXPECT_EQ(one.kernel, capability == 90 ? MlaKernel::kWgmma64 : MlaKernel::kMma32);
    shape.max_query = 1000;
    const MlaDecodeConfig many = mla_decode_config(shape);
    EXPECT_TRUE(many.kernel == one.kernel && many.rows == one.rows);
  }
}

class CudaMla : public testing::TestWithParam<std::tuple<LatentFormat, bool>> {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
    const auto [format, portable] = GetParam();
    if (format == LatentFormat::kF8Tiles && compute_capability(portable) != 90) GTEST_SKIP() << "no kernel of its own";
  }
  Case make(int heads, std::vector<Sequence> sequences) const {
    Case c;
    c.heads = heads, c.sequences = std::move(sequences);
    c.format = std::get<0>(GetParam()), c.force_portable = std::get<1>(GetParam());
    return c;
  }
};

TEST_P(CudaMla, OddLengths) {
  for (const int heads : few_if_gpu_sanitizer<int>({1, 8, 16, 20, 32, 64, 128}, {20, 64}))
    check(make(heads, odd_lengths(1)), heads);
}

TEST_P(CudaMla, SeveralQueriesAreCausal) {
  for (const int query : few_if_gpu_sanitizer<int>({2, 3, 4, 8}, {3})) {
    check(make(8, odd_lengths(query)), 100 + query);
    check(make(16, odd_lengths(query)), 200 + query);
  }
  check(make(8, {{5, 5}, {300, 1}, {64, 8}, {513, 3}}), 7);
}

// Row tiles of 16, 32 and 64 that are full, that end within a token's heads, that hold one row.
TEST_P(CudaMla, AnyHeadsOfAnyQuery) {
  for (const int heads : few_if_gpu_sanitizer<int>({1, 20, 64, 128}, {20}))
    for (const int query : few_if_gpu_sanitizer<int>({2, 5, 8}, {5}))
      check(make(heads, {{query, query}, {64, query}, {129, query}, {700, query}}), 300 + heads + query);
}

TEST_P(CudaMla, LongSequenceIsCut) {
  const int part = gpu_sanitizer() ? 8 : 1;
  check(make(8, {{20000 / part, 1}}), 1);
  check(make(64, {{9000 / part, 1}, {70, 1}}), 2);
  check(make(16, {{5000 / part, 4}, {1, 1}, {2500 / part, 2}}), 3);
}

// A score exceeds the base of its row's weights again and again, so what was summed is scaled down each time.
TEST_P(CudaMla, ScoresClimb) {
  for (const int heads : few_if_gpu_sanitizer<int>({8, 16, 64, 128}, {64})) {
    Case c = make(heads, {{700, 1}, {300, 4}, {129, 2}, {64, 1}});
    c.climb = 8;
    check(c, 41);
  }
}

// Each row tile in as many equal pieces; of short sequences fewer pieces have a block, and of one block there is one.
TEST_P(CudaMla, EvenPieces) {
  if (gpu_sanitizer()) return;  // the kernels of the cases around it
  check(make(64, {{2560, 4}, {2500, 4}, {320, 4}, {2431, 3}, {2560, 4}, {2550, 4}, {40, 4}, {2560, 4}}), 31, 48);
}

TEST_P(CudaMla, RanksHoldSomeBlocks) {
  for (const int heads : few_if_gpu_sanitizer<int>({16, 64}, {16}))
    for (int rank = 0; rank < 3; ++rank) {
      Case c = make(heads, {{1, 1}, {64, 2}, {65, 2}, {190, 4}, {1000, 4}, {130, 8}});
      c.ranks = 3, c.rank = rank;
      check(c, 11 + rank);
    }
}

TEST_P(CudaMla, PaddedBatch) {
  Case c = make(8, {{100, 1}, {200, 2}});
  c.spare_sequences = 5;
  check(c, 17);
}

TEST_P(CudaMla, ManySequences) {
  std::vector<Sequence> sequences;
  Rng rng(5);
  for (int i = 0; i < (gpu_sanitizer() ? 24 : 300); ++i)
    sequences.push_back({static_cast<int>(1 + rng.below(i % 50 == 0 ? 3000 : 200)), 1});
  check(make(8, sequences), 21);
}

TEST_P(CudaMla, ManyQueriesExtend) {
  check(make(16, {{gpu_sanitizer() ? 130 : 500, 40}, {90, 90}, {1200, 7}}), 23);
  if (!gpu_sanitizer()) check(make(16, {{900, 170}, {333, 1}}), 24);  // the most that is not expanded
}

TEST_P(CudaMla, ExtendOnManyCachedTokens) {
  if (gpu_sanitizer()) return;  // the kernels of the cases above
  for (const int heads : {16, 64}) check(make(heads, {{20000 + 37, 37}, {70, 3}}), 25 + heads, 24);
}

// Tokens [length - query, length) of a sequence of a world.
struct Part {
  int sequence, length, query;
};

// Sequences whose queries and keys do not depend on the batch that they are read through.
class World {
 public:
  World(const Case& c, uint64_t seed) : all_(c, seed), queries_(509 * kMlaWidth) {
    for (uint16_t& x : queries_) x = bf16_bits(all_.gauss());
    all_.keys.clear(), all_.q.clear();  // no reference here
  }

  // Outputs and log-sum-exps of parts [first, last), as bits, token by token.
  std::vector<uint16_t> bits(const std::vector<Part>& parts, size_t first, size_t last,
                             std::vector<int> ends = {}) const {
    Problem p = all_;
    p.test.sequences.clear(), p.lengths.clear(), p.table.clear(), p.first_row = {0};
    for (const Part& part : parts) {
      p.test.sequences.push_back({part.length, part.query});
      p.lengths.push_back(part.length), p.first_row.push_back(p.first_row.back() + part.query);
      const auto pages = all_.table.begin() + part.sequence * p.table_width;
      p.table.insert(p.table.end(), pages, pages + p.table_width);
      for (int token = part.length - part.query; token < part.length; ++token) add_queries(p, part.sequence, token);
    }
    const Answer answer = run(p, MlaLists::kFixed, std::move(ends));
    std::vector<uint16_t> out;
    for (int row = p.first_row[first] * heads(); row < p.first_row[last] * heads(); ++row) {
      const auto from = answer.out.begin() + static_cast<ptrdiff_t>(row) * kMlaLatent;
      out.insert(out.end(), from, from + kMlaLatent);
      const auto lse = std::bit_cast<std::array<uint16_t, 2>>(answer.lse[row]);
      out.insert(out.end(), lse.begin(), lse.end());
    }
    return out;
  }
  int heads() const { return all_.test.heads; }
  size_t token_bits() const { return static_cast<size_t>(heads()) * (kMlaLatent + 2); }

 private:
  void add_queries(Problem& p, int sequence, int token) const {
    for (int head = 0; head < heads(); ++head) {
      const auto from = queries_.begin() + (token * 31 + head * 7 + sequence) % 509 * kMlaWidth;
      p.q.insert(p.q.end(), from, from + kMlaWidth);
    }
  }

  Problem all_;
  std::vector<uint16_t> queries_;
};

// The first sequence's bits at tokens [begin, end) by decode, up to 64 at once.
std::vector<uint16_t> decoded(const World& world, int begin, int end) {
  std::vector<uint16_t> out;
  for (int first = begin; first < end; first += 64) {
    std::vector<Part> parts;
    for (int token = first; token < std::min(first + 64, end); ++token) parts.push_back({0, token + 1, 1});
    const std::vector<uint16_t> some = world.bits(parts, 0, parts.size());
    out.insert(out.end(), some.begin(), some.end());
  }
  return out;
}

// The last `query` tokens of those decoded, run as one chunk: alone, after 140 other sequences, in several launches.
void expect_as_decoded(const World& world, const std::vector<uint16_t>& all, int end, int query) {
  const std::vector<uint16_t> want(all.end() - static_cast<ptrdiff_t>(query * world.token_bits()), all.end());
  std::vector<Part> parts{{0, end, query}};
  const auto expect = [&](const std::vector<uint16_t>& got, const char* how) {
    ASSERT_EQ(got.size(), want.size());
    const auto differs = std::mismatch(got.begin(), got.end(), want.begin()).first - got.begin();
    ASSERT_EQ(differs, std::ssize(want)) << world.heads() << " heads, " << query << " tokens that end at " << end
                                         << ", " << how << ": token " << differs / world.token_bits();
  };
  expect(world.bits(parts, 0, 1), "alone");
  expect(world.bits(parts, 0, 1, {query / 3, query / 2 + 1}), "in three launches");
  for (int i = 0; i < 140; ++i) parts.push_back({1 + i % 5, 60 + i * 37 % 700, 1 + i % 19 / 6});
  std::rotate(parts.begin(), parts.begin() + 1, parts.end());
  expect(world.bits(parts, 140, 141), "after others");
}

TEST_P(CudaMla, FixedListsDoNotDependOnTheBatch) {
  for (const int heads : few_if_gpu_sanitizer<int>({8, 16, 64, 128}, {16})) {
    const Case c = make(heads, {{4500, 1}, {760, 1}, {760, 1}, {760, 1}, {760, 1}, {760, 1}});
    const World world(c, 31 + heads);
    for (const int end : few_if_gpu_sanitizer<int>({65, 515, 1100, 4500}, {515})) {
      const std::vector<uint16_t> all = decoded(world, std::max(0, end - 512), end);
      for (const int query : few_if_gpu_sanitizer<int>({1, 2, 5, 8, 37, 170, 512}, {5}))
        if (query <= end) {
          ASSERT_NO_FATAL_FAILURE(expect_as_decoded(world, all, end, query));
        }
    }
  }
}

// Records have no portable kernel of their own.
INSTANTIATE_TEST_SUITE_P(Kinds, CudaMla,
                         testing::Values(std::tuple(LatentFormat::kBF16, false), std::tuple(LatentFormat::kBF16, true),
                                         std::tuple(LatentFormat::kF8E4M3, false),
                                         std::tuple(LatentFormat::kF8E4M3, true),
                                         std::tuple(LatentFormat::kF8Tiles, false)),
                         [](const auto& info) {
                           return std::string(latent_format_name(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_portable" : "");
                         });

}  // namespace
}  // namespace perigee
