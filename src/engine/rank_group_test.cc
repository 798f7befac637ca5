// Groups of ranks on devices that do what a test says: late, failing, of different sizes, lost, hanging.
#include "engine/rank_group.h"

#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "base/eventually.h"
#include "base/manual_clock.h"
#include "base/queue.h"
#include "exec/exec_testing.h"

namespace perigee {
namespace {

constexpr int32_t kId = 7;

class TinyModel final : public Model {
 public:
  TinyModel() {
    info_.vocab = 16;
    info_.max_positions = 1000;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override { return {CacheGroup::latent(1, 16, 0, format)}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }
  ModelOutput forward(const Batch&, Ops&, const PagePool&) const override { CHECK(false, "nothing runs it"); }

 private:
  ModelInfo info_;
};

// What the devices of a group do and have done. Shared with them, since a rank that hangs outlives its group.
struct Script {
  std::vector<int32_t> pages;                 // that each rank has room for
  std::set<int32_t> fail_load, fail_reserve;  // these ranks
  std::set<int32_t> hang_load, hang_warm_up, hang_reserve;
  std::set<std::pair<int32_t, int64_t>> breaks;  // (rank, step) in which a device is lost
  std::set<std::pair<int32_t, int64_t>> hangs;   // in which a thread stops until `released`
  std::vector<int32_t> ids;                      // that each rank samples
  ManualClock clock;                             // of the watch: goes on only while a rank hangs and the others wait

  std::mutex mutex;  // guards what follows
  std::vector<int32_t> reserved;
  std::vector<int64_t> done;                          // the steps of each rank below this one are done on its device
  std::vector<int64_t> collected;                     // steps of each rank
  std::vector<int64_t> masks;                         // of each rank: the last step whose mask it has got
  std::vector<int64_t> mask_waits, mask_waits_ended;  // of each rank: how many
  std::vector<int32_t> warm;                          // of each rank: 1 once it has warmed up
  std::atomic<bool> released{false};

  explicit Script(int32_t size)
      : pages(size_t(size), 100),
        ids(size_t(size), kId),
        reserved(size_t(size)),
        done(size_t(size), INT64_MAX),
        collected(size_t(size)),
        masks(size_t(size), -1),
        mask_waits(size_t(size)),
        mask_waits_ended(size_t(size)),
        warm(size_t(size)) {}
  template <typename T>
  T get(const std::vector<T>& values, int32_t rank) {
    const std::lock_guard lock(mutex);
    return values[static_cast<size_t>(rank)];
  }
  template <typename T>
  void set(std::vector<T>& values, int32_t rank, T value) {
    const std::lock_guard lock(mutex);
    values[static_cast<size_t>(rank)] = value;
  }
};

// Stops the thread if the script wants it to hang here. The watch's clock advances once all other ranks have reached
// `so_far`, the furthest they get without this rank.
template <typename T>
void hang_if(bool hangs, Script& script, const std::vector<T>& progress, int64_t so_far) {
  while (hangs && !script.released) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard lock(script.mutex);
    const auto num_waiting = std::count_if(progress.begin(), progress.end(), [&](T p) { return p >= so_far; });
    if (num_waiting == std::ssize(progress) - 1) script.clock.advance(1);
  }
}

class ScriptedDevice final : public RankDevice {
 public:
  ScriptedDevice(std::shared_ptr<Script> script, int32_t rank) : script_(std::move(script)), rank_(rank) {}

  Result<std::unique_ptr<Ops>> make_ops() override { return make_ref_ops(); }
  Result<int32_t> warm_up(RankParts& parts) override {
    parts_ = &parts;
    parts.config.load.progress("weights", 2, 2);
    hang_if(script_->hang_warm_up.contains(rank_), *script_, script_->warm, 1);
    script_->set(script_->warm, rank_, 1);
    return script_->get(script_->pages, rank_);
  }
  Status reserve() override {
    hang_if(script_->hang_reserve.contains(rank_), *script_, script_->reserved, 1);
    if (script_->fail_reserve.contains(rank_)) return Error(Code::kExhausted, "no memory for graphs");
    script_->set(script_->reserved, rank_, parts_->num_pages);
    return {};
  }
  void apply(const StepPlan& plan, const Batch&, int32_t) override {
    hang_if(script_->hangs.contains({rank_, plan.step.value}), *script_, script_->collected, plan.step.value + 1);
  }
  void forward(const StepPlan&, const Batch&, int32_t) override {}
  void mask(const StepPlan& plan, MaskBox& masks) override {
    script_->set(script_->mask_waits, rank_, script_->get(script_->mask_waits, rank_) + 1);
    const MaskBox::Message message = masks.wait(plan.step);
    script_->set(script_->mask_waits_ended, rank_, script_->get(script_->mask_waits_ended, rank_) + 1);
    const std::span<const uint32_t> words = MaskCursor(*message).of(SlotId(0));
    if (words.size() == 1 && words[0] == 1u << kId) script_->set(script_->masks, rank_, plan.step.value);
  }
  void sample(const StepPlan& plan, int32_t buffer) override { steps_[static_cast<size_t>(buffer)] = plan.step.value; }
  bool is_done(int32_t buffer) override {
    return steps_[static_cast<size_t>(buffer)] < script_->get(script_->done, rank_);
  }
  Status collect(const StepPlan& plan, int32_t, StepResult& result) override {
    if (script_->breaks.contains({rank_, plan.step.value})) return Error(Code::kDeviceLost, "a cosmic ray");
    for (RowResult& row : result.rows) row.ids.push_back(script_->ids[static_cast<size_t>(rank_)]);
    script_->set(script_->collected, rank_, script_->get(script_->collected, rank_) + 1);
    return {};
  }
  void fail() override {}
  void log_loss() override {}

