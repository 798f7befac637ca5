// A rank of the host around a model whose logits are given.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/queue.h"
#include "exec/exec_testing.h"
#include "ops/ops.h"

namespace perigee {
namespace {

constexpr int32_t kVocab = 16;
constexpr int32_t kPoisoned = 13;  // the logits after this token are not finite

// After token t comes t + 1; the logits of a row tell its token and position.
class CountingModel : public Model {
 public:
  explicit CountingModel(int64_t max_positions) {
    info_.vocab = kVocab;
    info_.max_positions = max_positions;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override { return {CacheGroup::latent(1, 16, 0, format)}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }
  ModelOutput forward(const Batch& batch, Ops& ops, const PagePool&) const override {
    for (const int32_t token : batch.tokens) CHECK(token >= 0 && token < kVocab, "token ", token);
    const Tensor logits = ops.arena().tensor(DType::kF32, std::ssize(batch.logit_rows), kVocab);
    for (int64_t i = 0; i < logits.rows; ++i) {
      const auto row = static_cast<size_t>(batch.logit_rows[static_cast<size_t>(i)]);
      std::fill_n(logits.row<float>(i), kVocab, 0.0f);
      logits.row<float>(i)[(batch.tokens[row] + 1) % kVocab] = 1.0f + static_cast<float>(batch.positions[row]);
      if (batch.tokens[row] == kPoisoned) logits.row<float>(i)[3] = std::numeric_limits<float>::quiet_NaN();
    }
    return {.logits = logits};
  }

 private:
  ModelInfo info_;
};

class GivenLogits : public testing::Test {
 protected:
  void make(int64_t max_positions = 1000, int32_t max_sequences = 4, int32_t num_drafts = 0) {
    RankConfig config;
    config.device = Device::kRef;
    config.cache_bytes = 1 << 20;
    config.limits.max_sequences = max_sequences;
    config.limits.num_drafts = num_drafts;
    config.ngram = {.least = 1, .most = 3};
    config.synthetic_rates = synthetic_rates;
    config.make_model = [=](Ops&) { return std::make_unique<CountingModel>(max_positions); };
    auto made = RankThread::start(config, [this](StepResult& result) { results_.push_reserved(std::move(result)); });
    ASSERT_TRUE(made.ok()) << made.error().message;
    rank_ = std::move(*made);
  }

  std::vector<float> synthetic_rates;

  // A sequence enters the slot with the blocks of its tokens and one more output.
  void start(StepPlan& plan, int32_t slot, std::vector<int32_t> tokens, SamplingParams sampling) {
    sampling.temperature = 0;
    SequenceStart start;
    start.slot = SlotId(slot);
    start.sequence = SequenceId(slot + 100);
    tokens.shrink_to_fit();  // so that a checker sees reads beyond them
    start.num_prompt_tokens = static_cast<int32_t>(tokens.size());
    for (int32_t block = 0; block * kBlockTokens <= start.num_prompt_tokens; ++block)
      plan.appends.push_back({.slot = SlotId(slot), .block_index = block, .place = {PageId(next_page_++)}});
    start.tokens = std::make_shared<const std::vector<int32_t>>(std::move(tokens));
    start.sampling = std::make_shared<const SamplingParams>(std::move(sampling));
    prompts_[static_cast<size_t>(slot)] = start.tokens;
    plan.starts.push_back(std::move(start));
    positions_[static_cast<size_t>(slot)] = 0;
  }
  // Its next `count` tokens; sampled at the end of the prompt. A decode row when `count` is 0.
  void row(StepPlan& plan, int32_t slot, int32_t count, bool prompt_logprobs = false) {
    int32_t& position = positions_[static_cast<size_t>(slot)];
    const std::vector<int32_t>& prompt = *prompts_[static_cast<size_t>(slot)];
    PlanRow& row = plan.rows.emplace_back();
    row.slot = SlotId(slot);
    row.sequence = SequenceId(slot + 100);
    row.position = PositionRange::at(position);
    row.work = Decode();
    plan.num_decode_rows += count == 0 ? 1 : 0;
    if (count > 0) {
      row.work = Prefill{.tokens_offset = static_cast<int32_t>(plan.tokens.size()),
                         .num_tokens = count,
                         .sample = position + count == std::ssize(prompt),
                         .prompt_logprobs = prompt_logprobs};
      plan.tokens.insert(plan.tokens.end(), prompt.begin() + position, prompt.begin() + position + count);
    }
    position += row.num_tokens();
  }
  // A verify row with room for three drafts.
  void verify(StepPlan& plan, int32_t slot, PositionRange position) {
    plan.rows.push_back(
        {.slot = SlotId(slot), .sequence = SequenceId(slot + 100), .position = position, .work = Verify{3}});
    ++plan.num_decode_rows;
  }
  void submit(StepPlan plan) {
    plan.step = StepId(next_step_++);
    rank_->submit(std::move(plan));
  }
  StepResult result() { return std::move(*results_.pop()); }

