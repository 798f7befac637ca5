// Attention with keys and values by head against its definition: prompts, verify and decode rows in one batch.
#include "backends.h"
#include "ops/place_batch.h"

namespace perigee {
namespace {

struct Case {
  FullShape shape;
  DType numbers;
};

const std::vector<Case> kCases = {{{8, 2, 64, 0.125f}, DType::kBF16},
                                  {{8, 2, 64, 0.125f}, DType::kF8E4M3},
                                  {{4, 4, 128, 0.09f}, DType::kBF16},
                                  {{6, 2, 22, 0.2f}, DType::kF8E4M3}};

// Backends with this kind of attention. GPUs have none yet.
std::vector<Backend> with_full_attention() {
  std::vector<Backend> all;
  for (Backend& backend : backends())
    if (!backend.ops->on_device()) all.push_back(std::move(backend));
  return all;
}

// Three sequences: a chunk after 70 cached tokens, a verify row, a decode row.
class World {
 public:
  World(Ops& ops, const Case& c) : ops_(ops), c_(c) {
    const int64_t page_bytes = 2 * c.shape.kv_heads * 64 * c.shape.dim * dtype_bytes(c.numbers);
    memory_ = Buffer(static_cast<size_t>(kPages * page_bytes));
    std::fill_n(memory_.data(), memory_.size(), uint8_t{0xFF});  // NaN in every format
    cache_ = {.base = memory_.data(),
              .page_bytes = page_bytes,
              .dtype = c.numbers,
              .heads = c.shape.kv_heads,
              .dim = c.shape.dim};
    ops.begin_step();
    for (size_t i = 0; i < kRuns.size(); ++i) {  // what was there before
      const SequenceRows before = {.num_tokens = kRuns[i].position, .pages = pages(i)};
      write({.sequences = std::span(&before, 1)}, kRuns[i].position, 10 + i);
    }
  }

  // The new tokens of all sequences together; or of each one by one, in rows of `most` tokens at most.
  Values together() {
    std::vector<SequenceRows> rows;
    int32_t first = 0;
    for (size_t i = 0; i < kRuns.size(); ++i) {
      rows.push_back(
          {.first_row = first, .num_tokens = kRuns[i].tokens, .position = kRuns[i].position, .pages = pages(i)});
      first += kRuns[i].tokens;
    }
    const Batch batch{.sequences = rows};
    write(batch, kTokens, 20);
    return fetch(ops_, ops_.full_attend(queries(0, kTokens), c_.shape, batch, cache_));
  }
  Values one_by_one(int32_t most) {
    Values out{.rows = kTokens, .cols = c_.shape.heads * c_.shape.dim};
    int32_t row = 0;
    for (size_t i = 0; i < kRuns.size(); ++i)
      for (int32_t done = 0, count = 0; done < kRuns[i].tokens; done += count, row += count) {
        count = std::min(most, kRuns[i].tokens - done);
        const SequenceRows rows = {.num_tokens = count, .position = kRuns[i].position + done, .pages = pages(i)};
        const Values part =
            fetch(ops_, ops_.full_attend(queries(row, count), c_.shape, {.sequences = std::span(&rows, 1)}, cache_));
        out.at.insert(out.at.end(), part.at.begin(), part.at.end());
      }
    return out;
  }

 private:
  static constexpr int32_t kPages = 12, kTokens = 40 + 4 + 1;
  struct Run {
    int32_t position, tokens;
  };
  static constexpr std::array<Run, 3> kRuns = {{{70, 40}, {126, 4}, {200, 1}}};
  static constexpr std::array<int32_t, kPages> kTable = {7, 2, 11, 0, 5, 9, 1, 10, 4, 8, 3, 6};

  static const int32_t* pages(size_t sequence) { return kTable.data() + 4 * sequence; }
  Tensor queries(int32_t first, int32_t count) {
    const Tensor all = activation(ops_, kTokens, c_.shape.heads * c_.shape.dim, 30, DType::kF32);
    return all.row_range(first, count);
  }
  void write(const Batch& batch, int32_t tokens, uint64_t key) {
    const int64_t width = c_.shape.kv_heads * c_.shape.dim;
    ops_.write_full(activation(ops_, tokens, width, key, DType::kF32),
                    activation(ops_, tokens, width, key + 100, DType::kF32), batch, cache_);
  }

  Ops& ops_;
  const Case c_;
  Buffer memory_;
  FullLayer cache_;
};

TEST(Conformance, FullAttention) {
  const auto ref = make_ref_ops();
  for (Backend& backend : with_full_attention())
    for (const Case& c : kCases) {
      World world(*backend.ops, c), defined(*ref, c);
      const std::string what = str_cat(backend.name, " full_attend ", c.shape.heads, "/", c.shape.kv_heads, " x ",
                                       c.shape.dim, " ", dtype_name(c.numbers));
      const Values got = world.together();
      expect_close(got, defined.together(), what, 1e-5);
      for (const int32_t most : {1, 7}) EXPECT_EQ(world.one_by_one(most).at, got.at) << what << " in parts of " << most;
    }
}

TEST(Conformance, RopeOfHalves) {
  const auto ref = make_ref_ops();
  const std::vector<float> inv_freq = {1, 0.5f, 0.25f, 0.1f, 0.01f};
  const std::vector<int32_t> positions = {0, 1, 77, 4095, 100000};
  for (Backend& backend : with_full_attention()) {
    Ops& ops = *backend.ops;
    poison(ops, 1 << 20);
    ref->begin_step();
    const Tensor a = activation(ops, 5, 36, 3, DType::kF32), b = activation(*ref, 5, 36, 3, DType::kF32);
    ops.rope(a, 12, 2, place(ops, positions), {.halves = true, .inv_freq = ops.pack_vector(inv_freq)});
    ref->rope(b, 12, 2, positions, {.halves = true, .inv_freq = inv_freq});
    expect_close(fetch(ops, a), fetch(*ref, b), backend.name + " rope", 1e-4);
    // A pair turns as complex numbers do: x (cos + i sin).
    const Values before = fetch(ops, activation(ops, 5, 36, 3, DType::kF32)), after = fetch(ops, a);
    const double angle = 77 * 0.25, x = before.at[2 * 36 + 2 + 2], y = before.at[2 * 36 + 2 + 7];
    EXPECT_NEAR(after.at[2 * 36 + 2 + 2], x * std::cos(angle) - y * std::sin(angle), 1e-5);
    EXPECT_NEAR(after.at[2 * 36 + 2 + 7], x * std::sin(angle) + y * std::cos(angle), 1e-5);
  }
}

}  // namespace
}  // namespace perigee
