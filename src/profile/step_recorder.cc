#include "profile/step_recorder.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace perigee {

namespace {

template <typename T>
const std::vector<T>& most(const std::vector<std::vector<T>>& steps) {
  const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  return *std::max_element(steps.begin(), steps.end(), fewer);
}

}  // namespace

const std::vector<OpCost>& StepRecorder::costs() const {
  return most(costs_);
}

void StepRecorder::set_mode(Mode mode, ActivityTrace* trace) {
  mode_ = mode;
  trace_ = trace;
  if (mode == Mode::kCosts) costs_.assign(1, {});
  if (mode == Mode::kTimes) {
    between_ops_s_ = between_steps_s_ = waits_s_ = 0;
    in_op_ = false;
    seconds_.clear();
    last_s_ = clock_.now_s();
  }
  if (mode == Mode::kMarks) marks_.assign(1, {});
}

void StepRecorder::begin_step() {
  op_ = kOutsideModel;
  if (mode_ == Mode::kCosts) costs_.emplace_back();
  if (mode_ == Mode::kTimes) seconds_.emplace_back();
  if (mode_ == Mode::kMarks) first_mark_ = std::ssize(marks_);
}

void StepRecorder::begin_op() {
  ++op_;
  if (mode_ == Mode::kTimes) {
    (op_ == 0 ? between_steps_s_ : between_ops_s_) += since_last();
    in_op_ = true;
    seconds_.back().push_back(0);
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
  (in_op_ ? seconds_.back().back() : between_steps_s_) += since_last();
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
  place.use = static_cast<int32_t>(std::count_if(marks_.begin() + first_mark_, marks_.end() - 1, earlier));
  next_mark();
}

std::vector<StepPiece> StepRecorder::mean_pieces(double end_s) const {
  const double to_us = 1e6 / static_cast<double>(std::max<int64_t>(std::ssize(seconds_), 1));
  std::vector<StepPiece> pieces(seconds_.empty() ? 0 : most(seconds_).size());
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i].place.op = static_cast<int32_t>(i);
  double fewer_s = 0;
  for (const std::vector<double>& step : seconds_) {
    if (step.size() < pieces.size())
      fewer_s += std::accumulate(step.begin(), step.end(), 0.0);
    else
      for (size_t i = 0; i < step.size(); ++i) pieces[i].us += step[i] * to_us;
  }
  if (fewer_s > 0) pieces.push_back({.place = {.label = "ops of steps with fewer"}, .us = fewer_s * to_us});
  pieces.push_back({.place = {.label = "between ops"}, .us = between_ops_s_ * to_us});
  pieces.push_back(
      {.place = {.label = "batch, sampling, hand-over"}, .us = (between_steps_s_ + end_s - last_s_) * to_us});
  if (waits_s_ > 0) pieces.push_back({.place = {.label = kWaiting}, .us = waits_s_ * to_us});
  return pieces;
}

}  // namespace perigee
