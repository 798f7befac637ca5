#include "ops/cpu/mla_attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "base/rng.h"
#include "base/soak.h"
#include "ops/cpu/mla_kernels.h"
#include "ops/cpu/test_isa.h"

namespace perigee {
namespace {

constexpr uint16_t kPoison = 0x7FC1;  // a NaN

MlaShape shape_of(int64_t heads) {
  return {.heads = heads, .nope = 128, .rope = 64, .value = 128, .latent = 512, .softmax_scale = 0.0721687836f};
}

std::vector<float> random_f32(int64_t count, float spread, uint64_t seed) {
  std::vector<float> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = spread * (2.0f * random_unit(seed, i) - 1.0f);
  return out;
}

std::vector<uint16_t> random_bf16(int64_t count, float spread, uint64_t seed) {
  std::vector<uint16_t> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = f32_to_bf16(spread * (2.0f * random_unit(seed, i) - 1.0f));
  return out;
}

// Sequences in a page pool whose every unwritten row is NaN; pages are handed out backwards.
struct World {
  World(const MlaShape& shape_in, std::vector<int64_t> lengths_in) : shape(shape_in), lengths(std::move(lengths_in)) {
    const int64_t width = shape.latent + shape.rope;
    kv_b = random_bf16(shape.heads * (shape.nope + shape.value) * shape.latent, 0.1f, 1);
    up = cpu::pack_mla_up({.out = shape.heads * (shape.nope + shape.value), .in = shape.latent, .data = kv_b.data()},
                          shape);
    int64_t num_pages = 0;
    for (const int64_t length : lengths) num_pages += (length + 63) / 64;
    pool.assign(static_cast<size_t>(num_pages * 64 * width), kPoison);
    for (size_t s = 0; s < lengths.size(); ++s) {
      rows.push_back(random_bf16(lengths[s] * width, 1.5f, 100 + s));
      queries.push_back(random_f32(lengths[s] * query_width(), 2.0f, 200 + s));
      pages.emplace_back();
      for (int64_t b = 0; b < (lengths[s] + 63) / 64; ++b) pages[s].push_back(static_cast<int32_t>(--num_pages));
    }
    cache = {.base = reinterpret_cast<uint8_t*>(pool.data()), .page_bytes = 64 * width * 2, .row_bytes = width * 2};
  }
  int64_t query_width() const { return shape.heads * (shape.nope + shape.rope); }
  int64_t out_width() const { return shape.heads * shape.value; }
  // Slots [0, end) of sequence s hold its rows, all later ones NaN.
  void fill(size_t s, int64_t end) {
    const int64_t width = shape.latent + shape.rope;
    for (int64_t t = 0; t < static_cast<int64_t>(pages[s].size()) * 64; ++t) {
      uint16_t* row = pool.data() + (pages[s][static_cast<size_t>(t / 64)] * 64 + t % 64) * width;
      if (t < end) {
        std::copy_n(rows[s].data() + t * width, width, row);
      } else {
        std::fill_n(row, width, kPoison);
      }
    }
  }

  MlaShape shape;
  std::vector<int64_t> lengths;
  std::vector<uint16_t> kv_b, pool;
  MlaUpWeight up;
  std::vector<std::vector<uint16_t>> rows;  // per sequence [length, L + dr]
  std::vector<std::vector<float>> queries;  // per sequence [length, h * (dn + dr)]
  std::vector<std::vector<int32_t>> pages;
  LatentLayer cache;
};

struct Slice {
  size_t sequence = 0;
  int64_t position = 0;
  int64_t count = 0;
  MlaForm form = MlaForm::kAbsorbed;
};

class MlaAttendTest : public testing::TestWithParam<Isa> {
 protected:
  // Results of the runs, one after the other, [sum of counts, h * dv].
  std::vector<float> attend(World& w, const std::vector<Slice>& runs, int num_threads = 1) {
    std::vector<SequenceRows> sequences;
    std::vector<float> q;
    int32_t row = 0;
    for (const Slice& r : runs) {
      w.fill(r.sequence, r.position + r.count);
      sequences.push_back({.first_row = row,
                           .num_tokens = static_cast<int32_t>(r.count),
                           .position = static_cast<int32_t>(r.position),
                           .pages = w.pages[r.sequence].data(),
                           .form = r.form});
      const auto begin = w.queries[r.sequence].begin() + r.position * w.query_width();
      q.insert(q.end(), begin, begin + r.count * w.query_width());
      row += static_cast<int32_t>(r.count);
    }
    ThreadPool pool(num_threads);
    poison();
    arena_.reset();
    const CpuContext cpu{pool, arena_, scratch_, GetParam()};
    Batch batch;
    batch.sequences = sequences;
    const Tensor queries{
        .data = q.data(), .dtype = DType::kF32, .rows = row, .cols = w.query_width(), .row_stride = w.query_width()};
    const Tensor out = cpu::mla_attend(cpu, queries, w.up, w.shape, batch, w.cache);
    const auto* data = static_cast<const float*>(out.data);
    return {data, data + out.rows * out.cols};
  }

