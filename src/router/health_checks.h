// HealthChecks: asks every worker at short intervals whether it takes requests, and finds the addresses of their names.
//
// It runs on a loop of its own, so neither requests nor a name server that is slow hold up the other.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "router/upstream.h"
#include "router/worker_table.h"

namespace perigee {

struct HealthConfig {
  std::string path = "/readyz";  // where a worker has no such path (404): /health, as other servers have it
  double interval_s = 2;
  double timeout_s = 5;
};

class HealthChecks {
 public:
  HealthChecks(const HealthConfig& config, std::shared_ptr<WorkerTable> table);
  ~HealthChecks();

 private:
  struct Due {
    double at_s = 0;
    bool under_way = false;
    bool other_path = false;
  };
  void begin_due();
  Task<> tick();
  Task<> check(WorkerView worker);
  Task<ProbeResult> ask(const WorkerView& worker, const SocketAddress& address);
  Task<SocketAddress> resolve(const WorkerView& worker);

  const HealthConfig config_;
  const std::shared_ptr<WorkerTable> table_;
  const std::shared_ptr<HttpLoop> loop_ = std::make_shared<HttpLoop>();
  IdleSockets idle_;
  std::map<uint64_t, Due> due_;  // by worker
};

}  // namespace perigee
