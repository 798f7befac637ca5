// Load: sends streaming completion requests to a running server and times what comes back.
//
// Definitions are vLLM's: TTFT = first chunk with a choice - send; ITL = gaps between token chunks;
// TPOT = (last chunk - first chunk) / (output tokens - 1), output tokens as the server's usage says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "main/http_client.h"

namespace perigee {

struct LoadRequest {
  std::vector<int32_t> prompt;  // token ids: works without a tokenizer, and prompts are distinct by construction
  int32_t max_tokens = 128;
  bool ignore_eos = true;
};

struct RequestTiming {
  bool ok = false;
  std::string error;
  double send_s = 0, first_s = 0, last_s = 0;  // on one clock
  int32_t prompt_tokens = 0, output_tokens = 0;
  std::vector<double> gaps_s;         // between events with output
  std::vector<int32_t> tokens_after;  // each of these gaps: of one event, several with speculation
  double ttft_s() const { return first_s - send_s; }
  double tpot_s() const { return output_tokens > 1 ? (last_s - first_s) / (output_tokens - 1) : 0; }
};

struct ServerFacts {
  std::string model;
  int64_t max_model_len = 0;
};

// Asks /v1/models. Errors say how to start a server.
Result<ServerFacts> ask_server(const HttpEndpoint& endpoint);

RequestTiming run_request(HttpClient& client, const std::string& model, const LoadRequest& request);

// Runs all requests, at most `concurrency` at a time, started no faster than `rate` a second (0: no limit).
std::vector<RequestTiming> run_load(const HttpEndpoint& endpoint, const std::string& model,
                                    const std::vector<LoadRequest>& requests, int concurrency, double rate);

// `count` prompts of `length` ids below `vocab`, all distinct.
std::vector<LoadRequest> random_prompts(int64_t count, int64_t length, int32_t max_tokens, int32_t vocab,
                                        uint64_t seed);

struct Summary {
  double mean = 0, median = 0, p99 = 0;
};
Summary summarise(std::vector<double> values);

}  // namespace perigee