  // Memory that the next call is given holds NaN, so that reading what was not written shows.
  void poison() {
    for (Arena* arena : {&arena_, &scratch_}) {
      arena->reset();
      std::memset(arena->allocate(24 << 20), 0xFF, 24 << 20);
    }
  }

  Arena arena_, scratch_;
};

// One query row by plain loops in double: [h * dv].
std::vector<double> reference(const World& w, size_t s, int64_t position) {
  const MlaShape& m = w.shape;
  const int64_t width = m.latent + m.rope;
  const auto key = [&](int64_t t, int64_t i) {
    return static_cast<double>(bf16_to_f32(w.rows[s][static_cast<size_t>(t * width + i)]));
  };
  std::vector<double> out(static_cast<size_t>(w.out_width()));
  for (int64_t h = 0; h < m.heads; ++h) {
    const float* q = w.queries[s].data() + position * w.query_width() + h * m.q_head();
    const uint16_t* up = w.kv_b.data() + h * (m.nope + m.value) * m.latent;
    std::vector<double> mapped(static_cast<size_t>(width));
    for (int64_t i = 0; i < m.nope; ++i) {
      const double x = q[i];
      for (int64_t l = 0; l < m.latent; ++l) mapped[static_cast<size_t>(l)] += x * bf16_to_f32(up[i * m.latent + l]);
    }
    for (int64_t i = 0; i < m.rope; ++i) mapped[static_cast<size_t>(m.latent + i)] = q[m.nope + i];
    std::vector<double> score(static_cast<size_t>(position + 1));
    for (int64_t t = 0; t <= position; ++t) {
      for (int64_t i = 0; i < width; ++i) score[static_cast<size_t>(t)] += mapped[static_cast<size_t>(i)] * key(t, i);
      score[static_cast<size_t>(t)] *= m.softmax_scale;
    }
    const double max = *std::max_element(score.begin(), score.end());
    double sum = 0;
    std::vector<double> u(static_cast<size_t>(m.latent));
    for (int64_t t = 0; t <= position; ++t) {
      const double p = std::exp(score[static_cast<size_t>(t)] - max);
      sum += p;
      for (int64_t l = 0; l < m.latent; ++l) u[static_cast<size_t>(l)] += p * key(t, l);
    }
    for (int64_t v = 0; v < m.value; ++v) {
      double total = 0;
      for (int64_t l = 0; l < m.latent; ++l)
        total += u[static_cast<size_t>(l)] * bf16_to_f32(up[(m.nope + v) * m.latent + l]);
      out[static_cast<size_t>(h * m.value + v)] = total / sum;
    }
  }
  return out;
}

double relative_error(const float* got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(got[i] - want[i], 2);
    norm += want[i] * want[i];
  }
  return std::isfinite(error) ? std::sqrt(error / norm) : 1e9;
}

constexpr MlaForm kForms[] = {MlaForm::kAbsorbed, MlaForm::kExpanded};
constexpr double kBound = 0.012;  // queries or keys, weights, values and result are each rounded to bf16 (2^-9) once

TEST_P(MlaAttendTest, one_token_at_every_edge_of_length) {
  for (const int64_t length : {1, 2, 63, 64, 65, 255, 257, 1023, 1024, 1025, 4097}) {
    World w(shape_of(2), {length});
    const std::vector<double> want = reference(w, 0, length - 1);
    for (const MlaForm form : kForms) {
      const std::vector<float> got = attend(w, {{0, length - 1, 1, form}});
      EXPECT_LT(relative_error(got.data(), want), kBound) << length << " form " << static_cast<int>(form);
    }
  }
}

TEST_P(MlaAttendTest, every_number_of_heads) {
  for (const int64_t heads : ends_if_sanitized<int64_t>({1, 3, 4, 8, 16, 64, 128, 20})) {
    World w(shape_of(heads), {200});
    for (const MlaForm form : kForms) {
      const std::vector<float> got = attend(w, {{0, 195, 5, form}}, 2);
      for (const int64_t t : {0, 4}) {
        EXPECT_LT(relative_error(got.data() + t * w.out_width(), reference(w, 0, 195 + t)), kBound)
            << heads << " heads, token " << t << " form " << static_cast<int>(form);
      }
    }
  }
}

TEST_P(MlaAttendTest, sizes_that_need_padding) {
  const MlaShape shapes[] = {
      {.heads = 3, .nope = 16, .rope = 8, .value = 20, .latent = 24, .softmax_scale = 0.2f},
      {.heads = 4, .nope = 32, .rope = 16, .value = 32, .latent = 64, .softmax_scale = 0.15f},
      {.heads = 5, .nope = 192, .rope = 64, .value = 256, .latent = 512, .softmax_scale = 0.0625f},
  };
  for (const MlaShape& shape : shapes) {
    World w(shape, {1100});
    for (const MlaForm form : kForms) {
      const std::vector<float> got = attend(w, {{0, 1000, 100, form}}, 2);
      for (const int64_t t : {0, 23, 24, 99}) {
        EXPECT_LT(relative_error(got.data() + t * w.out_width(), reference(w, 0, 1000 + t)), kBound)
            << shape.latent << " token " << t << " form " << static_cast<int>(form);
      }
    }
  }
}

TEST_P(MlaAttendTest, a_result_is_the_same_bits_for_any_chunking_batch_and_threads) {
  World w(shape_of(2), {2100, 700, 65});
  for (const MlaForm form : kForms) {
    const std::vector<float> whole = attend(w, {{0, 0, 2100, form}});
    const auto expect_rows = [&](const std::vector<float>& got, int64_t at, int64_t position, int64_t count) {
      const size_t bytes = static_cast<size_t>(count * w.out_width()) * sizeof(float);
      EXPECT_EQ(std::memcmp(got.data() + at * w.out_width(), whole.data() + position * w.out_width(), bytes), 0)
          << "position " << position << " count " << count << " form " << static_cast<int>(form);
    };
    for (const auto& [position, count] : ends_if_sanitized<std::pair<int64_t, int64_t>>(
             {{1000, 300}, {0, 1}, {0, 100}, {60, 9}, {255, 2}, {1023, 1}, {1024, 1}, {1025, 1075}, {2099, 1}})) {
      for (const int threads : {1, 3}) {
        expect_rows(attend(w, {{0, position, count, form}}, threads), 0, position, count);
        expect_rows(
            attend(w, {{1, 600, 100, form}, {0, position, count, form}, {2, 64, 1, MlaForm::kAbsorbed}}, threads), 100,
            position, count);
      }
    }
  }
}

TEST_P(MlaAttendTest, both_forms_agree) {
  World w(shape_of(8), {1500});
  const std::vector<float> absorbed = attend(w, {{0, 1200, 300, MlaForm::kAbsorbed}}, 2);
  const std::vector<float> expanded = attend(w, {{0, 1200, 300, MlaForm::kExpanded}}, 2);
  std::vector<double> want;
  for (const float x : expanded) want.push_back(x);
  EXPECT_LT(relative_error(absorbed.data(), want), 2 * kBound);
}

TEST_P(MlaAttendTest, every_e4m3_number_is_widened_exactly) {
  for (const float factor : {1.0f, 0.37f}) {
    uint8_t codes[256];
    uint16_t wide[256];
    for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
    cpu::mla_kernels(GetParam()).widen(codes, factor, 256, wide);
    for (int i = 0; i < 256; ++i) {
      const float value = f8e4m3_to_f32(codes[i]);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(bf16_to_f32(wide[i]))) << i;
      } else {
        EXPECT_EQ(wide[i], f32_to_bf16(value * factor)) << i;
      }
    }
  }
}

