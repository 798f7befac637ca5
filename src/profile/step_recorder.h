// StepRecorder: an observer of a rank's ops for `perigee bench step`. It learns what the ops of a step read, takes
// the time of each by the clock (host backends), or marks each launch in a trace of the GPU.
//
// The mode changes between steps alone, while no plan is in flight. Where a model drafts, a host's step has fewer ops
// when all drafts before it were wrong; tables are of the steps with most ops.
#pragma once

#include <vector>

#include "base/clock.h"
#include "ops/observed_ops.h"
#include "profile/step_table.h"
#include "tensor/cuda/activity.h"

namespace perigee {

class StepRecorder final : public OpObserver {
 public:
  explicit StepRecorder(const Clock& clock = system_clock()) : clock_(clock) {}

  enum class Mode { kOff, kCosts, kTimes, kMarks };
  // kMarks needs the trace. Entering kCosts, kTimes or kMarks forgets what was recorded in it before.
  void set_mode(Mode mode, ActivityTrace* trace = nullptr);

  void begin_step() override;
  bool wants_costs() const override { return mode_ == Mode::kCosts; }
  void cost(OpCost&& cost) override { costs_.back().push_back(std::move(cost)); }
  void begin_op() override;
  void end_op() override;
  void launched(const char* label) override;
  bool wants_waits() const override { return mode_ == Mode::kTimes; }
  void begin_wait() override { take_time(); }
  void end_wait() override;

  const std::vector<OpCost>& costs() const;  // of one step
  // kTimes: of a step, on average, with what lies between ops of one step and between steps, and what this rank has
  // waited for others, which is a piece of its own, as are the ops of steps that have fewer; the last ended at `end_s`.
  std::vector<StepPiece> mean_pieces(double end_s) const;
  const LaunchPlace& marked(uint64_t mark) const { return marks_[mark]; }

 private:
  void next_mark();
  double since_last();
  void take_time();

  const Clock& clock_;
  Mode mode_ = Mode::kOff;
  ActivityTrace* trace_ = nullptr;
  std::vector<std::vector<OpCost>> costs_{1};  // of each step
  int32_t op_ = kOutsideModel;
  bool in_op_ = false;
  double last_s_ = 0, between_ops_s_ = 0, between_steps_s_ = 0, waits_s_ = 0;
  std::vector<std::vector<double>> seconds_;  // of each step's ops
  std::vector<LaunchPlace> marks_;            // by mark; 0: outside
  int64_t first_mark_ = 0;                    // of the step
};

}  // namespace perigee