  BoundedQueue<StepResult> results_{8};  // outlives the rank
  std::unique_ptr<RankThread> rank_;
  std::array<std::shared_ptr<const std::vector<int32_t>>, 8> prompts_;
  std::array<int32_t, 8> positions_ = {};
  int32_t next_page_ = 0;
  int64_t next_step_ = 0;
};

// Whatever it is, the sequence's next row may be in flight already.
TEST_F(GivenLogits, ANonFiniteRowEndsNobodyElse) {
  make();
  StepPlan first, second;
  start(first, 0, {4, 5}, {});
  start(first, 1, {12, kPoisoned}, {});
  row(first, 0, 2);
  row(first, 1, 2);
  row(second, 0, 0);
  row(second, 1, 0);
  submit(std::move(first));
  submit(std::move(second));
  const StepResult one = result(), two = result();
  EXPECT_EQ(one.rows[0].ids, RowIds{6});
  EXPECT_TRUE(one.rows[0].finite);
  EXPECT_TRUE(one.rows[1].ids.empty());
  EXPECT_FALSE(one.rows[1].finite);
  EXPECT_EQ(two.rows[0].ids, RowIds{7});
  EXPECT_TRUE(two.rows[0].finite);
}

TEST_F(GivenLogits, PromptLogprobsEndWithThePrompt) {
  make();
  const std::vector<int32_t> prompt = {1, 2, 3, 9, 10};
  for (const int32_t cut : {0, 1, 3, 4}) {
    SCOPED_TRACE(cut);
    StepPlan first, second;
    SamplingParams sampling;
    sampling.prompt_logprobs = 1;
    start(first, 0, prompt, sampling);
    if (cut > 0) row(first, 0, cut, true);
    row(cut > 0 ? second : first, 0, 5 - cut, true);
    submit(std::move(first));
    std::vector<TokenLogprobs> got = result().rows[0].prompt_logprobs;
    if (cut > 0) {
      submit(std::move(second));
      const StepResult rest = result();
      EXPECT_EQ(rest.rows[0].ids, RowIds{11});
      got.insert(got.end(), rest.rows[0].prompt_logprobs.begin(), rest.rows[0].prompt_logprobs.end());
    }
    ASSERT_EQ(got.size(), 4u) << "of tokens 1 to 4";
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].id, prompt[i + 1]);
      EXPECT_EQ(got[i].rank, prompt[i + 1] == prompt[i] + 1 ? 1 : 2) << i;
      EXPECT_EQ(got[i].top, (std::vector<std::pair<int32_t, float>>{{prompt[i] + 1, got[i].top[0].second}}));
      EXPECT_NEAR(got[i].top[0].second, -std::log(1 + 15 * std::exp(-1.0 - static_cast<double>(i))), 1e-5);
    }
  }
}