TEST_P(MlaAttendTest, a_nan_of_its_own_shows_and_stays_in_its_sequence) {
  World w(shape_of(2), {300, 300});
  const std::vector<float> clean = attend(w, {{1, 290, 10, MlaForm::kAbsorbed}});
  w.rows[0][5 * 576 + 3] = kPoison;
  for (const MlaForm form : kForms) {
    const std::vector<float> got = attend(w, {{0, 290, 10, form}, {1, 290, 10, MlaForm::kAbsorbed}});
    EXPECT_TRUE(std::isnan(got[0]));
    EXPECT_EQ(std::memcmp(got.data() + 10 * w.out_width(), clean.data(), clean.size() * 2), 0);
  }
}

TEST_P(MlaAttendTest, no_memory_is_taken_after_the_first_call) {
  World w(shape_of(2), {3000});
  for (const MlaForm form : kForms) {
    attend(w, {{0, 2700, 300, form}});
    attend(w, {{0, 2700, 300, form}});
    const int64_t before = scratch_.num_growths() + arena_.num_growths();
    attend(w, {{0, 2700, 300, form}});
    EXPECT_EQ(scratch_.num_growths() + arena_.num_growths(), before);
  }
}

// x as bf16(x) and bf16 of what that leaves.
struct Terms {
  explicit Terms(const std::vector<float>& x) : value(x.size()), high(x.size()), low(x.size()) {
    for (size_t i = 0; i < x.size(); ++i) {
      high[i] = f32_to_bf16(x[i]);
      low[i] = f32_to_bf16(x[i] - bf16_to_f32(high[i]));
      value[i] = static_cast<double>(bf16_to_f32(high[i])) + static_cast<double>(bf16_to_f32(low[i]));
    }
  }
  std::vector<double> value;
  std::vector<uint16_t> high, low;
};

