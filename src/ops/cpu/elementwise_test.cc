#include "ops/cpu/elementwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "ops/cpu/test_isa.h"

namespace perigee {
namespace {

class ElementwiseTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (const std::string why = why_not_on(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
  CpuContext cpu(ThreadPool& pool) { return {pool, arena_, scratch_, GetParam()}; }
  Tensor random(DType dtype, int64_t rows, int64_t cols, int64_t stride, uint64_t seed) {
    Tensor t = arena_.tensor(dtype, rows, stride);
    for (int64_t i = 0; i < rows * stride; ++i) {
      const float v = 6.0f * random_unit(seed, static_cast<uint64_t>(i)) - 3.0f;
      if (dtype == DType::kF32) {
        static_cast<float*>(t.data)[i] = v;
      } else {
        static_cast<uint16_t*>(t.data)[i] = f32_to_bf16(v);
      }
    }
    t.cols = cols;
    return t;
  }
  Tensor norm(ThreadPool& pool, const Tensor& x, const std::vector<float>& weight, float eps) {
    const Tensor y = arena_.tensor(DType::kBF16, x.rows, x.cols);
    cpu::rms_norm(cpu(pool), x, weight, eps, y);
    return y;
  }
  static float at(const Tensor& t, int64_t r, int64_t c) {
    return t.dtype == DType::kF32 ? t.row<float>(r)[c] : bf16_to_f32(t.row<uint16_t>(r)[c]);
  }
  ThreadPool one_{1};
  ThreadPool two_{2};
  Arena arena_, scratch_;
};

constexpr double kBf16Rounding = 1.0 / 256 + 1e-6;  // half an ulp, relative: 2^-9; twice that allowed

TEST_P(ElementwiseTest, rms_norm_is_the_formula) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t d : {1, 31, 64, 512, 1536, 7168}) {
      const Tensor x = random(dtype, 3, d, d + 5, 1);
      std::vector<float> w(static_cast<size_t>(d));
      for (size_t i = 0; i < w.size(); ++i) w[i] = random_unit(9, i);
      const Tensor y = norm(one_, x, w, 1e-6f);
      for (int64_t r = 0; r < 3; ++r) {
        double sum = 0;
        for (int64_t i = 0; i < d; ++i) sum += std::pow(at(x, r, i), 2);
        const double scale = 1 / std::sqrt(sum / static_cast<double>(d) + 1e-6);
        for (int64_t i = 0; i < d; ++i) {
          const double want = at(x, r, i) * scale * w[static_cast<size_t>(i)];
          ASSERT_NEAR(at(y, r, i), want, std::abs(want) * kBf16Rounding) << d << " " << r << " " << i;
        }
      }
    }
  }
}

TEST_P(ElementwiseTest, rows_do_not_depend_on_batch_or_threads) {
  const Tensor x = random(DType::kF32, 40, 2048, 2048, 2);
  const std::vector<float> w(2048, 1.0f);
  const Tensor all = norm(two_, x, w, 1e-5f);
  const Tensor act = cpu::silu_mul(cpu(two_), x);
  for (int64_t r = 0; r < 40; ++r) {
    const Tensor one = norm(one_, x.row_range(r, 1), w, 1e-5f);
    ASSERT_EQ(std::memcmp(one.data, all.row<uint16_t>(r), 2048 * 2), 0);
    const Tensor one_act = cpu::silu_mul(cpu(one_), x.row_range(r, 1));
    ASSERT_EQ(std::memcmp(one_act.data, act.row<uint16_t>(r), 1024 * 2), 0);
  }
}

TEST_P(ElementwiseTest, silu_mul_over_the_whole_range) {
  Tensor x = random(DType::kF32, 1, 2002, 2002, 3);
  for (int64_t i = 0; i < 1001; ++i) x.row<float>(0)[i] = static_cast<float>(i - 500) * 0.25f;
  const Tensor y = cpu::silu_mul(cpu(one_), x);
  for (int64_t i = 0; i < 1001; ++i) {
    const double g = x.row<float>(0)[i];
    const double want = g / (1 + std::exp(-g)) * x.row<float>(0)[1001 + i];
    ASSERT_NEAR(at(y, 0, i), want, std::abs(want) * kBf16Rounding + 1e-30) << g;
  }
}

TEST_P(ElementwiseTest, add_leaves_columns_outside_the_view) {
  const Tensor x = random(DType::kF32, 5, 33, 40, 4);
  const Tensor y = random(DType::kF32, 5, 33, 33, 5);
  const Tensor before = random(DType::kF32, 5, 33, 40, 4);
  cpu::add(cpu(one_), x, y);
  for (int64_t r = 0; r < 5; ++r) {
    for (int64_t c = 0; c < 40; ++c) {
      const float want = before.row<float>(r)[c] + (c < 33 ? y.row<float>(r)[c] : 0.0f);
      ASSERT_EQ(x.row<float>(r)[c], want);
    }
  }
}

