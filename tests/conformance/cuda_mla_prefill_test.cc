// The expanded form of MLA and the fused cache write on CUDA, against plain loops in f64 over the same rounded inputs;
// outputs poisoned with NaN before.
#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"
#include "cuda_arrays.h"
#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/mla/mla_prefill.h"
#include "ops/cuda/mla/mla_write.h"

namespace perigee {
namespace {

float noise(Rng& rng) {
  return 3.4f * (random_unit(rng.next(), 0) - 0.5f);
}

std::vector<uint16_t> noise_bf16(Rng& rng, size_t n) {
  std::vector<uint16_t> out(n);
  for (uint16_t& x : out) x = bf16_bits(noise(rng));
  return out;
}

struct Sequence {
  int context;  // cached tokens, seen by every query
  int query;
};

// Per sequence: keys of its context, then of its new tokens.
struct Prefill {
  Prefill(int heads_in, int nope_in, int value_in, std::vector<Sequence> list, uint64_t seed)
      : heads(heads_in), nope(nope_in), value(value_in), sequences(std::move(list)), rng(seed) {
    first_query = {0}, first_key = {0};
    for (const Sequence& s : sequences) {
      first_query.push_back(first_query.back() + s.query);
      first_key.push_back(first_key.back() + s.context + s.query);
    }
    q = noise_bf16(rng, static_cast<size_t>(first_query.back()) * heads * (nope + 64));
    up = noise_bf16(rng, static_cast<size_t>(first_key.back()) * heads * (nope + value));
    rope = noise_bf16(rng, static_cast<size_t>(first_key.back()) * 64);
  }

  double reference(size_t s, int row, int head, std::vector<double>& out) const {
    const uint16_t* query = &q[(static_cast<size_t>(first_query[s] + row) * heads + head) * (nope + 64)];
    const int seen = sequences[s].context + row + 1;
    std::vector<double> score(seen);
    double largest = -INFINITY, sum = 0;
    for (int j = 0; j < seen; ++j) {
      const uint16_t* key = &up[(static_cast<size_t>(first_key[s] + j) * heads + head) * (nope + value)];
      for (int d = 0; d < nope; ++d) score[j] += static_cast<double>(bf16_value(query[d])) * bf16_value(key[d]);
      for (int d = 0; d < 64; ++d) {
        score[j] += static_cast<double>(bf16_value(query[nope + d])) *
                    bf16_value(rope[static_cast<size_t>(first_key[s] + j) * 64 + d]);
      }
      score[j] *= scale;
      largest = std::max(largest, score[j]);
    }
    for (double& x : score) sum += x = std::exp(x - largest);
    out.assign(value, 0.0);
    for (int j = 0; j < seen; ++j) {
      const uint16_t* v = &up[(static_cast<size_t>(first_key[s] + j) * heads + head) * (nope + value) + nope];
      for (int d = 0; d < value; ++d) out[d] += score[j] / sum * bf16_value(v[d]);
    }
    return largest + std::log(sum);
  }

  MlaPrefillArgs args(int max_query) const {
    MlaPrefillArgs a;
    a.heads = heads, a.nope = nope, a.value = value, a.sequences = static_cast<int>(sequences.size());
    a.max_query = max_query, a.softmax_scale = scale;
    a.keys = first_key.back();
    return a;
  }

  int heads, nope, value;
  float scale = 0.06f;
  std::vector<Sequence> sequences;
  Rng rng;
  std::vector<int32_t> first_query, first_key;
  std::vector<uint16_t> q, up, rope;
};

void compare(const Prefill& p, const std::vector<uint16_t>& out, const std::vector<float>& lse) {
  std::vector<double> want;
  for (size_t s = 0; s < p.sequences.size(); ++s) {
    const int step = std::max(1, p.sequences[s].query / 12);
    for (int row = 0; row < p.sequences[s].query; row += row + step < p.sequences[s].query ? step : 1) {
      for (int head = 0; head < p.heads; ++head) {
        const double want_lse = p.reference(s, row, head, want);
        const size_t flat = static_cast<size_t>(p.first_query[s] + row) * p.heads + head;
        double error = 0, norm = 0;
        for (int d = 0; d < p.value; ++d) {
          const double got = bf16_value(out[flat * p.value + d]);
          error += (got - want[d]) * (got - want[d]), norm += want[d] * want[d];
        }
        ASSERT_LE(std::sqrt(error), 6e-3 * std::sqrt(norm)) << "sequence " << s << " row " << row << " head " << head;
        ASSERT_NEAR(lse[flat], want_lse, 2e-3) << "sequence " << s << " row " << row << " head " << head;
      }
    }
  }
}

PrefillKernel kernel_of(const Prefill& p, bool portable) {
  return choose_mla_prefill(p.nope, p.value, compute_capability(portable));
}

void check_whole(const Prefill& p, bool portable = false) {
  Device q(p.q), up(p.up), rope(p.rope);
  Device first_query(p.first_query), first_key(p.first_key);
  const size_t rows = static_cast<size_t>(p.first_query.back()) * p.heads;
  Device out(std::vector<uint16_t>(rows * p.value, 0x7FFF));
  Device lse(std::vector<float>(rows, NAN));
  int longest = 0;
  for (const Sequence& s : p.sequences) longest = std::max(longest, s.query);
  MlaPrefillArgs a = p.args(longest + 70);
  a.first_query = first_query.data, a.first_key = first_key.data;
  a.q = q.data, a.up = up.data, a.k_rope = rope.data, a.out = out.data, a.lse = lse.data;
  must(mla_prefill_prepare());
  must(mla_prefill(kernel_of(p, portable), a, nullptr));
  must(cudaDeviceSynchronize());
  compare(p, download(out), download(lse));
}

class NeedsGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
  }
};
using CudaMlaPrefill = NeedsGpu;
using CudaMlaWrite = NeedsGpu;

