// The forward pass: what must not change its result, and the bundled model's answers.
#include "model/deepseek_v3.h"

#include <gtest/gtest.h>

#include <cmath>

#include "model/single_sequence.h"
#include "model/test_weights.h"

namespace perigee {
namespace {

std::vector<int32_t> prompt(int64_t n) {
  std::vector<int32_t> out(n);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int32_t>((i * i + 7 * i) % 96);
  return out;
}

double worst(const std::vector<float>& a, const std::vector<float>& b) {
  double out = 0;
  for (size_t i = 0; i < a.size(); ++i) out = std::max<double>(out, std::fabs(a[i] - b[i]));
  return out;
}

class TinyModel : public ::testing::Test {
 protected:
  TinyModel() : ops_(make_ref_ops()) {
    folder_.write("config.json", dump_json(tiny_config()));
    LoadOptions options;
    options.path = folder_.path();
    options.format = LoadFormat::kDummy;
    auto model = load_model(options, *ops_);
    CHECK(model.ok(), model.error().message);
    model_ = std::move(*model);
  }
  std::vector<std::vector<float>> run(const std::vector<int32_t>& ids, size_t chunk, MlaForm form, LatentFormat cache) {
    SingleSequence sequence(*model_, *ops_, cache, static_cast<int64_t>(ids.size()));
    std::vector<std::vector<float>> out;
    for (size_t at = 0; at < ids.size(); at += chunk) {
      const std::vector<int32_t> piece(ids.begin() + at, ids.begin() + std::min(at + chunk, ids.size()));
      for (auto& row : sequence.run(piece, form)) out.push_back(std::move(row));
    }
    return out;
  }
  TempFolder folder_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Model> model_;
};

TEST_F(TinyModel, ChunksAndFormsAgree) {
  const std::vector<int32_t> ids = prompt(150);
  const auto whole = run(ids, 150, MlaForm::kExpanded, LatentFormat::kF32);
  for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kExpanded}) {
    for (const size_t chunk : {1, 13, 64, 150}) {
      const auto pieces = run(ids, chunk, form, LatentFormat::kF32);
      for (size_t i = 0; i < ids.size(); ++i) ASSERT_LE(worst(pieces[i], whole[i]), 1e-5) << chunk << " at " << i;
    }
  }
}

TEST_F(TinyModel, ABf16CacheIsClose) {
  const std::vector<int32_t> ids = prompt(150);
  const auto exact = run(ids, 150, MlaForm::kExpanded, LatentFormat::kF32);
  const auto rounded = run(ids, 150, MlaForm::kExpanded, LatentFormat::kBF16);
  std::vector<double> differences;
  for (size_t i = 0; i < ids.size(); ++i) differences.push_back(worst(rounded[i], exact[i]));
  std::sort(differences.begin(), differences.end());
  // Rounding may change the choice between two experts of almost equal score, which is a large difference.
  EXPECT_GT(differences[0], 0);
  EXPECT_LT(differences[140], 0.05);
}

TEST_F(TinyModel, ABatchOfSequencesEqualsEachAlone) {
  // Two sequences in one pool: one continues at position 70, the other begins; only three rows want logits.
  const std::vector<int32_t> a = prompt(75), b = {3, 1, 4, 1, 5, 9};
  const auto alone_a = run(a, 75, MlaForm::kAbsorbed, LatentFormat::kF32);
  const auto alone_b = run(b, 6, MlaForm::kAbsorbed, LatentFormat::kF32);
  const CacheLayout layout = model_->cache_layout(LatentFormat::kF32);
  Buffer memory(static_cast<size_t>(3 * layout.page_bytes()));
  const PagePool pool{.base = memory.data(), .layout = layout};
  const std::vector<int32_t> pages_a = {2, 0}, pages_b = {1};
  const auto step = [&](const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions,
                        const std::vector<SequenceRows>& sequences, const std::vector<int32_t>& rows) {
    ops_->begin_step();
    const Batch batch{.tokens = tokens, .positions = positions, .sequences = sequences, .logit_rows = rows};
    return model_->forward(batch, *ops_, pool).logits;
  };
  std::vector<int32_t> first(70);
  std::iota(first.begin(), first.end(), 0);
  step({a.begin(), a.begin() + 70}, first, {{.first_row = 0, .num_tokens = 70, .position = 0, .pages = pages_a.data()}},
       {});
  std::vector<int32_t> tokens(a.begin() + 70, a.end());
  tokens.insert(tokens.end(), b.begin(), b.end());
  const Tensor logits = step(tokens, {70, 71, 72, 73, 74, 0, 1, 2, 3, 4, 5},
                             {{.first_row = 0, .num_tokens = 5, .position = 70, .pages = pages_a.data()},
                              {.first_row = 5, .num_tokens = 6, .position = 0, .pages = pages_b.data()}},
                             {4, 5, 10});
  ASSERT_EQ(logits.rows, 3);
  const auto row = [&](int64_t r) { return std::vector<float>(logits.row<float>(r), logits.row<float>(r) + 96); };
  EXPECT_LE(worst(row(0), alone_a[74]), 1e-5);
  EXPECT_EQ(row(1), alone_b[0]);
  EXPECT_EQ(row(2), alone_b[5]);
}

