// Test only: a clock that stands still until a test moves it. Any thread.
#pragma once

#include <atomic>

#include "base/clock.h"

namespace perigee {

class ManualClock final : public Clock {
 public:
  double now_s() const override { return now_s_; }
  void advance(double seconds) { now_s_.fetch_add(seconds); }

 private:
  std::atomic<double> now_s_{100};
};

}  // namespace perigee