 private:
  const std::shared_ptr<Script> script_;
  const int32_t rank_;
  RankParts* parts_ = nullptr;
  std::array<int64_t, 2> steps_ = {};
};

class RankGroups : public testing::Test {
 protected:
  void of(int32_t size) {
    config.rank.size = size;
    script = std::make_shared<Script>(size);
    config.timeouts.clock = &script->clock;
  }
  ~RankGroups() override {
    if (script) script->released = true;
  }
  Result<std::unique_ptr<Executor>> create() {
    config.rank.make_model = [](Ops&) { return std::make_unique<TinyModel>(); };
    return RankGroup::create(
        config, [results = results](Step&& step) { results->push_reserved(std::move(step.result)); },
        [script = script](const RankConfig& rank) -> Result<std::unique_ptr<RankDevice>> {
          rank.load.progress("weights", 1, 2);
          hang_if(script->hang_load.contains(rank.rank), *script, script->warm, 1);
          if (script->fail_load.contains(rank.rank)) return Error(Code::kUnavailable, "no such GPU", "device");
          return std::unique_ptr<RankDevice>(std::make_unique<ScriptedDevice>(script, rank.rank));
        });
  }
  void start() {
    auto made = create();
    ASSERT_TRUE(made.ok()) << made.error().message;
    group = std::move(*made);
  }
  static StepPlan plan(int32_t step) {
    if (step == 0) return prompt_plan({});
    StepPlan plan = decode_plan(step);
    if (const int32_t position = plan.rows[0].position.least; position % kBlockTokens == 0)
      plan.appends.push_back({.slot = SlotId(0), .block_index = position / kBlockTokens, .place = {PageId(0)}});
    return plan;
  }
  StepResult next() {
    const bool there = eventually([&] { return results->size() > 0; });
    CHECK(there, "no result came");
    return *results->pop();
  }

  RankGroupConfig config;
  std::shared_ptr<Script> script;
  // Shared like the script.
  std::shared_ptr<BoundedQueue<StepResult>> results = std::make_shared<BoundedQueue<StepResult>>(64);
  std::unique_ptr<Executor> group;
};

TEST_F(RankGroups, EveryRankReservesThePagesThatAllHaveRoomFor) {
  of(3);
  script->pages = {100, 37, 80};
  start();
  EXPECT_EQ(group->num_pages(), 37);
  EXPECT_EQ(group->model().max_positions, 1000);
  EXPECT_EQ(script->reserved, (std::vector<int32_t>{37, 37, 37}));
}

// Whichever of them fails first.
TEST_F(RankGroups, TheLowestRankThatFailsToLoadIsNamed) {
  of(4);
  script->fail_load = {1, 3};
  const auto made = create();
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().message, "rank 1: no such GPU");
  EXPECT_EQ(made.error().code, Code::kUnavailable);
  EXPECT_EQ(made.error().field, "device");
  EXPECT_EQ(script->reserved, std::vector<int32_t>(4)) << "nobody goes on";
}

TEST_F(RankGroups, ARankThatFailsToReserveEndsTheStart) {
  of(3);
  script->fail_reserve = {2};
  const auto made = create();
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().message, "rank 2: no memory for graphs");
}

TEST_F(RankGroups, OneRankAloneIsNotNamedInItsFailure) {
  of(1);
  script->fail_load = {0};
  EXPECT_EQ(create().error().message, "no such GPU");
}

