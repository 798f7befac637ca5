// Sampled ids of verify rows have the model's distribution: of each place that a row comes to, whatever was drafted.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "base/rng.h"
#include "exec/host_sampling.h"

namespace perigee {
namespace {

constexpr int32_t kVocab = 6, kDrafts = 3;
constexpr SlotId kSlot(0);

// Every token has a distribution of the next one of its own.
class Chain final : public Model {
 public:
  Chain() {
    info_.vocab = kVocab;
    info_.max_positions = 1000;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override { return {CacheGroup::latent(1, 16, 0, format)}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }
  ModelOutput forward(const Batch&, Ops&, const PagePool&) const override { return {}; }

  static float logit(int32_t token, int32_t next) {
    return 3 * random_unit(fnv1a("chain"), static_cast<uint64_t>(token * kVocab + next));
  }
  // An automaton whose state is the last token.
  static bool allows(int32_t token, int32_t next) { return (token + next) % 3 != 0; }
  static double probability(int32_t token, int32_t next, bool masked) {
    double sum = 0;
    for (int32_t other = 0; other < kVocab; ++other)
      if (!masked || allows(token, other)) sum += std::exp(static_cast<double>(logit(token, other)));
    return masked && !allows(token, next) ? 0 : std::exp(static_cast<double>(logit(token, next))) / sum;
  }
  static int32_t most_likely(int32_t token) {
    int32_t best = 0;
    for (int32_t next = 1; next < kVocab; ++next)
      if (logit(token, next) > logit(token, best)) best = next;
    return best;
  }

 private:
  ModelInfo info_;
};

// Of each token, how often each id came after it.
using Counts = std::array<std::array<double, kVocab>, kVocab>;

// A normal variable, nearly, of Pearson's chi-square over all tokens (Wilson, Hilferty 1931).
double deviation(const Counts& counts, bool masked = false) {
  double chi2 = 0, freedom = 0;
  for (int32_t token = 0; token < kVocab; ++token) {
    const auto& row = counts[static_cast<size_t>(token)];
    double total = 0;
    for (const double count : row) total += count;
    if (total == 0) continue;
    freedom -= 1;
    for (int32_t next = 0; next < kVocab; ++next) {
      const double expected = total * Chain::probability(token, next, masked);
      if (expected == 0) continue;
      freedom += 1;
      chi2 += (row[static_cast<size_t>(next)] - expected) * (row[static_cast<size_t>(next)] - expected) / expected;
    }
  }
  const double spread = 2 / (9 * freedom);
  return (std::cbrt(chi2 / freedom) - (1 - spread)) / std::sqrt(spread);
}

enum class Drafting { kLikely, kRandom };

class VerifyRows {
 public:
  VerifyRows() : slots_(1, kVocab, 1), builder_(model_, false), sampling_(kVocab, Comm::alone()) {}

  // The ids of a row after `token` that verifies these drafts.
  RowIds run(int32_t token, const DraftIds& drafts, uint64_t seed, bool masked = false) {
    SamplingParams params;
    params.seed = seed;
    SequenceStart start;
    start.slot = kSlot;
    start.sequence = SequenceId(1);
    start.tokens = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{token});
    start.num_prompt_tokens = 1;
    start.sampling = std::make_shared<const SamplingParams>(params);
    slots_.start(start);
    slots_.append({.slot = kSlot, .block_index = 0, .place = {PageId(0)}});
    slots_.advance(kSlot, 1, true);
    slots_.accept(kSlot, token);
    slots_[kSlot].drafts = drafts;
    StepPlan plan;
    plan.rows.push_back({.slot = kSlot,
                         .sequence = SequenceId(1),
                         .position = PositionRange::at(1),
                         .work = Verify{kDrafts},
                         .masked = masked});
    const Batch& batch = builder_.build(plan, slots_);
    arena_.reset();
    const Tensor logits = arena_.tensor(DType::kF32, std::ssize(batch.tokens), kVocab);
    for (int64_t row = 0; row < logits.rows; ++row)
      for (int32_t next = 0; next < kVocab; ++next)
        logits.row<float>(row)[next] = Chain::logit(batch.tokens[static_cast<size_t>(row)], next);
    slots_.advance(kSlot, static_cast<int32_t>(logits.rows), false);
    StepResult result;
    result.begin(plan);
    std::vector<uint32_t> masks;
    for (const int32_t before : batch.tokens) {
      if (!masked) break;
      masks.push_back(0);
      for (int32_t next = 0; next < kVocab; ++next)
        if (Chain::allows(before, next)) masks.back() |= 1u << next;
    }
    CHECK(sampling_.sample(plan, logits, builder_, {std::span<const uint32_t>(masks)}, arena_, slots_, result).ok());
    return result.rows[0].ids;
  }