// Element (k, c) of a matrix of `columns` columns at its place in panels.
std::vector<uint32_t> in_panels(const std::vector<uint16_t>& matrix, int64_t depth, int64_t columns) {
  std::vector<uint32_t> out(static_cast<size_t>(depth / 2 * columns));
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t c = 0; c < columns; ++c)
      out[static_cast<size_t>((c / 16 * (depth / 2) + k / 2) * 16 + c % 16)] |=
          static_cast<uint32_t>(matrix[static_cast<size_t>(k * columns + c)]) << (k % 2 * 16);
  return out;
}

// 288 is more than AVX2 widens at a time, 48 columns are an odd number of panels.
TEST_P(MlaAttendTest, a_product_counts_both_terms_and_a_row_is_the_same_bits_among_any) {
  constexpr int64_t kRows = 80, kK = 288, kColumns = 48;
  const Terms a(random_f32(kRows * kK, 1.0f, 1)), b(random_f32(kK * kColumns, 1.0f, 2));
  const std::vector<uint32_t> high = in_panels(b.high, kK, kColumns), low = in_panels(b.low, kK, kColumns);
  const auto multiply = [&](bool a_terms, int64_t rows) {
    std::vector<float> c(static_cast<size_t>(kRows * kColumns), 0.5f);
    cpu::mla_kernels(GetParam())
        .multiply({.a = a.high.data(),
                   .a_low = a_terms ? a.low.data() : nullptr,
                   .a_stride = kK,
                   .b = high.data(),
                   .b_low = a_terms ? nullptr : low.data(),
                   .panel_stride = kK / 2 * 16,
                   .c = c.data(),
                   .c_stride = kColumns,
                   .m = rows,
                   .k = kK,
                   .columns = kColumns,
                   .accumulate = true});
    return c;
  };
  for (const bool a_terms : {true, false}) {
    const std::vector<float> whole = multiply(a_terms, kRows - 16);
    for (int64_t row : {0, 1, 15, 63}) {
      for (int64_t column = 0; column < kColumns; ++column) {
        double want = 0.5;
        for (int64_t k = 0; k < kK; ++k) {
          const auto at = static_cast<size_t>(row * kK + k), to = static_cast<size_t>(k * kColumns + column);
          want += a_terms ? a.value[at] * bf16_to_f32(b.high[to]) : bf16_to_f32(a.high[at]) * b.value[to];
        }
        EXPECT_NEAR(whole[static_cast<size_t>(row * kColumns + column)], want, 1e-4) << row << " " << column;
      }
    }
    for (const int64_t rows : {1, 2, 3, 4, 5, 8, 11, 16, 17, 33}) {
      const std::vector<float> some = multiply(a_terms, rows);
      EXPECT_EQ(std::memcmp(some.data(), whole.data(), static_cast<size_t>(rows * kColumns) * sizeof(float)), 0)
          << rows << " rows";
    }
  }
}

