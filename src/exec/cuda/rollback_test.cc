// Rollback under graphs: a step that tries several tokens of each sequence, captured once and replayed, while any
// number of them is taken back in between. In deterministic mode a token that counts has the bits that it has in a
// sequence that runs alone, outside of graphs, a token a step, and never sees a wrong one.
#include <gtest/gtest.h>

#include <array>

#include "base/rng.h"
#include "base/soak.h"
#include "exec/cuda/capture_graph.h"
#include "model/single_sequence.h"
#include "ops/cuda/backend.h"

namespace perigee {
namespace {

using Rows = std::vector<std::vector<float>>;

constexpr int32_t kTried = 4, kRing = 8, kCapacity = 512, kVocab = 2000;
constexpr std::array<int32_t, 4> kPrompts = {30, 64, 131, kCapacity - kTried};
// The last sequence stays where it is, all its tokens are taken back: its length fixes the width of the block tables,
// so that the arrays of each step lie where those of the captured one lay.
constexpr size_t kSequences = kPrompts.size(), kMoving = kSequences - 1;
using Counts = std::array<int32_t, kSequences>;

std::unique_ptr<Model> load(const std::string& name, Ops& ops) {
  LoadOptions options;
  options.path = "models/" + name;
  auto model = load_model(options, ops);
  CHECK(model.ok(), model.error().message);
  return std::move(*model);
}

Rows fetch(Ops& ops, const Tensor& logits) {
  Rows out(static_cast<size_t>(logits.rows), std::vector<float>(static_cast<size_t>(logits.cols)));
  for (int64_t r = 0; r < logits.rows; ++r)
    ops.copy(out[static_cast<size_t>(r)].data(), logits.row<float>(r),
             static_cast<size_t>(logits.cols) * sizeof(float));
  return out;
}

struct Trial {
  std::vector<int32_t> pages, state_pages, tokens;  // the tokens are those that count
  int32_t position = 0, committed = 0;
};

class Trials {
 public:
  Trials(CudaOps& ops, const Model& model, LatentFormat cache)
      : ops_(ops), model_(model), layout_(model.cache_layout(cache)) {
    const int64_t blocks = kCapacity / 64, each = blocks + layout_.state_pages();
    memory_ = device_buffer(kSequences * static_cast<size_t>(each * layout_.page_bytes()));
    const std::vector<uint8_t> zeros(memory_.size());
    device_copy(memory_.data(), zeros.data(), zeros.size());
    ring_ = device_buffer(kSequences * static_cast<size_t>(layout_.ring_slot_bytes(kRing)) + 1);
    for (size_t i = 0; i < kSequences; ++i) {
      Trial& t = trials_[i];
      for (int64_t p = each; p-- > 0;)  // in turns and backwards, so that a mix-up shows
        (p < blocks ? t.pages : t.state_pages).push_back(static_cast<int32_t>(p * kSequences + i));
      for (uint64_t n = 0; n < kCapacity; ++n) t.tokens.push_back(static_cast<int32_t>(random_u64(i, n) % kVocab));
      const std::vector<int32_t> prompt(t.tokens.begin(), t.tokens.begin() + kPrompts[i]);
      run(prompt, {rows_of(i, 0, kPrompts[i], true)}, {0}, [](auto&& work) { work(); });
      t.position = t.committed = kPrompts[i];
    }
    const auto capture = [this](auto&& work) {
      auto graph = capture_graph(ops_.stream(), work);
      CHECK(graph.ok(), graph.error().message);
      graph_ = *graph;
    };
    step({}, [](auto&& work) { work(); });  // loads the kernels
    logits_ = step({}, capture);
  }
  ~Trials() { cudaGraphExecDestroy(graph_); }

  // One replay of kTried tokens a sequence, of which the first counts[i] are its own and stay; the logits of all.
  Rows replay(const Counts& counts) {
    const int32_t* before = lengths_;
    step(counts, [this](auto&&) { cuda_ok(cudaGraphLaunch(graph_, ops_.stream()), "replaying"); });
    EXPECT_EQ(lengths_, before) << "the arrays do not lie where the graph reads them";
    for (size_t i = 0; i < kSequences; ++i) {
      trials_[i].committed = trials_[i].position;
      trials_[i].position += counts[i];
    }
    return fetch(ops_, logits_);
  }

