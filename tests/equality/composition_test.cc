// What a step computes for a sequence does not depend on the rows beside it, to the bit (DESIGN D10): one forward pass
// of a bundled model, the sequence alone and among any number of other rows. On the CPU always, on a GPU in
// deterministic mode.
#include <gtest/gtest.h>

#include <numeric>

#include "base/rng.h"
#include "base/soak.h"
#include "model/model.h"
#include "ops/cpu/test_isa.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/place_batch.h"

namespace perigee {
namespace {

constexpr int32_t kMostBeside = 140, kNumOwn = 9, kPages = kNumOwn + kMostBeside;
constexpr int32_t kOwnPages[kNumOwn] = {3, 1, 8, 0, 2, 7, 5, 6, 4};  // the others have one each, later

// Rows of one pass: the sequence's `own` next tokens, beside it `beside` tokens as one chunk or each a sequence.
struct Mixture {
  int32_t own = 1, beside = 0;
  bool chunk = false, own_first = true;
};

struct Outcome {
  std::vector<float> logits;     // of all own rows
  std::vector<uint8_t> latents;  // of the sequence, after the pass
  bool operator==(const Outcome&) const = default;
};

class Passes {
 public:
  Passes(Ops& ops, int32_t context) : ops_(ops), context_(context) {
    LoadOptions options;
    options.path = "models/tiny-k2";
    auto model = load_model(options, ops);
    CHECK(model.ok(), model.error().message);
    model_ = std::move(*model);
    layout_ = model_->cache_layout(latent_format(ops.activation_dtype()));
    memory_ = ops.make_buffer(static_cast<size_t>(kPages * layout_.page_bytes()));
    const std::vector<uint8_t> zeros(memory_.size());
    ops.copy(memory_.data(), zeros.data(), zeros.size());
    std::iota(others_.begin(), others_.end(), kNumOwn);
    add(kOwnPages, 0, context_);
    forward();
  }

  Outcome run(const Mixture& m) {
    if (m.own_first) add(kOwnPages, context_, m.own);
    for (int32_t i = 0; i < (m.chunk ? std::min(m.beside, 1) : m.beside); ++i)
      add(others_.data() + i, 0, m.chunk ? m.beside : 1);
    if (!m.own_first) add(kOwnPages, context_, m.own);
    const int32_t first = m.own_first ? 0 : m.beside;
    for (int32_t i = 0; i < m.own; ++i) logit_rows_.push_back(first + i);
    const Tensor logits = forward();
    Outcome out;
    out.logits.resize(static_cast<size_t>(logits.rows * logits.cols));
    CHECK(logits.contiguous());
    ops_.copy(out.logits.data(), logits.data, out.logits.size() * sizeof(float));
    out.latents.resize(static_cast<size_t>(kNumOwn * layout_.page_bytes()));
    ops_.copy(out.latents.data(), memory_.data(), out.latents.size());
    return out;
  }

 private:
  void add(const int32_t* pages, int32_t position, int32_t count) {
    const auto first = static_cast<int32_t>(tokens_.size());
    for (int32_t i = 0; i < count; ++i) {
      tokens_.push_back(static_cast<int32_t>(random_u64(pages == kOwnPages ? 1 : 2, position + i) % 2000));
      positions_.push_back(position + i);
    }
    sequences_.push_back({.first_row = first, .num_tokens = count, .position = position, .pages = pages});
  }
  Tensor forward() {
    ops_.begin_step();
    const Batch batch{.tokens = tokens_, .positions = positions_, .sequences = sequences_, .logit_rows = logit_rows_};
    const PlacedBatch placed(batch, ops_);
    const Tensor logits = model_->forward(placed.batch(), ops_, {.base = memory_.data(), .layout = layout_}).logits;
    tokens_.clear(), positions_.clear(), sequences_.clear(), logit_rows_.clear();
    return logits;
  }

  Ops& ops_;
  const int32_t context_;
  std::unique_ptr<Model> model_;
  CacheLayout layout_;
  Buffer memory_;
  std::array<int32_t, kPages> others_{};  // pages; a chunk's are those from its first on
  std::vector<int32_t> tokens_, positions_, logit_rows_;
  std::vector<SequenceRows> sequences_;
};

void expect_same_beside(Passes& passes, int32_t step) {
  for (const int32_t own : {1, 21}) {
    const Outcome alone = passes.run({.own = own});
    for (int32_t beside = 1; beside <= kMostBeside; beside += step)
      for (const bool chunk : {false, true})
        for (const bool own_first : {true, false})
          ASSERT_TRUE(passes.run({own, beside, chunk, own_first}) == alone)
              << own << " rows differ beside " << beside << (chunk ? " of a chunk" : " of as many sequences")
              << (own_first ? " after them" : " before them");
  }
}

TEST(Composition, NoRowDependsOnThoseBesideIt) {
  const auto ops = make_cpu_ops({.num_threads = 2, .isa = isa_under_test()});
  ASSERT_TRUE(ops.ok()) << ops.error().message;
  Passes passes(**ops, 150);
  expect_same_beside(passes, kSanitized ? 46 : 23);
}

TEST(Composition, NoRowDependsOnThoseBesideItCuda) {
  const auto ops = make_cuda_ops({.deterministic = true, .separate_arrays = gpu_sanitizer()});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  Passes passes(**ops, 500);  // 21 more lie on both sides of a place where attention is cut (mla_piece_begin)
  for (int turn = 0; turn < (soak_requested() ? 20 : 1); ++turn) expect_same_beside(passes, gpu_sanitizer() ? 46 : 1);
}

}  // namespace
}  // namespace perigee