// Three blocks, of which the last has three keys; what lies behind them is NaN.
TEST_P(MlaAttendTest, scores_and_values_are_the_same_bits_for_any_number_of_queries) {
  constexpr int64_t kQueries = 35, kKeys = 131, kDepth = 96, kColumns = 64, kStride = kDepth + 24;
  const cpu::MlaKernels& kernels = cpu::mla_kernels(GetParam());
  std::vector<uint16_t> pool(3 * cpu::kBlockKeys * kStride, kPoison), rows = random_bf16(kKeys * kStride, 1.0f, 1);
  std::copy(rows.begin(), rows.end(), pool.begin());
  cpu::BlockRows blocks[3];
  for (int64_t i = 0; i < 3; ++i) blocks[i] = {.rows = pool.data() + i * cpu::kBlockKeys * kStride, .stride = kStride};
  const std::vector<uint16_t> queries = random_bf16(kQueries * kDepth, 1.0f, 2);
  std::vector<uint16_t> weights = random_bf16(kQueries * cpu::kStepKeys, 1.0f, 3);
  for (size_t i = 0; i < weights.size(); ++i)
    if (i % cpu::kStepKeys >= kKeys) weights[i] = 0;

  const auto products = [&](int64_t num_queries) {
    std::vector<uint32_t> packed(static_cast<size_t>(3 * kernels.query_words(kDepth)));
    for (int64_t first = 0; first < num_queries; first += 16) {
      const uint16_t* sixteen[16] = {};
      for (int64_t i = 0; i < 16 && first + i < num_queries; ++i) sixteen[i] = queries.data() + (first + i) * kDepth;
      kernels.pack_queries(sixteen, kDepth, kDepth, packed.data() + first / 16 * kernels.query_words(kDepth));
    }
    std::vector<float> scores(3 * cpu::kBlockKeys * 48), values(48 * kColumns, 0.5f);
    for (int64_t key = 0; key < kKeys; key += cpu::kBlockKeys)
      kernels.scores({.keys = blocks[key / cpu::kBlockKeys],
                      .num_keys = std::min(cpu::kBlockKeys, kKeys - key),
                      .queries = packed.data(),
                      .num_queries = num_queries,
                      .depth = kDepth,
                      .out = scores.data() + key * 48,
                      .out_stride = 48});
    kernels.values({.weights = weights.data(),
                    .weight_stride = cpu::kStepKeys,
                    .blocks = blocks,
                    .num_keys = kKeys,
                    .columns = kColumns,
                    .num_queries = num_queries,
                    .out = values.data(),
                    .out_stride = kColumns,
                    .accumulate = true});
    return std::pair(scores, values);
  };
  const auto row = [&](int64_t key) { return pool.data() + key * kStride; };
  const auto [scores, values] = products(kQueries);
  for (int64_t q = 0; q < kQueries; ++q) {
    for (int64_t key = 0; key < kKeys; ++key) {
      double want = 0;
      for (int64_t k = 0; k < kDepth; ++k)
        want +=
            static_cast<double>(bf16_to_f32(row(key)[k])) * bf16_to_f32(queries[static_cast<size_t>(q * kDepth + k)]);
      ASSERT_NEAR(scores[static_cast<size_t>(key * 48 + q)], want, 1e-4) << key << " " << q;
    }
    for (int64_t column = 0; column < kColumns; ++column) {
      double want = 0.5;
      for (int64_t key = 0; key < kKeys; ++key)
        want += static_cast<double>(bf16_to_f32(row(key)[column])) *
                bf16_to_f32(weights[static_cast<size_t>(q * cpu::kStepKeys + key)]);
      ASSERT_NEAR(values[static_cast<size_t>(q * kColumns + column)], want, 1e-4) << q << " " << column;
    }
  }
  for (const int64_t num : {1, 2, 3, 4, 7, 8, 13, 16, 20}) {
    const auto [some_scores, some_values] = products(num);
    for (int64_t key = 0; key < kKeys; ++key)
      for (int64_t q = 0; q < num; ++q)
        ASSERT_EQ(some_scores[static_cast<size_t>(key * 48 + q)], scores[static_cast<size_t>(key * 48 + q)]);
    EXPECT_TRUE(std::equal(some_values.begin(), some_values.begin() + num * kColumns, values.begin())) << num;
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, MlaAttendTest, testing::ValuesIn(isas_under_test()),
                         [](const auto& info) { return isa_name(info.param); });

}  // namespace
}  // namespace perigee
