#include "router/circuit_breaker.h"

#include <cstddef>

namespace perigee {

bool CircuitBreaker::admits(double now_s) const {
  return !is_open() || (now_s >= open_until_s_ && !trial_under_way_);
}

bool CircuitBreaker::begin() {
  trial_under_way_ = trial_under_way_ || is_open();
  return is_open();
}

void CircuitBreaker::open(double now_s) {
  open_until_s_ = now_s + config_.open_s;
  good_trials_ = 0;
  failures_.clear();
}

void CircuitBreaker::end(bool on_trial, Outcome outcome, double now_s) {
  if (on_trial) {
    trial_under_way_ = false;
    if (outcome == Outcome::kBad) open(now_s);
    if (outcome == Outcome::kGood && ++good_trials_ >= config_.successes) open_until_s_ = 0;
    return;
  }
  // What was sent before it opened says nothing new.
  if (outcome != Outcome::kBad || is_open() || config_.failures == 0) return;
  failures_.push_back(now_s);
  while (failures_.front() < now_s - config_.window_s) failures_.pop_front();
  if (failures_.size() >= static_cast<size_t>(config_.failures)) open(now_s);
}

const char* CircuitBreaker::state(double now_s) const {
  return !is_open() ? "closed" : now_s < open_until_s_ ? "open" : "half_open";
}

}  // namespace perigee