// A context whose length is no multiple of a block has a block for its rest.
TEST_F(GivenLogits, AContextOfAnyLengthIsUsedToItsEnd) {
  for (const int32_t max_positions : {63, 64, 65, 100, 128}) {
    SCOPED_TRACE(max_positions);
    make(max_positions);
    StepPlan plan, decode;
    start(plan, 0, std::vector<int32_t>(static_cast<size_t>(max_positions - 1), 2), {});
    row(plan, 0, max_positions - 1);
    row(decode, 0, 0);
    submit(std::move(plan));
    submit(std::move(decode));
    EXPECT_EQ(result().rows[0].ids, RowIds{3});
    EXPECT_EQ(result().rows[0].ids, RowIds{4});
    rank_.reset();
    next_page_ = 0;
  }
}

// Of rows with and without logits, each gets its own.
TEST_F(GivenLogits, RowsMeetTheirLogits) {
  make();
  StepPlan plan;
  SamplingParams scored;
  scored.prompt_logprobs = 0;
  start(plan, 0, {1, 2, 3, 4, 5}, {});
  start(plan, 1, {4, 5, 6}, scored);
  start(plan, 2, {7}, {});
  start(plan, 3, {9, 2, 8}, scored);
  row(plan, 0, 3);  // samples nothing
  row(plan, 1, 3, true);
  row(plan, 2, 1);
  row(plan, 3, 2, true);
  submit(std::move(plan));
  const StepResult got = result();
  EXPECT_TRUE(got.rows[0].ids.empty());
  EXPECT_EQ(got.rows[1].ids, RowIds{7});
  EXPECT_EQ(got.rows[2].ids, RowIds{8});
  EXPECT_TRUE(got.rows[3].ids.empty());
  ASSERT_EQ(got.rows[1].prompt_logprobs.size(), 2u);
  ASSERT_EQ(got.rows[3].prompt_logprobs.size(), 2u);
  EXPECT_EQ(got.rows[3].prompt_logprobs[1].id, 8);
  EXPECT_EQ(got.rows[3].prompt_logprobs[1].rank, 2);
}

// The drafts of both rows are made when the plans are there already.
TEST_F(GivenLogits, AVerifyRowKeepsIdsUpToTheFirstThatIsNotItsDraft) {
  make(1000, 4, 3);
  StepPlan prompt, first, second, third;
  SamplingParams scored;
  scored.logprobs = 1;
  start(prompt, 0, {1, 2, 3, 4, 9, 1, 2}, scored);
  row(prompt, 0, 7);
  verify(first, 0, PositionRange::at(7));
  verify(second, 0, {8, 11});
  verify(third, 0, {9, 15});
  submit(std::move(prompt));
  submit(std::move(first));
  EXPECT_EQ(result().rows[0].ids, RowIds{3});
  submit(std::move(second));
  const RowResult partly = result().rows[0];
  EXPECT_EQ(partly.ids, (RowIds{4, 5})) << "the drafts are 4, 9 and 1";
  EXPECT_EQ(partly.num_drafts, 3);
  ASSERT_EQ(partly.logprobs.size(), 2u);
  EXPECT_EQ(partly.logprobs[1].id, 5);
  EXPECT_NEAR(partly.logprobs[1].logprob, -std::log(1 + 15 * std::exp(-9.0)), 1e-5) << "of position 8";
  submit(std::move(third));
  for (const int32_t position : {9, 10}) {
    const RowResult row = result().rows[0];
    EXPECT_EQ(row.ids, RowIds{position - 3}) << "5 and 6 have not been said before";
    EXPECT_EQ(row.num_drafts, 0);
    EXPECT_NEAR(row.logprobs.at(0).logprob, -std::log(1 + 15 * std::exp(-1.0 - position)), 1e-7) << position;
  }
}

TEST_F(GivenLogits, AllDraftsAreAccepted) {
  make(1000, 4, 3);
  StepPlan prompt, decode;
  start(prompt, 0, {1, 2, 3, 4, 5, 6, 1}, {});
  row(prompt, 0, 7);
  verify(decode, 0, PositionRange::at(7));
  submit(std::move(prompt));
  submit(std::move(decode));
  EXPECT_EQ(result().rows[0].ids, RowIds{2});
  EXPECT_EQ(result().rows[0].ids, (RowIds{3, 4, 5, 6}));
}

