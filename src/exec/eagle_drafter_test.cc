// A rank that drafts with a model: its drafts are those of a draft that is run anew over the whole text, whatever was
// chunked, rejected or in the batch beside it.
#include "exec/eagle_drafter.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/queue.h"
#include "base/rng.h"
#include "exec/exec_testing.h"
#include "model/eagle3_testing.h"

namespace perigee {
namespace {

constexpr int32_t kDrafts = 3;

int32_t largest(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

struct Pairing {
  const char* name;
  Json target, draft;
};

class Drafting : public testing::TestWithParam<Pairing> {
 protected:
  Drafting() {
    target_folder_.write("config.json", dump_json(target_));
    draft_folder_.write("config.json", dump_json(draft_));
    RankConfig config;
    config.device = Device::kRef;
    config.load = {.path = target_folder_.path(), .format = LoadFormat::kDummy};
    config.draft_model = draft_folder_.path();
    config.cache_bytes = 8 << 20;
    config.limits.max_sequences = 2;
    config.limits.num_drafts = kDrafts;
    rank_ = start_rank(config, results_);
  }

  // A sequence of so many blocks in the slot.
  void start(StepPlan& plan, int32_t slot, int32_t num_prompt, int32_t num_blocks) {
    Rng rng(static_cast<uint64_t>(slot) + 5);
    std::vector<int32_t>& text = texts_[static_cast<size_t>(slot)];
    for (int32_t i = 0; i < num_prompt; ++i) text.push_back(static_cast<int32_t>(rng.below(96)));
    SequenceStart& start = plan.starts.emplace_back();
    start.slot = SlotId(slot);
    start.sequence = SequenceId(slot + 100);
    start.num_prompt_tokens = num_prompt;
    start.tokens = std::make_shared<const std::vector<int32_t>>(text);
    SamplingParams sampling;
    sampling.temperature = 0.3f;  // the made-up target repeats itself less often
    sampling.seed = 7;
    start.sampling = std::make_shared<const SamplingParams>(sampling);
    for (int64_t page = 0; page < rank_->parts().layout.state_pages(); ++page)
      start.state_pages.push_back({PageId(next_page_++), 0});
    for (int32_t block = 0; block < num_blocks; ++block)
      plan.appends.push_back({.slot = SlotId(slot), .block_index = block, .place = {PageId(next_page_++)}});
  }
  void chunk(StepPlan& plan, int32_t slot, int32_t begin, int32_t end) {
    const std::vector<int32_t>& text = texts_[static_cast<size_t>(slot)];
    plan.rows.push_back({.slot = SlotId(slot),
                         .sequence = SequenceId(slot + 100),
                         .position = PositionRange::at(begin),
                         .work = Prefill{.tokens_offset = static_cast<int32_t>(plan.tokens.size()),
                                         .num_tokens = end - begin,
                                         .sample = end == std::ssize(text)}});
    plan.tokens.insert(plan.tokens.end(), text.begin() + begin, text.begin() + end);
  }
  void verify(StepPlan& plan, int32_t slot) {
    const auto position = static_cast<int32_t>(texts_[static_cast<size_t>(slot)].size()) - 1;
    plan.rows.push_back({.slot = SlotId(slot),
                         .sequence = SequenceId(slot + 100),
                         .position = PositionRange::at(position),
                         .work = Verify{kDrafts}});
  }
  // Runs the plan; each of its slots that has sampled then drafts as it would from the beginning.
  void run(StepPlan plan) {
    plan.step = StepId(next_step_++);
    rank_->submit(std::move(plan));
    const StepResult result = std::move(*results_.pop());
    ASSERT_EQ(result.device_lost, "");
    for (const RowResult& row : result.rows) {
      if (row.ids.empty()) continue;
      std::vector<int32_t>& text = texts_[static_cast<size_t>(row.slot.value)];
      text.insert(text.end(), row.ids.begin(), row.ids.end());
      num_accepted_ += static_cast<int32_t>(row.ids.size()) - 1;
      const DraftIds& drafts = (*rank_->parts().slots)[row.slot].drafts;
      const std::vector<int32_t> wanted = anew(text, (*rank_->parts().slots)[row.slot].num_blocks);
      EXPECT_TRUE(std::equal(drafts.begin(), drafts.end(), wanted.begin(), wanted.end()))
          << "slot " << row.slot.value << " after " << text.size() << " tokens";
    }
  }
  int32_t num_accepted() const { return num_accepted_; }

 private:
  // As far as so many blocks reach.
  std::vector<int32_t> anew(const std::vector<int32_t>& text, int32_t num_blocks) const {
    DraftWorld world(target_, draft_);
    const auto length = static_cast<int32_t>(text.size()) - 1;
    std::vector<int32_t> out = {largest(world.first_pass(text, 0, length).logits.back())};  // offsets are zeros
    for (int32_t position = length; std::ssize(out) < kDrafts && position < 64 * num_blocks; ++position)
      out.push_back(largest(world.next_pass(world.last_hidden(), out.back(), position).logits[0]));
    return out;
  }

  const Json target_ = GetParam().target, draft_ = GetParam().draft;
  const TempFolder target_folder_, draft_folder_;
  BoundedQueue<StepResult> results_{8};  // outlives the rank
  std::unique_ptr<RankThread> rank_;
  std::array<std::vector<int32_t>, 2> texts_;  // of each slot: prompt and outputs
  int32_t next_page_ = 0, num_accepted_ = 0;
  int64_t next_step_ = 0;
};

TEST_P(Drafting, IsAsFromScratch) {
  StepPlan first, second;
  start(first, 0, 52, 1);
  chunk(first, 0, 0, 32);
  run(std::move(first));
  start(second, 1, 9, 2);
  chunk(second, 0, 32, 52);
  chunk(second, 1, 0, 9);
  run(std::move(second));
  for (int i = 0; i < 8; ++i) {  // up to the end of slot 0's only block at most
    StepPlan plan;
    if (i < 3) verify(plan, 0);
    verify(plan, 1);
    plan.num_decode_rows = static_cast<int32_t>(plan.rows.size());
    run(std::move(plan));
  }
  std::printf("%d drafts accepted\n", num_accepted());
}

// A guess that would have no place in the sequence's blocks is not made.
TEST_P(Drafting, EndsWithTheBlocks) {
  StepPlan plan;
  start(plan, 0, 63, 1);
  chunk(plan, 0, 0, 63);
  run(std::move(plan));
}

INSTANTIATE_TEST_SUITE_P(
    , Drafting,
    testing::Values(Pairing{"LatentAttention", tiny_config(), draft_config("")},
                    Pairing{"Hybrid", tiny_hybrid_config(), draft_config("")},
                    Pairing{"Llama", tiny_config(), llama_draft_config(R"("draft_vocab_size": 32,)")},
                    Pairing{"LlamaOfHybrid", tiny_hybrid_config(), llama_draft_config(R"("norm_output": true,)")}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace perigee
