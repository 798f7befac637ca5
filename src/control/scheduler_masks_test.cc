// Rows under a constraint: which rows wait for masks, what these are made of, and what moves the constraint.
#include <gtest/gtest.h>

#include "control/constraint_testing.h"
#include "control/scheduler_testing.h"

namespace perigee {
namespace {

constexpr int32_t kVocab = 40, kEnd = 39;

class ConstrainedRows : public testing::Test {
 protected:
  void make(int32_t num_drafts = 0) {
    SchedulerConfig config = small_config();
    config.num_drafts = num_drafts;
    scheduler = std::make_unique<Scheduler>(config);
  }
  SequenceId submit(int32_t num_prompt, SamplingParams sampling, bool constrained = true) {
    Submit submit;
    submit.sequence = SequenceId(next++);
    submit.prompt = std::make_shared<std::vector<int32_t>>(static_cast<size_t>(num_prompt), 1);
    sampling.stop_ids.push_back(kEnd);
    submit.sampling = std::make_shared<SamplingParams>(std::move(sampling));
    if (constrained) submit.constraint = constraint;
    const SequenceId sequence = submit.sequence;
    scheduler->submit(std::move(submit));
    return sequence;
  }
  StepPlan plan() {
    std::optional<StepPlan> plan = scheduler->next_plan(1);
    CHECK(plan.has_value());
    return std::move(*plan);
  }
  void answer(const StepPlan& plan, std::vector<RowIds> ids, DraftIds drafts = {}) {
    StepResult result;
    result.begin(plan);
    for (size_t i = 0; i < plan.rows.size(); ++i) {
      result.rows[i].ids = ids[i];
      result.rows[i].num_drafts = plan.rows[i].num_drafts();
      if (plan.rows[i].masked) result.rows[i].drafts = drafts;
    }
    scheduler->apply(result);
  }
  std::vector<MaskJob> jobs_of(const StepPlan& plan) {
    std::vector<MaskJob> jobs;
    EXPECT_EQ(scheduler->take_mask_jobs(jobs), plan.step);
    return jobs;
  }
  bool has_jobs() {
    std::vector<MaskJob> jobs;
    return scheduler->take_mask_jobs(jobs).has_value();
  }
  static std::vector<int32_t> allowed(const MaskJob& job, size_t place = 0) {
    std::vector<uint32_t> words;
    CHECK(make_masks(job, kVocab, words) && words.size() == 2 * job.num_places());
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < kVocab; ++id)
      if ((words[2 * place + static_cast<size_t>(id / 32)] >> (id % 32) & 1u) != 0) ids.push_back(id);
    return ids;
  }

  std::shared_ptr<const SumConstraint> constraint = std::make_shared<SumConstraint>(kVocab, kEnd, 2, 1);
  std::unique_ptr<Scheduler> scheduler;
  int64_t next = 0;
};

TEST_F(ConstrainedRows, WaitForMasksWhereTheySample) {
  make();
  submit(700, {.max_tokens = 30});
  submit(3, {.max_tokens = 30}, false);
  const StepPlan first = plan();  // a chunk of the first prompt
  ASSERT_EQ(first.rows.size(), 1u);
  EXPECT_FALSE(first.rows[0].masked);
  const StepPlan second = plan();
  ASSERT_EQ(second.rows.size(), 2u);
  EXPECT_TRUE(second.rows[0].masked);
  EXPECT_FALSE(second.rows[1].masked) << "that one has no constraint";
  EXPECT_FALSE(has_jobs()) << "the result of the step before is not in";
  answer(first, {{}});
  const std::vector<MaskJob> jobs = jobs_of(second);
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].slot, second.rows[0].slot);
  EXPECT_EQ(jobs[0].ids_left, 30);
  EXPECT_EQ(allowed(jobs[0]), (std::vector<int32_t>{1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 37}));
  EXPECT_FALSE(has_jobs()) << "once is enough";
}

TEST_F(ConstrainedRows, MoveByWhatResultsConfirm) {
  make();
  submit(3, {.max_tokens = 30});
  const StepPlan first = plan();
  jobs_of(first);
  const StepPlan second = plan();
  EXPECT_FALSE(has_jobs());
  answer(first, {{4}});
  const std::vector<MaskJob> jobs = jobs_of(second);
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].ids_left, 29);
  EXPECT_EQ(allowed(jobs[0]).front(), 2);
  EXPECT_EQ(allowed(jobs[0]).back(), kEnd);
}

