// ProcessMetrics: the process_* families that Prometheus clients have, and perigee_build_info.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

namespace perigee {

class ProcessMetrics {
 public:
  explicit ProcessMetrics(prometheus::Registry& registry);
  // Takes today's figures from the system; what cannot be read stays as it was.
  void read();

 private:
  prometheus::Counter& cpu_seconds_;
  prometheus::Gauge &resident_bytes_, &virtual_bytes_, &start_time_, &open_fds_, &max_fds_, &threads_;
};

}  // namespace perigee
