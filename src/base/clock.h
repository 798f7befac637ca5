// Time as the engine sees it: seconds of a monotonic clock, passed in so that tests and the simulator own it.
#pragma once

namespace perigee {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual double now_s() const = 0;
};

const Clock& system_clock();  // monotonic
double wall_time_s();         // seconds since 1970, for `created` fields and logs only

}  // namespace perigee
