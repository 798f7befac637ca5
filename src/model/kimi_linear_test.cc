// The hybrid's forward pass: what must not change its result, how its state is kept, taken back and saved.
#include "model/kimi_linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "base/rng.h"
#include "model/single_sequence.h"
#include "model/test_weights.h"

namespace perigee {
namespace {

using Rows = std::vector<std::vector<float>>;

std::vector<int32_t> random_ids(Rng& rng, int64_t n) {
  std::vector<int32_t> out(static_cast<size_t>(n));
  for (int32_t& id : out) id = static_cast<int32_t>(rng.below(96));
  return out;
}

std::vector<int32_t> slice(const std::vector<int32_t>& ids, size_t from, size_t to) {
  return {ids.begin() + static_cast<std::ptrdiff_t>(from), ids.begin() + static_cast<std::ptrdiff_t>(to)};
}

void append(Rows& out, Rows rows) {
  out.insert(out.end(), std::make_move_iterator(rows.begin()), std::make_move_iterator(rows.end()));
}

std::unique_ptr<Model> load_tiny(Ops& ops, const Json& config, bool biased_routing = false) {
  const TempFolder folder;
  folder.write("config.json", dump_json(config));
  LoadOptions options;
  options.path = folder.path();
  options.format = LoadFormat::kDummy;
  options.kimi_linear_biased_routing = biased_routing;
  auto model = load_model(options, ops);
  CHECK(model.ok(), model.error().message);
  return std::move(*model);
}

class Hybrid : public ::testing::Test {
 protected:
  Hybrid() : ops_(make_ref_ops()), model_(load_tiny(*ops_, tiny_hybrid_config())) {}

  SingleSequence sequence(int64_t capacity) { return SingleSequence(*model_, *ops_, LatentFormat::kF32, capacity); }