TEST_P(ElementwiseTest, rope_turns_interleaved_pairs_of_a_strided_view) {
  constexpr int64_t kHeads = 3, kHead = 48, kBegin = 16, kPairs = 16;
  Rope rope;
  std::vector<float> inv_freq;
  for (int i = 0; i < kPairs; ++i) inv_freq.push_back(std::pow(50000.0f, -static_cast<float>(i) / kPairs));
  rope.inv_freq = std::move(inv_freq);
  rope.cos_sin_factor = 1.25f;
  std::vector<int32_t> positions;
  for (int i = 0; i < 20; ++i) positions.push_back(i * 6553);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor x = random(dtype, 20, kHeads * kHead, 160, 6);
    const Tensor before = random(dtype, 20, kHeads * kHead, 160, 6);
    cpu::rope(cpu(two_), x, kHead, kBegin, positions, rope);
    for (int64_t r = 0; r < 20; ++r) {
      for (int64_t c = 0; c < 160; ++c) {
        const int64_t in_head = c % kHead - kBegin;
        double want = at(before, r, c);
        if (c < kHeads * kHead && in_head >= 0 && in_head < 2 * kPairs) {
          const auto pair = static_cast<size_t>(in_head / 2);
          const float angle = static_cast<float>(positions[static_cast<size_t>(r)]) * rope.inv_freq[pair];
          const double cos = 1.25 * std::cos(angle), sin = 1.25 * std::sin(angle);
          const double other = at(before, r, c ^ 1);
          want = in_head % 2 == 0 ? want * cos - other * sin : want * cos + other * sin;
        }
        const double bound = dtype == DType::kF32 ? 4e-6 : 5.4 / 256;
        ASSERT_NEAR(at(x, r, c), want, bound) << r << " " << c;
      }
    }
  }
}

TEST_P(ElementwiseTest, disabled_rope_changes_nothing) {
  const Tensor x = random(DType::kF32, 2, 64, 64, 7);
  const Tensor before = random(DType::kF32, 2, 64, 64, 7);
  const std::vector<int32_t> positions = {5, 6};
  cpu::rope(cpu(one_), x, 64, 0, positions, {.enabled = false, .inv_freq = {1.0f}});
  EXPECT_EQ(std::memcmp(x.data, before.data, 2 * 64 * sizeof(float)), 0);
}

TEST_P(ElementwiseTest, write_latent_touches_its_slots_only) {
  constexpr int64_t kRow = 40;
  std::vector<uint16_t> pool(4 * 64 * kRow, 0x7FC0);
  const LatentLayer cache{
      .base = reinterpret_cast<uint8_t*>(pool.data()), .page_bytes = 64 * kRow * 2, .row_bytes = kRow * 2};
  const int32_t pages_a[] = {3, 1}, pages_b[] = {2};
  const SequenceRows sequences[] = {{.first_row = 0, .num_tokens = 4, .position = 62, .pages = pages_a},
                                    {.first_row = 4, .num_tokens = 1, .position = 0, .pages = pages_b}};
  const Tensor c = random(DType::kBF16, 5, 32, 32, 8);
  const Tensor k = random(DType::kF32, 5, 8, 64, 9);
  Batch batch;
  batch.sequences = sequences;
  cpu::write_latent(cpu(one_), c, k, batch, cache);
  const int64_t slots[] = {3 * 64 + 62, 3 * 64 + 63, 64, 65, 128};
  int64_t written = 0;
  for (int64_t r = 0; r < 5; ++r) {
    for (int64_t i = 0; i < kRow; ++i, ++written) {
      const uint16_t want = i < 32 ? c.row<uint16_t>(r)[i] : f32_to_bf16(k.row<float>(r)[i - 32]);
      ASSERT_EQ(pool[static_cast<size_t>(slots[r] * kRow + i)], want);
    }
  }
  EXPECT_EQ(std::count(pool.begin(), pool.end(), 0x7FC0), 4 * 64 * kRow - written);
}

TEST_P(ElementwiseTest, an_e4m3_cache_holds_numbers_over_its_scale) {
  std::vector<uint8_t> pool(64 * 40);
  const LatentLayer cache{
      .base = pool.data(), .page_bytes = 64 * 40, .row_bytes = 40, .format = LatentFormat::kF8E4M3, .scale = 0.125f};
  const int32_t page = 0;
  const SequenceRows sequence{.first_row = 0, .num_tokens = 3, .position = 1, .pages = &page};
  const Tensor c = random(DType::kBF16, 3, 32, 32, 8);
  const Tensor k = random(DType::kF32, 3, 8, 64, 9);
  Batch batch;
  batch.sequences = {&sequence, 1};
  cpu::write_latent(cpu(one_), c, k, batch, cache);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t i = 0; i < 40; ++i) {
      const double want = i < 32 ? at(c, r, i) : at(k, r, i - 32);
      const double bound = 1.1 * (std::abs(want) / 16 + 0.125 / 1024);  // half a step of 3 bits, or of the smallest
      ASSERT_NEAR(0.125 * f8e4m3_to_f32(pool[static_cast<size_t>((1 + r) * 40 + i)]), want, bound) << r << " " << i;
    }
}

TEST_P(ElementwiseTest, embed_and_gather) {
  const Tensor raw = random(DType::kBF16, 7, 24, 24, 10);
  const EmbedWeight table = cpu::pack_embed({.format = WeightFormat::kBF16, .out = 7, .in = 24, .data = raw.data});
  const std::vector<int32_t> ids = {6, 0, 6};
  const Tensor x = cpu::embed(cpu(one_), table, ids);
  const std::vector<int32_t> rows = {2, 1};
  const Tensor g = cpu::gather_rows(cpu(one_), x.columns(3, 9), rows);
  ASSERT_EQ(x.rows, 3);
  for (int64_t c = 0; c < 24; ++c) EXPECT_EQ(at(x, 2, c), at(raw, 6, c));
  for (int64_t c = 0; c < 9; ++c) EXPECT_EQ(at(g, 1, c), at(raw, 0, c + 3));
}

INSTANTIATE_TEST_SUITE_P(Isa, ElementwiseTest, testing::Values(Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return isa_name(info.param); });

}  // namespace
}  // namespace perigee