const std::vector<Sequence> kOdd = {{0, 1},    {0, 63},  {0, 64},    {5, 65}, {200, 1},
                                    {64, 128}, {1, 129}, {130, 257}, {0, 300}};

TEST_F(CudaMlaPrefill, Heads192) {
  check_whole(Prefill(3, 128, 128, kOdd, 1));
}
TEST_F(CudaMlaPrefill, Heads192Portable) {
  check_whole(Prefill(3, 128, 128, kOdd, 1), true);
}
TEST_F(CudaMlaPrefill, Heads256) {
  check_whole(Prefill(2, 192, 256, kOdd, 2));
}
TEST_F(CudaMlaPrefill, Heads256Portable) {
  check_whole(Prefill(2, 192, 256, kOdd, 2), true);
}

// One sequence, its keys in three pieces that are joined. Where the last begins after the first new token, the first
// queries see nothing of it: its offset is below zero.
void check_pieces(int nope, int value, bool portable, const std::vector<int>& cuts) {
  constexpr int kContext = 300, kQueries = 90;
  const Prefill p(2, nope, value, {{kContext, kQueries}}, 3);
  Device q(p.q), up(p.up), rope(p.rope);
  const size_t rows = static_cast<size_t>(p.first_query.back()) * p.heads;
  Device out(std::vector<uint16_t>(rows * p.value, 0x7FFF));
  Device lse(std::vector<float>(rows, NAN)), sums(std::vector<float>(rows * p.value, NAN));
  Device first_query(p.first_query);
  must(mla_prefill_prepare());
  for (int piece = 0; piece < 3; ++piece) {
    const int keys = cuts[piece + 1] - cuts[piece];
    const bool earlier = cuts[piece + 1] <= kContext;
    Device first_key(std::vector<int32_t>{0, keys});
    Device offset(std::vector<int32_t>{earlier ? 1 << 30 : kContext - cuts[piece]});
    MlaPrefillArgs a = p.args(kQueries);
    a.keys = p.first_key.back() - cuts[piece];
    a.first_query = first_query.data, a.first_key = first_key.data, a.offset = offset.data;
    a.q = q.data, a.up = up.data + static_cast<size_t>(cuts[piece]) * p.heads * (p.nope + p.value);
    a.k_rope = rope.data + cuts[piece] * 64, a.join = piece > 0, a.out_f32 = sums.data, a.lse = lse.data;
    a.out = piece == 2 ? out.data : nullptr;
    must(mla_prefill(kernel_of(p, portable), a, nullptr));
    must(cudaDeviceSynchronize());
  }
  compare(p, download(out), download(lse));
}

void check_cuts(bool portable) {
  const std::vector<std::vector<int>> all = {{0, 64, 300, 390}, {0, 64, 330, 390}, {0, 310, 389, 390}};
  for (const std::vector<int>& cuts : all) {
    SCOPED_TRACE(testing::PrintToString(cuts));
    check_pieces(128, 128, portable, cuts);
    check_pieces(192, 256, portable, cuts);
  }
}

TEST_F(CudaMlaPrefill, PiecesJoin) {
  check_cuts(false);
}
TEST_F(CudaMlaPrefill, PiecesJoinPortable) {
  check_cuts(true);
}

struct Write {
  LatentFormat format;
  bool rope;
};

// A column of a cached row, of which `written` learns the bytes.
double cached_number(LatentFormat format, const uint8_t* row, int column, float kv_scale, std::vector<bool>& written,
                     size_t row_at) {
  const LatentTiles tiles(row, kMlaLatent);
  const auto mark = [&](const uint8_t* first, int bytes) {
    for (int i = 0; i < bytes; ++i) written[row_at + static_cast<size_t>(first - row) + i] = true;
    return first;
  };
  const bool tiled = format == LatentFormat::kF8Tiles;
  if (format == LatentFormat::kBF16 || (tiled && column >= kMlaLatent)) {
    uint16_t bits;
    std::memcpy(&bits, mark(tiled ? tiles.k_rope + 2 * (column - kMlaLatent) : row + 2 * column, 2), 2);
    return bf16_value(bits);
  }
  if (tiled) std::memcpy(&kv_scale, mark(tiles.scales + column / kLatentTile * 4, 4), 4);
  return e4m3_value(*mark(row + column, 1)) * kv_scale;
}