TEST_F(ConstrainedRows, HaveMasksForEachDraft) {
  make(3);
  submit(3, {.max_tokens = 30});
  const StepPlan first = plan();
  jobs_of(first);
  const StepPlan second = plan();
  answer(first, {{4}}, {5, 7, 8, 10, 11});
  const std::vector<MaskJob> jobs = jobs_of(second);
  ASSERT_EQ(jobs.size(), 1u);
  ASSERT_EQ(jobs[0].num_places(), 4u) << "the row verifies three of the five";
  EXPECT_EQ(allowed(jobs[0], 0).front(), 2);
  EXPECT_EQ(allowed(jobs[0], 1).front(), 1) << "after 5";
  EXPECT_EQ(allowed(jobs[0], 2).front(), 2) << "after 5 and 7";
  EXPECT_EQ(allowed(jobs[0], 3).front(), 1);
  const StepPlan third = plan();
  answer(second, {{5, 1}}, {});
  const std::vector<MaskJob> later = jobs_of(third);
  ASSERT_EQ(later.size(), 1u);
  EXPECT_EQ(later[0].num_places(), 1u) << "there were no drafts";
  EXPECT_EQ(later[0].ids_left, 27);
  EXPECT_EQ(allowed(later[0]).front(), 2) << "after 5 and 1";
}

TEST_F(ConstrainedRows, OfEndedSequencesHaveNoEntry) {
  make();
  const SequenceId one = submit(3, {.max_tokens = 30});
  submit(3, {.max_tokens = 30});
  const StepPlan first = plan();
  scheduler->cancel({.sequence = one});
  EXPECT_EQ(jobs_of(first).size(), 1u);
  const StepPlan second = plan();
  answer(first, {{4}, {4}});
  jobs_of(second);
  const StepPlan third = plan();
  answer(second, {{kEnd}});
  EXPECT_TRUE(jobs_of(third).empty()) << "the message comes, without an entry";
}

TEST_F(ConstrainedRows, AnIdThatIsNotAllowedEndsItsSequenceAlone) {
  make();
  const SequenceId one = submit(3, {.max_tokens = 30}), other = submit(3, {.max_tokens = 30});
  const StepPlan first = plan();
  answer(first, {{5}, {4}});
  const std::vector<SequenceUpdate> updates = scheduler->take_updates();
  ASSERT_EQ(updates.size(), 2u);
  EXPECT_EQ(updates[0].sequence, one);
  EXPECT_EQ(updates[0].finish, FinishReason::kError);
  EXPECT_EQ(updates[0].error, "token 5 is not what the request's constraint allows");
  EXPECT_TRUE(updates[0].ids.empty());
  EXPECT_EQ(updates[1].sequence, other);
  EXPECT_FALSE(updates[1].finish);
}

// The end is forbidden, unless nothing else is left.
TEST_F(ConstrainedRows, KeepMinTokensWhereTheConstraintCan) {
  make();
  submit(3, {.max_tokens = 30, .min_tokens = 3, .stop_ids = {7}});
  submit(3, {.max_tokens = 6, .min_tokens = 5});
  const StepPlan first = plan();
  for (const SequenceStart& start : first.starts) EXPECT_EQ(start.sampling->min_tokens, 0) << "masks know better";
  std::vector<MaskJob> jobs = jobs_of(first);
  EXPECT_EQ(allowed(jobs[0]).size(), 12u) << "7 is a stop id";
  answer(first, {{4}, {4}});
  const StepPlan second = plan();
  jobs = jobs_of(second);
  EXPECT_EQ(allowed(jobs[0]).back(), 38) << "the end would come too early";
  EXPECT_EQ(allowed(jobs[1]), (std::vector<int32_t>{kEnd})) << "six ids do not suffice for more";
  answer(second, {{2}, {kEnd}});
  const std::vector<SequenceUpdate> updates = scheduler->take_updates();
  EXPECT_EQ(updates.back().finish, FinishReason::kStop) << "min_tokens does not hold up what the constraint ends";
  const StepPlan third = plan();
  jobs = jobs_of(third);
  answer(third, {{1}});
  const StepPlan fourth = plan();
  jobs = jobs_of(fourth);
  EXPECT_EQ(allowed(jobs[0]).back(), kEnd) << "there are three";
}

// A fault of whoever wrote the constraint.
TEST(Masks, AllowNothingWhereTheConstraintDoes) {
  struct Nothing final : ConstraintState {
    bool accept(int32_t) override { return false; }
    void masks(std::span<const int32_t> drafts, int32_t, int64_t words, uint32_t* out) override {
      std::fill_n(out, words * (1 + std::ssize(drafts)), 0u);
      out[words - 1] = 1u << 31;  // no id of the vocabulary
    }
  } nothing;
  std::vector<uint32_t> words;
  EXPECT_FALSE(make_masks({.state = &nothing, .ids_left = 1}, kVocab, words));
}

// Sampled ids are real ids there, too, whatever the draft before was.
TEST(Masks, AfterADraftThatEndsTheReplyAllowAll) {
  const SumConstraint constraint(kVocab, kEnd, 0, 0);
  const auto state = constraint.begin();
  std::vector<uint32_t> words;
  ASSERT_TRUE(make_masks({.state = state.get(), .drafts = {kEnd}, .ids_left = 20}, kVocab, words));
  EXPECT_EQ(words[2], ~0u);
  EXPECT_EQ(words[3], ~0u);
}

}  // namespace
}  // namespace perigee
