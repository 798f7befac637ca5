// Progress: log lines about long work, one at most each second, with rate and time left.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace perigee {

class Progress {
 public:
  // `unit` is so many of what is counted, shown with so many digits after the point.
  Progress(const char* unit, double size, int digits) : unit_(unit), size_(size), digits_(digits) {}
  void operator()(const char* phase, int64_t done, int64_t total);

 private:
  const char* unit_;
  double size_;
  int digits_;
  const char* phase_ = nullptr;
  double begin_s_ = system_clock().now_s(), last_s_ = 0;
};

}  // namespace perigee