  Rows run(const std::vector<int32_t>& ids, size_t chunk, MlaForm form = MlaForm::kAbsorbed) {
    SingleSequence s = sequence(std::ssize(ids));
    Rows out;
    for (size_t at = 0; at < ids.size(); at += chunk)
      append(out, s.run(slice(ids, at, std::min(at + chunk, ids.size())), form));
    return out;
  }

  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Model> model_;
  Rng rng_{7};
};

TEST_F(Hybrid, ChunksAgreeBitForBitAndFormsClosely) {
  const std::vector<int32_t> ids = random_ids(rng_, 150);
  const Rows whole = run(ids, 150);
  for (const size_t chunk : {1, 13, 64}) ASSERT_EQ(run(ids, chunk), whole) << chunk;
  const Rows expanded = run(ids, 13, MlaForm::kExpanded);
  for (size_t i = 0; i < ids.size(); ++i)
    for (size_t t = 0; t < 96; ++t) ASSERT_NEAR(expanded[i][t], whole[i][t], 1e-5) << i;
}

TEST_F(Hybrid, ProposedTokensEqualCommittedOnes) {
  const std::vector<int32_t> ids = random_ids(rng_, 80);
  const Rows whole = run(ids, 80);
  for (const size_t chunk : {1, 3, 8}) {
    SingleSequence s = sequence(80);
    Rows out = s.run(slice(ids, 0, 5), MlaForm::kAbsorbed);
    for (size_t at = 5; at < ids.size(); at += chunk)
      append(out, s.propose(slice(ids, at, std::min(at + chunk, ids.size())), MlaForm::kAbsorbed));
    ASSERT_EQ(out, whole) << chunk;
  }
}

// Prefill, decode and verify steps in any order, with any number of proposed tokens taken back: what is kept reads as
// if nothing else had ever run (INV-11).
TEST_F(Hybrid, RejectedTokensNeverWere) {
#ifdef PERIGEE_CHECK_ABORTS
  constexpr int kRounds = 3;  // plain loops under a sanitizer: a second a round
#else
  constexpr int kRounds = 40;
#endif
  for (int round = 0; round < kRounds; ++round) {
    SingleSequence s = sequence(300);
    std::vector<int32_t> kept;
    Rows out;
    int rejections = 0;
    while (kept.size() < 60) {
      const bool propose = !kept.empty() && rng_.below(4) != 0;
      const int64_t n = propose ? rng_.between(1, SingleSequence::kRingTokens) : rng_.between(1, 20);
      const std::vector<int32_t> ids = random_ids(rng_, n);
      Rows rows = propose ? s.propose(ids, MlaForm::kAbsorbed) : s.run(ids, MlaForm::kAbsorbed);
      const int64_t rejected = propose ? rng_.between(0, n) : 0;
      s.reject(static_cast<int32_t>(rejected));
      rejections += rejected > 0;
      kept.insert(kept.end(), ids.begin(), ids.end() - rejected);
      rows.resize(static_cast<size_t>(n - rejected));
      append(out, std::move(rows));
      ASSERT_EQ(s.length(), std::ssize(kept));
    }
    ASSERT_GT(rejections, 0);
    ASSERT_EQ(out, run(kept, kept.size())) << round;
  }
}

// Two sequences in one pool whose pages interleave: one decodes in slot 1, the other begins in slot 0.
TEST_F(Hybrid, ABatchOfSequencesEqualsEachAlone) {
  const std::vector<int32_t> a = random_ids(rng_, 72), b = random_ids(rng_, 6);
  const Rows alone_a = run(a, 72), alone_b = run(b, 6);
  const CacheLayout layout = model_->cache_layout(LatentFormat::kF32);
  ASSERT_GT(layout.state_pages(), 1);
  const int64_t pages = 2 * layout.state_pages() + 3;
  Buffer memory(static_cast<size_t>(pages * layout.page_bytes()));
  Buffer ring(static_cast<size_t>(2 * layout.ring_slot_bytes(1)));
  const PagePool pool{.base = memory.data(), .layout = layout, .ring = ring.data(), .ring_tokens = 1};
  std::vector<int32_t> state_a, state_b;
  for (int32_t p = 0; p < layout.state_pages(); ++p) {
    state_a.push_back(2 * p);
    state_b.push_back(2 * p + 1);
  }
  const auto last = static_cast<int32_t>(pages - 1);
  const std::vector<int32_t> blocks_a = {last, last - 2}, blocks_b = {last - 1};
  const auto step = [&](const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions,
                        const std::vector<SequenceRows>& sequences, const std::vector<int32_t>& rows) {
    ops_->begin_step();
    const Batch batch{.tokens = tokens, .positions = positions, .sequences = sequences, .logit_rows = rows};
    const Tensor logits = model_->forward(batch, *ops_, pool).logits;
    Rows out;
    for (int64_t r = 0; r < logits.rows; ++r) out.emplace_back(logits.row<float>(r), logits.row<float>(r) + 96);
    return out;
  };
  std::vector<int32_t> first(70);
  std::iota(first.begin(), first.end(), 0);
  SequenceRows of_a{
      .num_tokens = 70, .pages = blocks_a.data(), .state_pages = state_a.data(), .slot = 1, .commit_all = true};
  step(slice(a, 0, 70), first, {of_a}, {});
  of_a.num_tokens = 1;
  of_a.commit_all = false;
  of_a.position = of_a.committed = 70;
  const SequenceRows of_b{.first_row = 1,
                          .num_tokens = 6,
                          .pages = blocks_b.data(),
                          .state_pages = state_b.data(),
                          .slot = 0,
                          .commit_all = true};
  std::vector<int32_t> tokens = {a[70]};
  tokens.insert(tokens.end(), b.begin(), b.end());
  const Rows mixed = step(tokens, {70, 0, 1, 2, 3, 4, 5}, {of_a, of_b}, {0, 1, 6});
  EXPECT_EQ(mixed, (Rows{alone_a[70], alone_b[0], alone_b[5]}));
  of_a.position = 71;
  EXPECT_EQ(step({a[71]}, {71}, {of_a}, {0}), Rows{alone_a[71]});
}

// A chunk that crosses a block boundary leaves a checkpoint there; a second sequence goes on from a copy of it.
TEST_F(Hybrid, ACheckpointIsTheStateAtItsPosition) {
  const std::vector<int32_t> ids = random_ids(rng_, 100);
  const Rows whole = run(ids, 100);
  const CacheLayout layout = model_->cache_layout(LatentFormat::kF32);
  const auto n = static_cast<int32_t>(layout.state_pages());
  Buffer memory(static_cast<size_t>((2 * n + 2) * layout.page_bytes()));
  Buffer ring(static_cast<size_t>(layout.ring_slot_bytes(1)));
  const PagePool pool{.base = memory.data(), .layout = layout, .ring = ring.data()};
  std::vector<int32_t> state(static_cast<size_t>(n)), checkpoint(static_cast<size_t>(n)), positions(100);
  std::iota(state.begin(), state.end(), 0);
  std::iota(checkpoint.begin(), checkpoint.end(), n);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int32_t> blocks = {2 * n, 2 * n + 1}, row = {35};
  const auto step = [&](const SequenceRows& s) {
    ops_->begin_step();
    const std::vector<int32_t> rows = {s.num_tokens - 1};
    const auto from = static_cast<size_t>(s.position);
    const ModelOutput out = model_->forward({.tokens = slice(ids, from, from + static_cast<size_t>(s.num_tokens)),
                                             .positions = slice(positions, from, 100),
                                             .sequences = std::span(&s, 1),
                                             .logit_rows = rows},
                                            *ops_, pool);
    return std::vector<float>(out.logits.row<float>(0), out.logits.row<float>(0) + 96);
  };
  const StateCheckpoint at_64{.position = 64, .pages = checkpoint.data()};
  const SequenceRows all{.num_tokens = 100,
                         .pages = blocks.data(),
                         .state_pages = state.data(),
                         .commit_all = true,
                         .checkpoints = {&at_64, 1}};
  EXPECT_EQ(step(all), whole[99]);
  const SequenceRows rest{.num_tokens = 36,
                          .position = 64,
                          .pages = blocks.data(),
                          .state_pages = checkpoint.data(),
                          .committed = 64,
                          .commit_all = true};
  EXPECT_EQ(step(rest), whole[99]);
}

TEST_F(Hybrid, SaysWhatItIs) {
  const ModelInfo& info = model_->info();
  EXPECT_EQ(info.architecture, "KimiLinearForCausalLM");
  EXPECT_EQ(info.num_layers, 5);
  EXPECT_EQ(info.max_positions, 512);
  EXPECT_EQ(model_->choose_form(TokenKind::kOutput, 1, 100), MlaForm::kAbsorbed);
  // Two latent layers make a block of 64 * 80 * 2 bytes, less than one unit: the unit sets the page.
  const CacheLayout layout = model_->cache_layout(LatentFormat::kBF16);
  EXPECT_EQ(layout.latent().layers, 2);
  EXPECT_EQ(layout.state().units(), 9);
  EXPECT_EQ(layout.state().unit_bytes, 65536 + 3 * 3 * 128 * 4);
  EXPECT_EQ(layout.page_bytes(), layout.state().unit_bytes);
  EXPECT_EQ(layout.state_pages(), 9);
}

TEST(HybridLayout, OfKimiLinear48B) {
  const CacheGroup latent = CacheGroup::latent(7, 512, 64, LatentFormat::kBF16);
  CacheLayout layout = {latent};
  EXPECT_EQ(layout.state_pages(), 0);
  EXPECT_EQ(layout.ring_slot_bytes(1), 0);
  layout = {latent, CacheGroup::state(20, 32, 70144, 2112)};
  EXPECT_EQ(layout.page_bytes(), 516096);
  EXPECT_EQ(layout.units_per_page(), 7);
  EXPECT_EQ(layout.state_pages(), 92);
  std::vector<uint8_t> arena(6 * layout.page_bytes()), ring(2 * layout.ring_slot_bytes(4));
  const PagePool pool{.base = arena.data(), .layout = layout, .ring = ring.data(), .ring_tokens = 4};
  EXPECT_EQ(pool.latent_layer(6).base - pool.base, 6 * 64 * 1152);
  const StateLayer last = pool.state_layer(19);
  EXPECT_EQ(last.first_unit, 608);
  const std::vector<int32_t> pages(92, 5);
  EXPECT_EQ(last.unit(pages.data(), 31) - pool.base, 5 * 516096 + 639 % 7 * 70144);
  EXPECT_EQ(last.ring_token(1, 31, 7) - pool.ring, 640 * 4 * 2112 + (639 * 4 + 3) * 2112);
}

TEST(BiasedRouting, IsASwitchOfKimiLinearAlone) {
  const auto ops = make_ref_ops();
  const auto logits = [&](bool biased) {
    const auto model = load_tiny(*ops, tiny_hybrid_config(), biased);
    return SingleSequence(*model, *ops, LatentFormat::kF32, 8).run({5, 17, 80}, MlaForm::kAbsorbed).back();
  };
  EXPECT_NE(logits(true), logits(false));
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  LoadOptions options;
  options.path = folder.path();
  options.format = LoadFormat::kDummy;
  options.kimi_linear_biased_routing = true;
  const auto other = load_model(options, *ops);
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.error().message.find("DeepseekV3ForCausalLM"), std::string::npos) << other.error().message;
}

}  // namespace
}  // namespace perigee
