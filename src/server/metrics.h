// Metrics: Prometheus text for GET /metrics.
//
// Every family but process_* and perigee_build_info exists twice, as `perigee:NAME` and as `vllm:NAME`, because
// dashboards, autoscalers and benchmark tools read the latter. Thread-safe. What the engine counts is copied from its
// statistics at each scrape; what only the front end sees (latencies as a client feels them) is observed here. Buckets
// are vLLM's.
#pragma once

#include <memory>
#include <string>

#include "engine/messages.h"
#include "server/backend.h"

namespace perigee {

// One finished request, times in seconds from its arrival.
struct RequestRecord {
  const char* reason = "stop";  // finished_reason: stop, length, abort, error
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t longest_output = 0;  // tokens of the longest choice
  int32_t n = 1;
  int64_t max_tokens = 0;
  double submitted_s = 0;    // handed to the engine
  double scheduled_s = 0;    // first planned; 0: never
  double first_token_s = 0;  // 0: there was none
  double last_token_s = 0;
  double end_s = 0;
};

class Metrics {
 public:
  explicit Metrics(const std::string& model_name);
  ~Metrics();

  void set_engine(const BackendInfo& info);  // cache_config_info
  void first_token(double seconds);          // since arrival
  void inter_token(double seconds);          // between two chunks of one choice
  void request_done(const RequestRecord& record);
  void refused(int status);  // a request that never ran: it is in no histogram and no success
  std::string render(const EngineStats& stats);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee
