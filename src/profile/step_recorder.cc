#include "profile/step_recorder.h"

#include <algorithm>
#include <utility>

namespace perigee {

void StepRecorder::set_mode(Mode mode, ActivityTrace* trace) {
  mode_ = mode;
  trace_ = trace;
  if (mode == Mode::kCosts) costs_.clear();
  if (mode == Mode::kTimes) {
    num_steps_ = 0;
    between_ops_s_ = between_steps_s_ = waits_s_ = 0;
    in_op_ = false;
    seconds_.clear();
    last_s_ = clock_.now_s();
  }
  if (mode == Mode::kMarks) marks_.assign(1, {});
}

void StepRecorder::begin_step() {
  op_ = kOutsideModel;
  if (mode_ == Mode::kTimes) ++num_steps_;
}

void StepRecorder::begin_op() {
  ++op_;
  if (mode_ == Mode::kTimes) {
    (op_ == 0 ? between_steps_s_ : between_ops_s_) += since_last();
    in_op_ = true;
    if (static_cast<size_t>(op_) == seconds_.size()) seconds_.push_back(0);
  } else if (mode_ == Mode::kMarks) {
    next_mark();
  }
}

void StepRecorder::end_op() {
  if (mode_ == Mode::kTimes) {
    take_time();
    in_op_ = false;
  } else if (mode_ == Mode::kMarks) {
    trace_->mark(0);
  }
}

double StepRecorder::since_last() {
  const double now = clock_.now_s();
  return now - std::exchange(last_s_, now);
}

// For what is under way: an op, or what follows the last one of a step.
void StepRecorder::take_time() {
  (in_op_ ? seconds_[static_cast<size_t>(op_)] : between_steps_s_) += since_last();
}

void StepRecorder::end_wait() {
  waits_s_ += since_last();
}

void StepRecorder::next_mark() {
  marks_.push_back({.op = op_, .label = "", .use = 0});
  trace_->mark(marks_.size() - 1);
}

void StepRecorder::launched(const char* label) {
  if (mode_ != Mode::kMarks || op_ == kOutsideModel) return;
  LaunchPlace& place = marks_.back();
  place.label = label;
  const auto earlier = [&](const LaunchPlace& other) { return other.op == place.op && other.label == place.label; };
  place.use = static_cast<int32_t>(std::count_if(marks_.begin(), marks_.end() - 1, earlier));
  next_mark();
}

std::vector<StepPiece> StepRecorder::mean_pieces(double end_s) const {
  const double to_us = 1e6 / static_cast<double>(std::max<int64_t>(num_steps_, 1));
  std::vector<StepPiece> pieces;
  for (size_t i = 0; i < seconds_.size(); ++i)
    pieces.push_back({.place = {.op = static_cast<int32_t>(i)}, .us = seconds_[i] * to_us});
  pieces.push_back({.place = {.label = "between ops"}, .us = between_ops_s_ * to_us});
  pieces.push_back(
      {.place = {.label = "batch, sampling, hand-over"}, .us = (between_steps_s_ + end_s - last_s_) * to_us});
  if (waits_s_ > 0) pieces.push_back({.place = {.label = kWaiting}, .us = waits_s_ * to_us});
  return pieces;
}

}  // namespace perigee
