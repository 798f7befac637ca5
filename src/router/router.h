// Router: one OpenAI-compatible address in front of several servers, its workers: replicas of one model, or prefill
// and decode servers that share the work on each request.
//
// Requests stay on the event loop that has their client's connection, with the connections to workers that it uses:
// no thread and no hop a stream. What the loops share is the WorkerTable.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "router/forward.h"
#include "router/health_checks.h"
#include "router/worker_table.h"
#include "server/http_server.h"

namespace perigee {

struct RouterConfig {
  HttpConfig http;
  std::vector<std::string> workers;  // URLs; or, with forward.split, of both kinds:
  std::vector<std::string> prefill, decode;
  ForwardConfig forward;
  TableConfig table;
  HealthConfig health;
  std::vector<std::string> api_keys;  // clients must send one, and it is passed on; none: whatever they send is
  std::string admin_key;              // of /workers; "": open where the router listens on loopback, else shut
  int64_t max_requests = 32768;       // at once
  double drain_s = 60;
};

class Router {
 public:
  // Opens the port; workers are asked at once whether they are ready. Errors name the field or the URL.
  static Result<std::unique_ptr<Router>> start(RouterConfig config);
  ~Router();

  int port() const;
  bool ready() const;  // each kind of worker that a request needs takes requests

  // New requests get 503 at once; returns when nothing is in flight or after drain_s. Then the port closes.
  void drain_and_stop();

 private:
  struct Impl;
  explicit Router(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

}  // namespace perigee
