// RouterMetrics: Prometheus text of a router, for GET /metrics. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "router/worker_table.h"

namespace perigee {

class RouterMetrics {
 public:
  RouterMetrics();
  ~RouterMetrics();

  void answered(int status);        // a request, by the status its client saw
  void retried();                   // asked again of another worker
  void cut();                       // a stream that its worker did not end, and an error event did
  void client_left();               // before its answer was complete
  void first_byte(double seconds);  // of a reply, since the request's arrival
  void prefilled(double seconds);   // what the prefill worker took
  std::string render(const std::vector<WorkerView>& workers);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace perigee
