// Attention with keys and values by head against its definition: prompts, verify and decode rows in one batch.
#include "backends.h"
#include "ops/place_batch.h"

namespace perigee {
namespace {

struct Case {
  FullShape shape;
  DType numbers;
};

const std::vector<Case> kCases = {{{8, 2, 64, 0.125f}, DType::kBF16}, {{8, 2, 64, 0.125f}, DType::kF8E4M3},
                                  {{4, 4, 128, 0.09f}, DType::kBF16}, {{4, 4, 128, 0.09f}, DType::kF8E4M3},
                                  {{6, 2, 32, 0.2f}, DType::kBF16},   {{6, 2, 32, 0.2f}, DType::kF8E4M3},
                                  {{6, 2, 22, 0.2f}, DType::kF8E4M3}};

// Whether this backend runs the case. The kernels of GPUs are for heads of 32, 64 and 128 numbers; under a checker of
// their accesses one of the GPU's backends is enough, as all launch the same ones.
bool runs(const Backend& backend, const Case& c) {
  if (!backend.ops->on_device()) return true;
  return c.shape.dim % 32 == 0 && (backend.name == "cuda" || !gpu_sanitizer());
}

double bound_of(const Ops& ops) {
  return ops.on_device() ? kBound : 1e-5;
}

// New tokens of a sequence from a position on; padding has position -1.
struct Run {
  int32_t position, tokens;
};
using Runs = std::vector<Run>;

// A chunk after 70 cached tokens, a verify row, a decode row.
const Runs kUsual = {{70, 40}, {126, 4}, {200, 1}};

// Sequences with what was cached before their new tokens.
class World {
 public:
  World(Ops& ops, const Case& c, Runs runs) : ops_(ops), c_(c), runs_(std::move(runs)) {
    for (const Run& run : runs_) {
      first_page_.push_back(num_pages_);
      num_pages_ += (run.position + run.tokens + kRowsOfBlock - 1) / kRowsOfBlock;
      num_tokens_ += run.tokens;
    }
    for (int32_t i = 0; i < num_pages_; ++i) table_.push_back(num_pages_ - i);  // out of order, and one that nobody has
    const int64_t page_bytes = 2 * c.shape.kv_heads * kRowsOfBlock * c.shape.dim * dtype_bytes(c.numbers);
    const std::vector<uint8_t> nans(static_cast<size_t>((num_pages_ + 1) * page_bytes), 0xFF);  // in every format
    memory_ = ops.make_buffer(nans.size());
    ops.copy(memory_.data(), nans.data(), nans.size());
    cache_ = {.base = memory_.data(),
              .page_bytes = page_bytes,
              .dtype = c.numbers,
              .heads = c.shape.kv_heads,
              .dim = c.shape.dim};
    poison(ops, 8 << 20);
    for (size_t i = 0; i < runs_.size(); ++i)
      if (runs_[i].position > 0) write({{.num_tokens = runs_[i].position, .pages = pages(i)}}, 10 + i);
  }

  // The new tokens of all sequences together; or of each one by one, in rows of `most` tokens at most.
  Values together() {
    const std::vector<SequenceRows> rows = all_rows();
    write(rows, 20);
    return attend(rows, 0);
  }
  Values one_by_one(int32_t most) {
    Values out{.rows = num_tokens_, .cols = c_.shape.heads * c_.shape.dim};
    int32_t row = 0;
    for (size_t i = 0; i < runs_.size(); ++i)
      for (int32_t done = 0, count = 0; done < runs_[i].tokens; done += count, row += count) {
        count = std::min(most, runs_[i].tokens - done);
        const Values part =
            attend({{.num_tokens = count, .position = runs_[i].position + done, .pages = pages(i)}}, row);
        out.at.insert(out.at.end(), part.at.begin(), part.at.end());
      }
    return out;
  }
  // What full_in() makes of new tokens' hidden states in place of given keys, values and queries.
  Values from_hidden(const FullWeights& weights) {
    const std::vector<SequenceRows> rows = all_rows();
    const std::vector<int32_t> positions = positions_of(rows);
    const Batch batch{.positions = positions, .sequences = rows};
    const PlacedBatch placed(batch, ops_);
    const Tensor q = ops_.full_in(activation(ops_, num_tokens_, weights.qkv.in, 40), weights, placed.batch(), cache_);
    return fetch(ops_, ops_.full_attend(q, c_.shape, placed.batch(), cache_));
  }

