// Groups of ranks that each have a share of the logits: they sample what one rank with whole rows does, to the bit, and
// end together when one is lost in the middle of a step.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "base/eventually.h"
#include "base/manual_clock.h"
#include "base/queue.h"
#include "base/rng.h"
#include "control/plan_codec.h"
#include "engine/rank_group.h"
#include "exec/exec_testing.h"

namespace perigee {
namespace {

constexpr int32_t kVocab = 48, kSlots = 12, kPromptTokens = 5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Where a rank stops in the middle of a step, until it is released.
struct Stop {
  int32_t rank = -1, forward = 0;       // which forward pass of that rank
  std::atomic<int64_t> num_waiting{0};  // ranks in the last collective of that forward pass
  ManualClock clock;                    // of the watch: goes on once all others wait for that rank
  std::atomic<bool> released{false};
};

// Logits are made up from token and position: whole numbers, so that many are equal, and some that are not finite.
class MadeUpModel final : public Model {
 public:
  MadeUpModel(Comm& comm, std::shared_ptr<Stop> stop) : comm_(comm), stop_(std::move(stop)) {
    info_.vocab = kVocab;
    info_.max_positions = 200;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override { return {CacheGroup::latent(1, 16, 0, format)}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }

  ModelOutput forward(const Batch& batch, Ops& ops, const PagePool&) const override {
    const int64_t share = kVocab / comm_.size();
    if (uint8_t mine = 0, all[kMaxDcpSize]; ops.dcp().size() > 1) ops.dcp().all_gather(&mine, 1, all);
    const Tensor logits = ops.arena().tensor(DType::kF32, std::ssize(batch.logit_rows), share);
    comm_.barrier();
    const bool stops_here = num_forwards_++ == stop_->forward;
    while (stops_here && comm_.rank() == stop_->rank && !stop_->released) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (stop_->num_waiting == comm_.size() - 1) stop_->clock.advance(1);
    }
    for (int64_t i = 0; i < logits.rows; ++i) {
      const auto row = static_cast<size_t>(batch.logit_rows[static_cast<size_t>(i)]);
      const auto key = static_cast<uint64_t>(batch.tokens[row] * 1000 + batch.positions[row]);
      for (int64_t c = 0; c < share; ++c) logits.row<float>(i)[c] = logit(key, comm_.rank() * share + c);
    }
    if (stops_here) ++stop_->num_waiting;
    comm_.barrier();
    return {.logits = logits};
  }

 private:
  // One row in 16 is -inf except for a few, one in 40 all -inf, one in 40 has a NaN, one in 40 an infinity.
  static float logit(uint64_t key, int64_t id) {
    const uint64_t kind = random_u64(key, 1) % 80;
    const auto at = static_cast<int64_t>(random_u64(key, 2) % kVocab);
    if (kind < 5 && (id + at) % 17 != 0) return -kInfinity;
    if (kind < 7) return -kInfinity;
    if (kind < 9 && id == at) return std::nanf("");
    if (kind < 11 && id == at) return kInfinity;
    return static_cast<float>(random_u64(key, 3 + static_cast<uint64_t>(id)) % 6) - 2;
  }