TEST_F(TinyModel, SaysWhatItIs) {
  const ModelInfo& info = model_->info();
  EXPECT_EQ(info.architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(info.vocab, 96);
  EXPECT_EQ(info.num_layers, 3);
  EXPECT_EQ(info.max_positions, 256);
  EXPECT_EQ(info.eos_ids, std::vector<int32_t>{1});
  const CacheLayout layout = model_->cache_layout(LatentFormat::kBF16);
  EXPECT_EQ(layout.latent().row_bytes(), 80);
  EXPECT_EQ(layout.latent().layer_bytes(), 64 * 80);
  EXPECT_EQ(layout.page_bytes(), 3 * 64 * 80);
  EXPECT_EQ(model_->choose_form(TokenKind::kOutput, 1, 100), MlaForm::kAbsorbed);
  EXPECT_EQ(model_->choose_form(TokenKind::kPrompt, 100, 0), MlaForm::kExpanded);
}

// Word problems of tests/data/tiny_tasks/gsm_0shot.jsonl as ids of the bundled tokenizer.
struct Question {
  std::vector<int32_t> ids;
  std::vector<int32_t> answer;  // "#### N"
};

const Question kQuestions[] = {
    // Rosa fills 9 drawers with 10 oranges each. Rosa then finds 10 oranges and gives 33 oranges to Elena. ...
    {{338, 25,  833, 1728, 220, 24, 1125, 443, 220, 16, 15,  648, 381, 13,  833, 837, 1114, 220, 16, 15,
      648, 325, 575, 220,  18,  18, 648,  305, 805, 13, 323, 317, 648, 423, 833, 355, 339,  336, 25},
     {342, 220, 21, 22}},
    // Luca has 35 toys. Ana has 15 more toys than Luca. Paul has 22 more toys than Ana. ...
    {{338, 25, 840, 291, 220, 18,  20,  592, 13,  788, 291, 220, 16,  20,  560, 592, 551, 840, 13,  852, 291,
      220, 17, 17,  560, 592, 551, 788, 13,  323, 317, 592, 363, 788, 325, 852, 355, 604, 339, 336, 25},
     {342, 220, 16, 17, 17}},
    // Leo has 9 lemons. Hugo has 3 times as many lemons as Leo. Hugo gives 16 lemons away. ...
    {{338, 25,  824, 291, 220, 24,  595,  13, 790, 291, 220, 18,  760, 580, 317, 595, 580, 824, 13,
      790, 575, 220, 16,  21,  595, 1016, 13, 323, 317, 595, 363, 391, 355, 604, 574, 339, 336, 25},
     {342, 220, 17, 15}},
};

TEST(TinyK2, AnswersWordProblems) {
  const auto ops = make_ref_ops();
  LoadOptions options;
  options.path = "models/tiny-k2";
  const auto model = load_model(options, *ops);
  ASSERT_TRUE(model.ok()) << model.error().message;
  const std::vector<int32_t>& eos = (*model)->info().eos_ids;
  EXPECT_EQ(eos, (std::vector<int32_t>{2049, 2050}));
#ifdef PERIGEE_CHECK_ABORTS
  const auto questions = std::span(kQuestions).first(1);  // plain loops under a sanitizer: 15 s a question
#else
  const auto questions = std::span(kQuestions);
#endif
  for (const Question& question : questions) {
    SingleSequence sequence(**model, *ops, LatentFormat::kBF16, 256);
    std::vector<int32_t> reply = {sequence.greedy(question.ids)};
    while (reply.back() != eos[0] && reply.size() < 100) reply.push_back(sequence.greedy({reply.back()}));
    ASSERT_EQ(reply.back(), eos[0]);
    reply.pop_back();
    ASSERT_GT(reply.size(), question.answer.size());
    EXPECT_EQ(std::vector<int32_t>(reply.end() - question.answer.size(), reply.end()), question.answer);
  }
}

}  // namespace
}  // namespace perigee