 private:
  const int32_t* pages(size_t sequence) const {
    return runs_[sequence].position < 0 ? nullptr : table_.data() + first_page_[sequence];
  }
  std::vector<SequenceRows> all_rows() const {
    std::vector<SequenceRows> rows;
    for (size_t i = 0; i < runs_.size(); ++i)
      rows.push_back({.first_row = i == 0 ? 0 : rows.back().first_row + rows.back().num_tokens,
                      .num_tokens = runs_[i].tokens,
                      .position = runs_[i].position,
                      .pages = pages(i)});
    return rows;
  }
  static std::vector<int32_t> positions_of(const std::vector<SequenceRows>& rows) {
    std::vector<int32_t> positions;
    for (const SequenceRows& s : rows)
      for (int32_t i = 0; i < s.num_tokens; ++i) positions.push_back(s.position + i);
    return positions;
  }
  void write(const std::vector<SequenceRows>& rows, uint64_t key) {
    const std::vector<int32_t> positions = positions_of(rows);
    const Batch batch{.positions = positions, .sequences = rows};
    const PlacedBatch placed(batch, ops_);
    const int64_t width = c_.shape.kv_heads * c_.shape.dim;
    ops_.write_full(activation(ops_, std::ssize(positions), width, key, DType::kF32),
                    activation(ops_, std::ssize(positions), width, key + 100, DType::kF32), placed.batch(), cache_);
  }
  Values attend(const std::vector<SequenceRows>& rows, int32_t first) {
    const std::vector<int32_t> positions = positions_of(rows);
    const Batch batch{.positions = positions, .sequences = rows};
    const PlacedBatch placed(batch, ops_);
    const Tensor q = activation(ops_, num_tokens_, c_.shape.heads * c_.shape.dim, 30, ops_.wide_dtype());
    return fetch(ops_, ops_.full_attend(q.row_range(first, std::ssize(positions)), c_.shape, placed.batch(), cache_));
  }

  Ops& ops_;
  const Case c_;
  const Runs runs_;
  std::vector<int32_t> first_page_, table_;
  int32_t num_pages_ = 0, num_tokens_ = 0;
  Buffer memory_;
  FullLayer cache_;
};

std::string name_of(const Backend& backend, const char* op, const Case& c) {
  return str_cat(backend.name, " ", op, " ", c.shape.heads, "/", c.shape.kv_heads, " x ", c.shape.dim, " ",
                 dtype_name(c.numbers));
}

TEST(Conformance, FullAttention) {
  const auto ref = make_ref_ops();
  for (Backend& backend : backends())
    for (const Case& c : kCases) {
      if (!runs(backend, c)) continue;
      const std::string what = name_of(backend, "full_attend", c);
      World world(*backend.ops, c, kUsual);
      const Values got = world.together();
      expect_close(got, World(*ref, c, kUsual).together(), what, bound_of(*backend.ops));
      if (backend.ops->on_device() && backend.name != "cuda_fixed") continue;  // parts follow the batch
      for (const int32_t most : {1, 7}) EXPECT_EQ(world.one_by_one(most).at, got.at) << what << " in parts of " << most;
    }
}

// Long caches, which a GPU cuts into parts of several blocks; a chunk of several tiles; on a GPU also padding, whose
// results are zeros.
TEST(Conformance, FullAttentionOfManyBlocks) {
  const Runs real = {{4000, 3}, {1500, 1}, {61, 4}, {0, 1}, {300, 130}};
  Runs padded = real;
  padded.insert(padded.end(), {{-1, 1}, {-1, 1}});
  for (const DType numbers : {DType::kBF16, DType::kF8E4M3}) {
    const Case c{{16, 8, 64, 0.125f}, numbers};
    Values wanted;
    for (Backend& backend : backends()) {
      if (gpu_sanitizer()) continue;
      if (wanted.at.empty()) wanted = World(*make_ref_ops(), c, real).together();
      Values got = World(*backend.ops, c, backend.ops->on_device() ? padded : real).together();
      for (size_t i = wanted.at.size(); i < got.at.size(); ++i) ASSERT_EQ(got.at[i], 0) << backend.name;
      got.rows = wanted.rows, got.at.resize(wanted.at.size());
      expect_close(got, wanted, name_of(backend, "full_attend", c), bound_of(*backend.ops));
    }
  }
}

// Projections, rope and cache write together. With this scale the results depend on the angles.
TEST(Conformance, FullIn) {
  constexpr int64_t kHidden = 256;
  const auto ref = make_ref_ops();
  const auto weights_of = [](Ops& ops, const FullShape& shape) {
    std::vector<float> inv_freq;
    for (int64_t i = 0; i < shape.dim / 2; ++i) inv_freq.push_back(std::pow(0.8f, static_cast<float>(i)));
    const Stored qkv = store(WeightFormat::kBF16, (shape.heads + 2 * shape.kv_heads) * shape.dim, kHidden, 50);
    return FullWeights{.shape = shape,
                       .qkv = ops.pack_linear(qkv.raw),
                       .rope = {.halves = true, .inv_freq = ops.pack_vector(inv_freq), .cos_sin_factor = 1.2f}};
  };
  for (Backend& backend : backends())
    for (const Case& usual : kCases) {
      if (!runs(backend, usual)) continue;
      Case c = usual;
      c.shape.softmax_scale = 1;
      expect_close(World(*backend.ops, c, kUsual).from_hidden(weights_of(*backend.ops, c.shape)),
                   World(*ref, c, kUsual).from_hidden(weights_of(*ref, c.shape)), name_of(backend, "full_in", c), 2e-2);
    }
}

TEST(Conformance, RopeOfHalves) {
  const auto ref = make_ref_ops();
  const std::vector<float> inv_freq = {1, 0.5f, 0.25f, 0.1f, 0.01f};
  const std::vector<int32_t> positions = {0, 1, 77, 4095, 100000};
  for (Backend& backend : backends()) {
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