// The model's ids are 3, 4, 5, 6, the drafts 9, 1 and 2.
TEST_F(GivenLogits, SyntheticRatesAcceptWhateverTheModelSays) {
  for (const auto& [rates, wanted] : std::vector<std::pair<std::vector<float>, RowIds>>{
           {{1, 1, 1}, {9, 1, 2, 3}}, {{1, 0, 1}, {9, 10}}, {{0, 1, 1}, {3}}}) {
    synthetic_rates = rates;
    make(1000, 4, 3);
    StepPlan prompt, decode;
    start(prompt, 0, {1, 2, 9, 1}, {});
    row(prompt, 0, 4);
    verify(decode, 0, PositionRange::at(4));
    submit(std::move(prompt));
    submit(std::move(decode));
    EXPECT_EQ(result().rows[0].ids, RowIds{2});
    EXPECT_EQ(result().rows[0].ids, wanted);
  }
}

// Shares of about 1,000 rows, within five standard deviations. The drafts go on counting, as the model does.
TEST_F(GivenLogits, SyntheticRatesAreKept) {
  synthetic_rates = {0.75f, 0.5f, 0.25f};
  int64_t rows = 0, at_least[4] = {};
  for (uint64_t seed = 0; seed < 300; ++seed) {
    make(4000, 1, 3);
    SamplingParams sampling;
    sampling.seed = seed;
    StepPlan prompt;
    start(prompt, 0, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1}, sampling);
    row(prompt, 0, 13);
    submit(std::move(prompt));
    result();
    for (int32_t position = 13; position < 60;) {
      StepPlan plan;
      verify(plan, 0, PositionRange::at(position));
      submit(std::move(plan));
      const RowResult got = result().rows[0];
      if (!got.finite || got.ids.back() == kPoisoned) break;
      position += static_cast<int32_t>(got.ids.size());
      if (got.num_drafts < 3) continue;
      ++rows;
      for (size_t i = 1; i < got.ids.size(); ++i) ++at_least[i];
    }
  }
  ASSERT_GT(rows, 700);
  const auto share = [&](int i) { return static_cast<double>(at_least[i]) / static_cast<double>(rows); };
  EXPECT_NEAR(share(1), 0.75, 0.07);
  EXPECT_NEAR(share(2), 0.375, 0.08);
  EXPECT_NEAR(share(3), 0.09375, 0.05);
}

TEST_F(GivenLogits, IdsBeforeADraftWhoseLogitsAreNotFiniteCount) {
  make(1000, 4, 3);
  StepPlan prompt, first, second;
  start(prompt, 0, {11, 12, kPoisoned, 14, 5, 11}, {});
  start(prompt, 1, {4, 5}, {});
  row(prompt, 0, 6);
  row(prompt, 1, 2);
  verify(first, 0, PositionRange::at(6));
  verify(first, 1, PositionRange::at(2));
  verify(second, 0, {7, 10});
  verify(second, 1, {3, 6});
  submit(std::move(prompt));
  submit(std::move(first));
  EXPECT_EQ(result().rows[0].ids, RowIds{12});
  const StepResult cut = result();
  EXPECT_EQ(cut.rows[0].ids, RowIds{kPoisoned});
  EXPECT_FALSE(cut.rows[0].finite);
  EXPECT_EQ(cut.rows[1].ids, RowIds{7});
  submit(std::move(second));
  EXPECT_EQ(result().rows[1].ids, RowIds{8}) << "the other's row may be in flight already";
}

using GivenLogitsDeathTest = GivenLogits;

TEST_F(GivenLogitsDeathTest, AStepOfMoreLogitsThanThereIsMemoryForIsABug) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(
      {
        make(1000, 1);
        StepPlan plan;
        SamplingParams scored;
        scored.prompt_logprobs = 0;
        start(plan, 0, std::vector<int32_t>(300, 2), scored);
        row(plan, 0, 258, true);
        submit(std::move(plan));
        result();
      },
      "asks for 258 rows of logits, 257 at most");
}

}  // namespace
}  // namespace perigee