// In whatever phase; the others wait for it, and are not blamed.
TEST_F(RankGroups, ARankThatHangsInItsStartIsNamed) {
  struct Case {
    std::set<int32_t> Script::*hangs;
    int32_t size;
    const char* phase;
  };
  for (const auto& [hangs, size, phase] :
       {Case{&Script::hang_load, 3, "loading its weights"}, Case{&Script::hang_warm_up, 1, "warming up"},
        Case{&Script::hang_reserve, 3, "reserving its memory"}}) {
    of(size);
    (*script).*hangs = {size - 1};
    config.timeouts.start_s = 0.1;
    config.timeouts.end_s = 0.05;
    const auto made = create();
    ASSERT_FALSE(made.ok());
    const std::string wanted = str_cat("rank ", size - 1, ": no sign of life for 0.1 s while ", phase);
    EXPECT_EQ(made.error().message.find(wanted), 0u) << made.error().message;
    script->released = true;  // too late: nobody waits for it
  }
}

// Rank 1 is late by two steps: results come in order, each once the last rank has reported it.
TEST_F(RankGroups, AResultComesWhenEveryRankHasReported) {
  of(2);
  script->done[1] = 0;
  start();
  group->submit({plan(0)});
  group->submit({plan(1)});
  ASSERT_TRUE(eventually([&] { return script->get(script->collected, 0) == 2; }));
  EXPECT_EQ(results->size(), 0u);
  script->set(script->done, 1, int64_t{1});
  EXPECT_EQ(next().step, StepId(0));
  EXPECT_EQ(results->size(), 0u);
  group->submit({plan(2)});
  script->set(script->done, 1, INT64_MAX);
  for (const int32_t step : {1, 2}) {
    const StepResult result = next();
    EXPECT_EQ(result.step, StepId(step));
    EXPECT_EQ(result.device_lost, "");
    ASSERT_EQ(result.rows.size(), 1u);
    EXPECT_EQ(result.rows[0].ids, RowIds{kId});
  }
}

TEST_F(RankGroups, TheAnswerIsRankZeros) {
  of(3);
  script->ids = {4, 5, 6};
  start();
  group->submit({plan(0)});
  EXPECT_EQ(next().rows.at(0).ids, RowIds{4});
}

TEST_F(RankGroups, ReplicasThatDifferAreABug) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  of(2);
  config.compare = true;
  script->ids = {4, 5};
  const auto run = [&] {
    start();
    group->submit({plan(0)});
    next();
  };
  EXPECT_DEATH(run(), "row 0 of step 0 differs between rank 0 and rank 1");
}

TEST_F(RankGroups, MasksReachEveryRank) {
  of(3);
  start();
  StepPlan masked = plan(0);
  masked.rows[0].masked = true;
  group->submit({std::move(masked)});
  group->set_masks({.step = StepId(0), .rows = {{.slot = SlotId(0), .words = {1u << kId}}}});
  next();
  EXPECT_EQ(script->masks, (std::vector<int64_t>{0, 0, 0}));
}

TEST_F(RankGroups, LongRunsStayInOrder) {
  of(4);
  start();
  constexpr int32_t kSteps = 300;
  for (int32_t step = 0; step < kSteps; ++step) {
    group->submit({plan(step)});
    if (step == 0) continue;
    ASSERT_EQ(next().step, StepId(step - 1));
  }
  EXPECT_EQ(next().step, StepId(kSteps - 1));
  group.reset();
  EXPECT_EQ(script->collected, std::vector<int64_t>(4, kSteps));
}

// Rank 0 waits for its device, which would wait for the rank that is gone; rank 2 for masks that do not come.
TEST_F(RankGroups, ALostRankEndsTheWaitsOfTheOthers) {
  of(3);
  config.timeouts.end_s = 1e6;
  script->breaks = {{1, 1}};
  script->done[0] = 1;
  start();
  group->submit({plan(0)});
  EXPECT_EQ(next().step, StepId(0));
  group->submit({plan(1)});
  const StepResult lost = next();
  EXPECT_EQ(lost.device_lost, "a cosmic ray, in step 1 of rank 1");
  EXPECT_TRUE(lost.rows.empty());
  group->submit({plan(2)});  // by an owner that has not read it yet
  group->set_masks({.step = StepId(2), .rows = {}});
  group.reset();  // hangs here if one still waits
  EXPECT_EQ(results->size(), 0u) << "a loss is told once, and nothing after it";
}

// At once, not when the group ends. Rank 1 is lost in the step before the one whose masks rank 0 waits for.
TEST_F(RankGroups, ALostRankEndsAWaitForMasks) {
  of(2);
  config.timeouts.end_s = 1e6;
  script->breaks = {{1, 0}};
  script->done[1] = 0;
  start();
  group->submit({plan(0)});
  StepPlan masked = plan(1);
  masked.rows[0].masked = true;
  group->submit({std::move(masked)});
  ASSERT_TRUE(eventually([&] { return script->get(script->mask_waits, 0) == 1; }));
  EXPECT_EQ(script->get(script->mask_waits_ended, 0), 0);
  script->set(script->done, 1, INT64_MAX);
  EXPECT_EQ(next().device_lost, "a cosmic ray, in step 0 of rank 1");
  EXPECT_TRUE(eventually([&] { return script->get(script->mask_waits_ended, 0) == 1; }));
}