void check_write(const Write& test) {
  constexpr int kTokens = 5, kHeads = 19, kNope = 128, kStride = 640;
  Rng rng(9);
  std::vector<float> kv(kTokens * kStride), norm(kMlaLatent), inv_freq(32);
  for (float& x : kv) x = noise(rng);
  for (float& x : norm) x = 1 + 0.2f * noise(rng);
  for (int i = 0; i < 32; ++i) inv_freq[i] = std::pow(10000.0f, -i / 32.0f);
  const std::vector<int32_t> positions = {0, 63, 64, 1000, 70001}, pages = {2, 0, 3, -1, 1};
  const std::vector<uint16_t> q = noise_bf16(rng, kTokens * kHeads * (kNope + 64));
  const int64_t row_bytes = latent_row_bytes(test.format, kMlaLatent, kMlaWidth - kMlaLatent);
  const int64_t page_bytes = 64 * row_bytes + 128;
  const float kv_scale = 0.02f, eps = 1e-6f, factor = 1.3f;
  Device d_kv(kv), d_norm(norm), d_freq(inv_freq);
  Device d_positions(positions), d_pages(pages);
  Device d_q(q);
  Device cache(std::vector<uint8_t>(4 * page_bytes, 0xEE));
  MlaWriteArgs a;
  a.tokens = kTokens, a.heads = kHeads, a.nope = kNope, a.kv = d_kv.data, a.kv_stride = kStride, a.norm = d_norm.data;
  a.eps = eps, a.q = d_q.data, a.positions = d_positions.data, a.pages = d_pages.data, a.cache = cache.data;
  a.page_bytes = page_bytes, a.format = test.format;
  a.kv_scale = test.format == LatentFormat::kF8E4M3 ? kv_scale : 1, a.cos_sin_factor = factor;
  a.inv_freq = test.rope ? d_freq.data : nullptr;
  must(mla_write(a, nullptr));
  must(cudaDeviceSynchronize());
  const std::vector<uint16_t> got_q = download(d_q);
  const std::vector<uint8_t> got = download(cache);
  std::vector<bool> written(got.size());
  const auto rotated = [&](const double* x, int token, int column) {
    if (!test.rope) return x[column];
    const float angle = static_cast<float>(positions[token]) * inv_freq[column / 2];
    const double c = std::cos(static_cast<double>(angle)) * factor, s = std::sin(static_cast<double>(angle)) * factor;
    const double first = x[column & ~1], second = x[column | 1];
    return column % 2 == 0 ? first * c - second * s : first * s + second * c;
  };
  for (int token = 0; token < kTokens; ++token) {
    for (int head = 0; head < kHeads; ++head) {
      const size_t at = (static_cast<size_t>(token) * kHeads + head) * (kNope + 64);
      double x[64];
      for (int d = 0; d < 64; ++d) x[d] = bf16_value(q[at + kNope + d]);
      for (int d = 0; d < kNope; ++d) ASSERT_EQ(got_q[at + d], q[at + d]);
      for (int d = 0; d < 64; ++d)
        ASSERT_NEAR(bf16_value(got_q[at + kNope + d]), rotated(x, token, d), 0.012) << token << " " << head << " " << d;
    }
    if (pages[token] < 0) continue;
    double square = 0, rope[64];
    for (int d = 0; d < kMlaLatent; ++d)
      square += static_cast<double>(kv[token * kStride + d]) * kv[token * kStride + d];
    for (int d = 0; d < 64; ++d) rope[d] = kv[token * kStride + kMlaLatent + d];
    const double inverse = 1 / std::sqrt(square / kMlaLatent + eps);
    const size_t row = pages[token] * page_bytes + positions[token] % 64 * row_bytes;
    for (int d = 0; d < kMlaWidth; ++d) {
      const double want =
          d < kMlaLatent ? kv[token * kStride + d] * inverse * norm[d] : rotated(rope, token, d - kMlaLatent);
      const double value = cached_number(test.format, &got[row], d, kv_scale, written, row);
      const bool fp8 =
          test.format == LatentFormat::kF8E4M3 || (test.format == LatentFormat::kF8Tiles && d < kMlaLatent);
      // e4m3: half a unit of three bits of mantissa; bf16: of seven.
      ASSERT_NEAR(value, want, std::fabs(want) * (fp8 ? 0.0626 : 0.004) + 2e-5 + (fp8 ? 2e-5 : 0)) << token << " " << d;
    }
  }
  for (size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(written[i] || got[i] == 0xEE) << "byte " << i << " was touched";
}

TEST_F(CudaMlaWrite, Bf16) {
  check_write({LatentFormat::kBF16, true});
}
TEST_F(CudaMlaWrite, Fp8) {
  check_write({LatentFormat::kF8E4M3, true});
}
TEST_F(CudaMlaWrite, Records) {
  check_write({LatentFormat::kF8Tiles, true});
}
TEST_F(CudaMlaWrite, WithoutRope) {
  check_write({LatentFormat::kBF16, false});
}

}  // namespace
}  // namespace perigee