  Comm& comm_;
  const std::shared_ptr<Stop> stop_;
  ModelInfo info_;
  mutable int32_t num_forwards_ = 0;
};

// What the sequence of each slot asks for: every way to sample, each in two slots.
SamplingParams params_of(int32_t slot) {
  SamplingParams p;
  p.temperature = 0;
  p.seed = 100 + static_cast<uint64_t>(slot);
  switch (slot % 6) {
    case 1: p.logprobs = 3; break;
    case 2: p.temperature = 0.9f, p.top_p = 0.8f, p.logprobs = slot < 6 ? 0 : -1; break;
    case 3: p.presence_penalty = 1.5f, p.frequency_penalty = 1.0f, p.repetition_penalty = 1.2f; break;
    case 4:
      p.min_tokens = 6, p.stop_ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 40};
      if (slot < 6) p.logit_bias = {{7, 1.0f}, {44, 1.0f}};
      break;
    case 5: p.prompt_logprobs = 2, p.temperature = slot < 6 ? 0 : 0.7f; break;
    default: break;  // greedy alone
  }
  if (slot == 9) p.temperature = 1.1f;
  return p;
}

bool is_masked(int32_t slot) {
  return slot == 6 || slot == 7;
}

void add_start(StepPlan& plan, int32_t slot) {
  std::vector<int32_t> prompt(kPromptTokens);
  for (int32_t i = 0; i < kPromptTokens; ++i) prompt[static_cast<size_t>(i)] = (7 * slot + 11 * i) % kVocab;
  SequenceStart& start = plan.starts.emplace_back();
  start.slot = SlotId(slot);
  start.sequence = SequenceId(slot);
  start.num_prompt_tokens = kPromptTokens;
  start.sampling = std::make_shared<const SamplingParams>(params_of(slot));
  plan.tokens.insert(plan.tokens.end(), prompt.begin(), prompt.end());
  start.tokens = std::make_shared<const std::vector<int32_t>>(std::move(prompt));
  plan.appends.push_back({.slot = SlotId(slot), .block_index = 0, .place = {PageId(slot)}});
}

// Step 0 runs all prompts, the others a token of each sequence.
StepPlan plan_of(int32_t step) {
  StepPlan plan;
  plan.step = StepId(step);
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    PlanRow& row = plan.rows.emplace_back();
    row.slot = SlotId(slot);
    row.sequence = SequenceId(slot);
    row.masked = is_masked(slot);
    if (step == 0) {
      row.work = Prefill{.tokens_offset = slot * kPromptTokens,
                         .num_tokens = kPromptTokens,
                         .sample = true,
                         .prompt_logprobs = params_of(slot).prompt_logprobs >= 0};
      add_start(plan, slot);
    } else {
      row.position = PositionRange::at(kPromptTokens + step - 1);
      row.work = Decode();
    }
  }
  plan.num_decode_rows = step == 0 ? 0 : kSlots;
  return plan;
}

StepMasks masks_of(int32_t step) {
  StepMasks masks{.step = StepId(step), .rows = {}};
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    if (!is_masked(slot)) continue;
    const uint64_t bits = random_u64(static_cast<uint64_t>(step), static_cast<uint64_t>(slot));
    masks.rows.push_back(
        {.slot = SlotId(slot), .words = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 40)}});
  }
  return masks;
}

// To the bit: where a logit is a NaN, so are log-probabilities, which differ from themselves.
std::vector<uint8_t> bytes_of(const StepResult& result) {
  std::vector<uint8_t> bytes;
  encode(result, bytes);
  return bytes;
}

class ShardGroups : public testing::Test {
 protected:
  // `results` are shared with the group, since a rank that hangs outlives it.
  void start(int32_t size, int32_t dcp_size = 1) {
    RankGroupConfig config;
    config.observers = observers;
    config.rank.limits.dcp_size = dcp_size;
    config.rank.size = size;
    config.rank.layout = RankLayout::kTensorParallel;
    config.rank.device = Device::kRef;
    config.rank.cache_bytes = 1 << 20;
    config.rank.limits.max_sequences = kSlots;
    config.rank.fault = fault;
    config.rank.make_model = [stop = stop](Ops& ops) { return std::make_unique<MadeUpModel>(ops.comm(), stop); };
    config.timeouts = timeouts;
    config.compare = true;
    auto made =
        RankGroup::create(config, [results = results](Step&& step) { results->push_reserved(std::move(step.result)); });
    ASSERT_TRUE(made.ok()) << made.error().message;
    group = std::move(*made);
  }
  ~ShardGroups() override { stop->released = true; }
  StepResult run(int32_t step) {
    group->submit({.plan = plan_of(step)});
    group->set_masks(masks_of(step));
    CHECK(eventually([&] { return results->size() > 0; }), "no result of step ", step);
    return *results->pop();
  }