  const std::vector<int32_t>& tokens(size_t i) const { return trials_[i].tokens; }

 private:
  SequenceRows rows_of(size_t i, int32_t first_row, int32_t count, bool commit_all) const {
    const Trial& t = trials_[i];
    return {.first_row = first_row,
            .num_tokens = count,
            .position = t.position,
            .pages = t.pages.data(),
            .state_pages = t.state_pages.data(),
            .slot = static_cast<int32_t>(i),
            .committed = t.committed,
            .commit_all = commit_all};
  }

  template <typename How>
  Tensor step(const Counts& counts, How&& how) {
    std::vector<SequenceRows> sequences;
    std::vector<int32_t> tokens, logit_rows;
    for (size_t i = 0; i < kSequences; ++i) {
      sequences.push_back(rows_of(i, static_cast<int32_t>(tokens.size()), kTried, false));
      for (int32_t n = 0; n < kTried; ++n) {
        const int32_t own = trials_[i].tokens[static_cast<size_t>(trials_[i].position + n)];
        logit_rows.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back(n < counts[i] ? own : (own + 1 + n) % kVocab);
      }
    }
    return run(tokens, sequences, logit_rows, how);
  }

  // Places the arrays of a step, whose forward pass `how` runs, captures, or leaves to a graph.
  template <typename How>
  Tensor run(const std::vector<int32_t>& tokens, const std::vector<SequenceRows>& sequences,
             const std::vector<int32_t>& logit_rows, How&& how) {
    std::vector<int32_t> positions;
    for (const SequenceRows& s : sequences)
      for (int32_t n = 0; n < s.num_tokens; ++n) positions.push_back(s.position + n);
    ops_.begin_step();
    const PlacedBatch placed(
        {.tokens = tokens, .positions = positions, .sequences = sequences, .logit_rows = logit_rows}, ops_,
        static_cast<int32_t>(layout_.state_pages()));
    lengths_ = placed.batch().device->lengths;
    Tensor logits;
    how([&] {
      const PagePool pool{.base = memory_.data(), .layout = layout_, .ring = ring_.data(), .ring_tokens = kRing};
      logits = model_.forward(placed.batch(), ops_, pool).logits;
    });
    return logits;
  }

