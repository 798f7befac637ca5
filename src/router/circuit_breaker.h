// CircuitBreaker: whether a worker that failed is asked again yet. Pure; times are seconds of one clock.
//
//   closed     requests go through; `failures` of them failing within `window_s` open it
//   open       none goes through for `open_s`
//   half open  one at a time goes through, on trial: `successes` good ones close it, a failure opens it again
#pragma once

#include <cstdint>
#include <deque>

namespace perigee {

struct BreakerConfig {
  int32_t failures = 5;  // 0: never opens
  int32_t successes = 2;
  double open_s = 30;
  double window_s = 60;
};

enum class Outcome {
  kGood,
  kBad,
  kUnknown,  // the client left, or the worker refused for lack of room: nothing was learnt
};

class CircuitBreaker {
 public:
  explicit CircuitBreaker(const BreakerConfig& config) : config_(config) {}

  bool admits(double now_s) const;
  // A request that admits() let through; the answer says whether it is on trial, and goes to end().
  bool begin();
  void end(bool on_trial, Outcome outcome, double now_s);

  const char* state(double now_s) const;  // "closed", "open", "half_open"

 private:
  bool is_open() const { return open_until_s_ > 0; }
  void open(double now_s);

  BreakerConfig config_;
  double open_until_s_ = 0;  // 0: closed
  bool trial_under_way_ = false;
  int32_t good_trials_ = 0;
  std::deque<double> failures_;  // while closed, at most config_.failures
};

}  // namespace perigee
