// Forward: the way of one request through the router: to a worker and back, or to a prefill worker, a decode worker,
// and back.
//
// A request is tried again, each time by another worker, as long as no byte of an answer to it has come: what comes
// then goes to the client at once. A worker that has no room (429, 503) is passed over, and where all have none the
// last one's refusal is the answer, with its Retry-After. A reply that breaks off later ends with an error, never as if
// it were whole. A client that leaves takes its request away from the worker at once.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "router/router_metrics.h"
#include "router/upstream.h"
#include "router/worker_table.h"
#include "server/http_types.h"

namespace perigee {

struct ForwardConfig {
  bool split = false;       // prefill and decode on different workers
  int32_t max_retries = 3;  // after the first attempt
  UpstreamTimes times;
  size_t max_reply_bytes = 256u << 20;  // of a reply that is no stream
};

// What all requests of a router share.
struct ForwardShared {
  ForwardShared(const ForwardConfig& config_in, std::shared_ptr<WorkerTable> table_in)
      : config(config_in), table(std::move(table_in)) {}

  const ForwardConfig config;
  const std::shared_ptr<WorkerTable> table;
  RouterMetrics metrics;
};

// On the exchange's loop, with its idle connections, which live as long as the loop runs. Returns at the first wait.
void forward(std::shared_ptr<ForwardShared> shared, IdleSockets& idle, std::shared_ptr<Exchange> exchange,
             HttpRequest request, std::string request_id);

// Pure parts, for tests.

// The head of the request that goes to a worker: the client's headers, less those that belong to one connection.
std::string worker_head(const HttpRequest& request, const WorkerUrl& worker, size_t body_bytes,
                        const std::string& request_id);
// The body for the prefill worker; nullopt: it is not a JSON object.
std::optional<std::string> prefill_body(std::string_view body);
// The body for the decode worker, with the transfer parameters of the prefill worker's reply; nullopt: it has none.
std::optional<std::string> decode_body(std::string_view body, std::string_view prefill_reply);
// The text by which prompts are compared: the value of "messages" or "prompt"; "" without one.
std::string_view prompt_text(std::string_view body);

}  // namespace perigee