// Its thread never ends: it is named, and the group ends without it.
TEST_F(RankGroups, ARankThatHangsIsLost) {
  of(3);
  config.timeouts.behind_s = 0.1;
  config.timeouts.end_s = 0.05;
  script->hangs = {{2, 1}};
  start();
  group->submit({plan(0)});
  EXPECT_EQ(next().step, StepId(0));
  group->submit({plan(1)});
  const std::string why = next().device_lost;
  EXPECT_NE(why.find("no answer for"), std::string::npos) << why;
  EXPECT_NE(why.find("in step 1 of rank 2"), std::string::npos) << why;
  group.reset();
  script->released = true;  // too late: nobody listens
  EXPECT_EQ(results->size(), 0u);
}

// Also one that is found while the group ends.
TEST_F(RankGroups, EndsWhileARankHangs) {
  of(2);
  config.timeouts.behind_s = 0.05;
  config.timeouts.end_s = 0.05;
  script->hangs = {{0, 0}};
  start();
  group->submit({plan(0)});
  group.reset();
}

TEST_F(RankGroups, OneRankAloneThatHangsIsLostByTheLimitOfAStep) {
  of(1);
  config.timeouts.step_s = 0.05;
  config.timeouts.end_s = 0.05;
  script->hangs = {{0, 0}};
  start();
  group->submit({plan(0)});
  EXPECT_NE(next().device_lost.find("in step 0 of rank 0"), std::string::npos);
}

std::vector<RankProgress> at_steps(std::initializer_list<int64_t> steps) {
  std::vector<RankProgress> ranks;
  for (const int64_t n : steps) ranks.push_back({.steps = n});
  return ranks;
}

TEST(LagWatch, CountsOnlyTheTimeBehindOthers) {
  LagWatch watch(2, {.behind_s = 3, .step_s = 0, .end_s = 0});
  EXPECT_FALSE(watch.look(at_steps({0, 0}), 2, 100)) << "both work at a long step";
  EXPECT_FALSE(watch.look(at_steps({1, 0}), 2, 2));
  EXPECT_FALSE(watch.look(at_steps({1, 0}), 2, 1)) << "not more than the limit";
  EXPECT_FALSE(watch.look(at_steps({2, 1}), 3, 100)) << "it has moved";
  EXPECT_FALSE(watch.look(at_steps({2, 1}), 3, 2));
  EXPECT_EQ(watch.look(at_steps({2, 1}), 3, 2), 1);
  EXPECT_EQ(watch.silent_s(1), 4);
}

TEST(LagWatch, TheRankFurthestBehindIsLost) {
  LagWatch watch(3, {.behind_s = 3, .step_s = 0, .end_s = 0});
  EXPECT_FALSE(watch.look(at_steps({1, 0, 2}), 2, 0));
  EXPECT_FALSE(watch.look(at_steps({1, 0, 2}), 2, 2));
  EXPECT_EQ(watch.look(at_steps({1, 0, 2}), 2, 2), 1);
}

// Within one step: the others wait for it.
TEST(LagWatch, ARankThatDoesNotComeToAMeetingIsLost) {
  LagWatch watch(3, {.behind_s = 3, .step_s = 0, .end_s = 0});
  using Ranks = std::vector<RankProgress>;
  EXPECT_FALSE(watch.look(Ranks{{1, 8}, {1, 8}, {1, 8}}, 2, 100)) << "all on their way";
  EXPECT_FALSE(watch.look(Ranks{{1, 9}, {1, 8}, {1, 9}}, 2, 2));
  EXPECT_FALSE(watch.look(Ranks{{1, 10}, {1, 9}, {1, 10}}, 2, 2)) << "it has moved";
  EXPECT_FALSE(watch.look(Ranks{{1, 10}, {1, 9}, {1, 10}}, 2, 2));
  EXPECT_EQ(watch.look(Ranks{{1, 10}, {1, 9}, {1, 10}}, 2, 2), 1);
}

TEST(LagWatch, AStepMayHaveALimit) {
  LagWatch watch(1, {.behind_s = 3, .step_s = 10, .end_s = 0});
  EXPECT_FALSE(watch.look(at_steps({5}), 5, 100)) << "nothing to do";
  EXPECT_FALSE(watch.look(at_steps({5}), 6, 8));
  EXPECT_FALSE(watch.look(at_steps({6}), 7, 8)) << "another step";
  EXPECT_FALSE(watch.look(at_steps({6}), 7, 8));
  EXPECT_EQ(watch.look(at_steps({6}), 7, 8), 0);
}

}  // namespace
}  // namespace perigee