 private:
  const Chain model_;
  Slots slots_;
  BatchBuilder builder_;
  HostSampling sampling_;
  Arena arena_;
};

DraftIds drafts_after(int32_t token, Drafting drafting, Rng& rng) {
  DraftIds drafts;
  for (int32_t i = 0; i < kDrafts; ++i) {
    token = drafting == Drafting::kLikely ? Chain::most_likely(token) : static_cast<int32_t>(rng.below(kVocab));
    drafts.push_back(token);
  }
  return drafts;
}

// 200,000 draws of each way of drafting. The seeds are fixed, so this never flickers.
TEST(Lossless, SampledIdsHaveTheModelsDistribution) {
  constexpr int64_t kDraws = 200'000;
  VerifyRows rows;
  Counts pooled{};
  for (const Drafting drafting : {Drafting::kLikely, Drafting::kRandom}) {
    Counts counts{}, moved{};
    Rng rng(3);
    int64_t draws = 0, accepted = 0;
    for (uint64_t seed = 0; draws < kDraws; ++seed) {
      int32_t token = static_cast<int32_t>(seed % kVocab);
      const DraftIds drafts = drafts_after(token, drafting, rng);
      const RowIds ids = rows.run(token, drafts, 1'000'000 * static_cast<uint64_t>(drafting) + seed);
      accepted += std::ssize(ids) - 1;
      for (size_t place = 0; place < ids.size(); ++place, ++draws) {
        const int32_t id = ids[place];
        const bool moves = place < drafts.size() && draws % 50 == 0;
        counts[static_cast<size_t>(token)][static_cast<size_t>(id)] += 1;
        pooled[static_cast<size_t>(token)][static_cast<size_t>(id)] += 1;
        moved[static_cast<size_t>(token)][static_cast<size_t>(moves ? drafts[place] : id)] += 1;
        token = id;
      }
    }
    EXPECT_GT(accepted, draws / 20);
    EXPECT_LT(deviation(counts), 4.26) << "p > 1e-5";
    if (drafting == Drafting::kLikely) {
      EXPECT_GT(deviation(moved), 4.26) << "2 % of draws that turn into drafts";
    }
  }
  EXPECT_LT(deviation(pooled), 3.09) << "p > 0.001";
}

// Masks as an automaton has them after each draft.
TEST(Lossless, MaskedIdsHaveTheDistributionOfWhatIsAllowed) {
  VerifyRows rows;
  Counts counts{};
  Rng rng(3);
  int64_t accepted = 0;
  for (uint64_t seed = 0; seed < 40'000; ++seed) {
    int32_t token = static_cast<int32_t>(seed % kVocab);
    const RowIds ids = rows.run(token, drafts_after(token, Drafting::kRandom, rng), seed, true);
    accepted += std::ssize(ids) - 1;
    for (const int32_t id : ids) {
      ASSERT_TRUE(Chain::allows(token, id)) << "place after " << token;
      counts[static_cast<size_t>(token)][static_cast<size_t>(id)] += 1;
      token = id;
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(deviation(counts, true), 4.26) << "p > 1e-5";
}

}  // namespace
}  // namespace perigee
