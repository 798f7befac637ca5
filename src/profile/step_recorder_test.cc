#include "profile/step_recorder.h"

#include <gtest/gtest.h>

#include "base/manual_clock.h"

namespace perigee {
namespace {

// A GPU on which every launch is known by the mark that was set when it was made.
class FakeTrace final : public ActivityTrace {
 public:
  Status start(bool) override { return {}; }
  void mark(uint64_t id) override { current_ = id; }
  Result<std::vector<DeviceActivity>> stop() override { return std::vector<DeviceActivity>(); }
  uint64_t launch() const { return current_; }

 private:
  uint64_t current_ = 0;
};

TEST(StepRecorder, MarksSayWhatALaunchWasFor) {
  FakeTrace trace;
  StepRecorder recorder;
  recorder.set_mode(StepRecorder::Mode::kMarks, &trace);
  std::vector<uint64_t> launches;
  const auto op = [&](std::initializer_list<std::pair<const char*, int>> labels) {
    recorder.begin_op();
    for (const auto& [label, count] : labels) {
      for (int i = 0; i < count; ++i) launches.push_back(trace.launch());
      recorder.launched(label);
    }
    recorder.end_op();
    launches.push_back(trace.launch());  // outside of ops
  };
  recorder.begin_step();
  op({{"linear", 1}, {"linear", 2}, {"norm", 1}});
  op({{"linear", 1}});
  const std::vector<LaunchPlace> want = {{0, "linear", 0},      {0, "linear", 1},       {0, "linear", 1},
                                         {0, "norm", 0},        {kOutsideModel, "", 0}, {1, "linear", 0},
                                         {kOutsideModel, "", 0}};
  ASSERT_EQ(launches.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const LaunchPlace& place = recorder.marked(launches[i]);
    EXPECT_EQ(place.op, want[i].op) << i;
    EXPECT_EQ(place.label, want[i].label) << i;
    EXPECT_EQ(place.use, want[i].use) << i;
  }
}

TEST(StepRecorder, LaunchesOutsideOfOpsAreNobodys) {
  FakeTrace trace;
  StepRecorder recorder;
  recorder.launched("while loading");
  recorder.set_mode(StepRecorder::Mode::kMarks, &trace);
  recorder.begin_step();
  recorder.launched("before the first op");
  EXPECT_EQ(trace.launch(), 0u);
}

TEST(StepRecorder, TimesBelongToTheOpsAndToWhatLiesBetweenThem) {
  ManualClock clock;
  StepRecorder recorder(clock);
  recorder.set_mode(StepRecorder::Mode::kTimes);
  for (int step = 0; step < 2; ++step) {
    recorder.begin_step();
    clock.advance(10);  // a batch is built
    for (const double seconds : {2.0, 3.0}) {
      recorder.begin_op();
      clock.advance(seconds);
      recorder.end_op();
      clock.advance(0.5);
    }
    clock.advance(20);  // the result is handed over
  }
  const std::vector<StepPiece> pieces = recorder.mean_pieces(clock.now_s());
  ASSERT_EQ(pieces.size(), 4u);
  const double seconds[] = {2, 3, 0.5, 30.5};
  for (size_t i = 0; i < pieces.size(); ++i) EXPECT_NEAR(pieces[i].us, seconds[i] * 1e6, 1e-3) << i;
  EXPECT_EQ(pieces[1].place.op, 1);
  EXPECT_EQ(pieces[2].place.label, "between ops");
}

// The third step has one op more than the others.
TEST(StepRecorder, TimesAreThoseOfTheStepsWithMostOps) {
  ManualClock clock;
  StepRecorder recorder(clock);
  recorder.set_mode(StepRecorder::Mode::kTimes);
  for (const std::vector<double>& ops : {std::vector<double>{2, 3}, {4}, {6, 5, 7}, {8, 9, 1}}) {
    recorder.begin_step();
    for (const double seconds : ops) {
      recorder.begin_op();
      clock.advance(seconds);
      recorder.end_op();
    }
  }
  const std::vector<StepPiece> pieces = recorder.mean_pieces(clock.now_s());
  ASSERT_GE(pieces.size(), 4u);
  const double seconds[] = {14, 14, 8, 9};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(pieces[i].us, seconds[i] / 4 * 1e6, 1e-3) << i;
  EXPECT_EQ(pieces[2].place.op, 2);
  EXPECT_EQ(pieces[3].place.op, kOutsideModel);
}

TEST(StepRecorder, AUseIsCountedWithinAStep) {
  FakeTrace trace;
  StepRecorder recorder;
  recorder.set_mode(StepRecorder::Mode::kMarks, &trace);
  uint64_t launch = 0;
  for (int step = 0; step < 2; ++step) {
    recorder.begin_step();
    recorder.begin_op();
    recorder.launched("linear");
    launch = trace.launch();
    recorder.launched("linear");
    recorder.end_op();
  }
  EXPECT_EQ(recorder.marked(launch).use, 1);
}

// In an op, where it is not the op's; and after the last, where ranks exchange what they have sampled.
TEST(StepRecorder, WaitingForOtherRanksIsAPieceOfItsOwn) {
  ManualClock clock;
  StepRecorder recorder(clock);
  EXPECT_FALSE(recorder.wants_waits());
  recorder.set_mode(StepRecorder::Mode::kTimes);
  EXPECT_TRUE(recorder.wants_waits());
  const auto wait = [&](double seconds) {
    recorder.begin_wait();
    clock.advance(seconds);
    recorder.end_wait();
  };
  recorder.begin_step();
  clock.advance(10);
  recorder.begin_op();
  clock.advance(2);
  wait(7);
  clock.advance(1);
  recorder.end_op();
  clock.advance(5);
  wait(4);
  clock.advance(20);
  const std::vector<StepPiece> pieces = recorder.mean_pieces(clock.now_s());
  ASSERT_EQ(pieces.size(), 4u);
  const double seconds[] = {3, 0, 35, 11};
  for (size_t i = 0; i < pieces.size(); ++i) EXPECT_NEAR(pieces[i].us, seconds[i] * 1e6, 1e-3) << i;
  EXPECT_EQ(pieces[3].place.label, "waiting for other ranks");
}

}  // namespace
}  // namespace perigee