  RankFault fault;
  std::vector<OpObserver*> observers;
  std::shared_ptr<Stop> stop = std::make_shared<Stop>();
  RankTimeouts timeouts{.clock = &stop->clock};
  std::shared_ptr<BoundedQueue<StepResult>> results = std::make_shared<BoundedQueue<StepResult>>(8);
  std::unique_ptr<Executor> group;
};

TEST_F(ShardGroups, SampleWhatOneRankDoes) {
  constexpr int32_t kSteps = 50;
  std::vector<StepResult> alone;
  int32_t num_not_finite = 0, num_logprobs = 0;
  start(1);
  for (int32_t step = 0; step < kSteps; ++step) {
    for (const RowResult& row : alone.emplace_back(run(step)).rows) {
      num_not_finite += row.finite ? 0 : 1;
      num_logprobs += static_cast<int32_t>(row.logprobs.size() + row.prompt_logprobs.size());
    }
  }
  EXPECT_GT(num_not_finite, 10) << "the test says nothing of such rows";
  EXPECT_GT(num_logprobs, 100) << "the test says nothing of log-probabilities";
  for (const int32_t size : {2, 3, 4, 8}) {
    SCOPED_TRACE(str_cat(size, " ranks"));
    start(size);
    for (int32_t step = 0; step < kSteps; ++step) {
      const StepResult result = run(step), &wanted = alone[static_cast<size_t>(step)];
      for (size_t i = 0; i < kSlots; ++i)
        ASSERT_TRUE(result.rows[i].ids == wanted.rows[i].ids) << "step " << step << " slot " << i;
      ASSERT_EQ(bytes_of(result), bytes_of(wanted)) << "step " << step;
    }
  }
}

TEST_F(ShardGroups, WaitsAreObservedInBothKindsOfGroup) {
  std::array<std::array<int, 4>, 2> counts = {};  // by dcp size, of each rank
  for (const int32_t dcp_size : {1, 2}) {
    std::vector<WaitCounter> waits(4);
    observers = {&waits[0], &waits[1], &waits[2], &waits[3]};
    start(4, dcp_size);
    for (int32_t step = 0; step < 3; ++step) run(step);
    group.reset();
    for (size_t r = 0; r < 4; ++r) counts[static_cast<size_t>(dcp_size - 1)][r] = waits[r].count;
  }
  for (size_t r = 0; r < 4; ++r) {
    EXPECT_GT(counts[0][r], 0) << "rank " << r;
    EXPECT_GE(counts[1][r], counts[0][r] + 3) << "rank " << r << ": one more in each step";
  }
}

// Its device fails before its first collective of the step, in which the others then wait.
TEST_F(ShardGroups, ALostRankEndsTheCollectivesOfTheOthers) {
  fault = {.rank = 1, .step = 3, .mode = RankFault::Mode::kError};
  timeouts.end_s = 1e6;
  start(4);
  for (int32_t step = 0; step < 3; ++step) EXPECT_EQ(run(step).device_lost, "");
  EXPECT_EQ(run(3).device_lost, "a test's fault, in step 3 of rank 1");
  group.reset();  // hangs here if one still waits
  EXPECT_EQ(results->size(), 0u);
}

// Between two collectives of a step, none of which any rank has reported: only their meetings show who is late.
TEST_F(ShardGroups, ARankThatHangsBetweenCollectivesIsLost) {
  stop->rank = 2;
  stop->forward = 3;
  timeouts.behind_s = 0.1;
  timeouts.end_s = 0.05;
  start(4);
  for (int32_t step = 0; step < 3; ++step) EXPECT_EQ(run(step).device_lost, "");
  const std::string why = run(3).device_lost;
  EXPECT_NE(why.find("no answer for"), std::string::npos) << why;
  EXPECT_NE(why.find("in step 3 of rank 2"), std::string::npos) << why;
  group.reset();
  EXPECT_EQ(results->size(), 0u);
}

}  // namespace
}  // namespace perigee