  CudaOps& ops_;
  const Model& model_;
  const CacheLayout layout_;
  Buffer memory_, ring_;
  std::array<Trial, kSequences> trials_;
  cudaGraphExec_t graph_ = nullptr;
  Tensor logits_;
  const int32_t* lengths_ = nullptr;
};

Rows alone(CudaOps& ops, const Model& model, LatentFormat cache, const std::vector<int32_t>& tokens, int32_t prompt,
           size_t count) {
  SingleSequence sequence(model, ops, cache, kCapacity);
  const auto next = tokens.begin() + prompt;
  sequence.run({tokens.begin(), next}, MlaForm::kAbsorbed);
  Rows out;
  for (size_t i = 0; i < count; ++i)
    out.push_back(sequence.propose({next[static_cast<std::ptrdiff_t>(i)]}, MlaForm::kAbsorbed)[0]);
  return out;
}

struct Case {
  const char *name, *model;
  LatentFormat cache;
};

class Rollback : public testing::TestWithParam<Case> {};

TEST_P(Rollback, ReplayedStepsForgetWhatWasTakenBack) {
  if (const Status gpu = select_device(0); !gpu.ok()) GTEST_SKIP() << gpu.error().message;
  if (gpu_sanitizer()) return;  // no graphs under a checker (tools/gpu_sanitize.py)
  CudaOps ops({.deterministic = true});
  const auto model = load(GetParam().model, ops);
  Trials trials(ops, *model, GetParam().cache);
  Rng rng(5);
  std::array<Rows, kMoving> kept;
  Rows still;
  for (int round = 0; round < 60; ++round) {
    Counts counts{};
    for (size_t i = 0; i < kMoving; ++i) counts[i] = static_cast<int32_t>(rng.between(rng.chance(0.1) ? 0 : 1, kTried));
    const Rows rows = trials.replay(counts);
    for (size_t i = 0; i < kMoving; ++i)
      kept[i].insert(kept[i].end(), rows.begin() + static_cast<int32_t>(i) * kTried,
                     rows.begin() + static_cast<int32_t>(i) * kTried + counts[i]);
    const Rows last(rows.end() - kTried, rows.end());
    if (round == 0) still = last;
    ASSERT_EQ(last, still) << "the sequence that stays where it is, in round " << round;
  }
  for (size_t i = 0; i < kMoving; ++i) {
    const Rows wanted = alone(ops, *model, GetParam().cache, trials.tokens(i), kPrompts[i], kept[i].size());
    ASSERT_GT(kept[i].size(), 100u);
    for (size_t t = 0; t < wanted.size(); ++t) ASSERT_EQ(kept[i][t], wanted[t]) << "sequence " << i << " token " << t;
  }
}

// Of so many sequences, all in the same pages, that their pieces fill two launches at the later position and one at the
// earlier, where the step is captured.
TEST(Captured, AStepOfSeveralTokensIsCutForAnyPosition) {
  if (const Status gpu = select_device(0); !gpu.ok()) GTEST_SKIP() << gpu.error().message;
  if (gpu_sanitizer()) return;  // no graphs under a checker
  constexpr int32_t kBlocks = 512, kMany = 200, kEarly = 60, kLate = kBlocks * 64 - 100;
  CudaOps ops({.deterministic = true});
  const auto model = load("tiny-k2", ops);
  const CacheLayout layout = model->cache_layout(LatentFormat::kBF16);
  std::vector<uint32_t> numbers(static_cast<size_t>(kBlocks * layout.page_bytes()) / 4);
  for (size_t i = 0; i < numbers.size(); ++i)  // pairs of bf16 from 2^-3 to 2 in size
    numbers[i] = (static_cast<uint32_t>(random_u64(3, i)) & 0x81FF81FFu) | 0x3E003E00u;
  const Buffer memory = device_buffer(numbers.size() * 4);
  device_copy(memory.data(), numbers.data(), memory.size());
  std::vector<int32_t> pages;
  for (int32_t page = kBlocks; page-- > 0;) pages.push_back(page);
  Tensor logits;
  const auto step = [&](int32_t position, auto&& how) {
    std::vector<SequenceRows> sequences;
    std::vector<int32_t> tokens, positions, logit_rows;
    for (int32_t i = 0; i <= kMany; ++i) {
      const int32_t at = i < kMany ? position : kLate;  // the last fixes the width of the block tables
      sequences.push_back(
          {.first_row = i * kTried, .num_tokens = kTried, .position = at, .pages = pages.data(), .slot = i});
      for (int32_t n = 0; n < kTried; ++n) tokens.push_back(100 + n), positions.push_back(at + n);
      logit_rows.push_back(i * kTried + kTried - 1);
    }
    ops.begin_step();
    const PlacedBatch placed(
        {.tokens = tokens, .positions = positions, .sequences = sequences, .logit_rows = logit_rows}, ops, 0);
    how([&] { logits = model->forward(placed.batch(), ops, {.base = memory.data(), .layout = layout}).logits; });
  };
  const auto eager = [](auto&& work) { work(); };
  cudaGraphExec_t graph = nullptr;
  step(kEarly, eager);  // loads the kernels
  step(kEarly, [&](auto&& work) { graph = *capture_graph(ops.stream(), work); });
  const Tensor captured = logits;
  step(kLate, eager);
  const Rows wanted = fetch(ops, logits);
  step(kLate, [&](auto&&) { cuda_ok(cudaGraphLaunch(graph, ops.stream()), "replaying"); });
  const Rows got = fetch(ops, captured);
  cudaGraphExecDestroy(graph);
  ASSERT_TRUE(device_status().ok());
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t row = 0; row < got.size(); ++row) ASSERT_EQ(got[row], wanted[row]) << "row " << row;
}

INSTANTIATE_TEST_SUITE_P(, Rollback,
                         testing::Values(Case{"TinyK2", "tiny-k2", LatentFormat::kBF16},
                                         Case{"TinyK2Fp8", "tiny-k2", LatentFormat::kF8E4M3},
                                         Case{"TinyKimiLinear", "tiny-kimi-linear", LatentFormat::kBF16},
                                         Case{"TinyKimiLinearFp8", "tiny-kimi-linear", LatentFormat::kF8E4M3}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace perigee
