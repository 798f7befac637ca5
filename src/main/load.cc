#include "main/load.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "base/clock.h"
#include "base/json.h"
#include "base/rng.h"

namespace perigee {
namespace {

std::string request_json(const std::string& model, const LoadRequest& request) {
  Json::Array ids(request.prompt.begin(), request.prompt.end());
  Json body;
  body.set("model", model);
  body.set("prompt", Json(std::move(ids)));
  body.set("max_tokens", static_cast<int64_t>(request.max_tokens));
  body.set("temperature", 0);
  body.set("ignore_eos", request.ignore_eos);
  body.set("return_token_ids", true);  // a chunk for each token, also where no text comes of it
  body.set("stream", true);
  Json options;
  options.set("include_usage", true);
  body.set("stream_options", std::move(options));
  return dump_json(body);
}

void read_event(std::string_view text, RequestTiming& timing) {
  if (text == "[DONE]") {
    timing.ok = timing.first_s > 0;
    return;
  }
  const auto event = parse_json(text);
  if (!event.ok()) return;
  if (const Json* error = event->find("error")) timing.error = dump_json(*error);
  if (const Json* usage = event->find("usage"); usage != nullptr && usage->is_object()) {
    timing.prompt_tokens = static_cast<int32_t>(usage->find("prompt_tokens")->as_int());
    timing.output_tokens = static_cast<int32_t>(usage->find("completion_tokens")->as_int());
  }
  const Json* choices = event->find("choices");
  if (choices == nullptr || !choices->is_array() || choices->as_array().empty()) return;
  const double now = system_clock().now_s();
  const Json* ids = choices->as_array()[0].find("token_ids");
  const bool counted = ids != nullptr && ids->is_array();
  if (timing.first_s == 0) {
    timing.first_s = now;
  } else {
    timing.gaps_s.push_back(now - timing.last_s);
    timing.tokens_after.push_back(counted ? static_cast<int32_t>(std::ssize(ids->as_array())) : 1);
  }
  timing.last_s = now;
}

}  // namespace

Result<ServerFacts> ask_server(const HttpEndpoint& endpoint) {
  HttpClient client(endpoint);
  auto reply = client.get("/v1/models");
  if (!reply.ok())
    return Error(Code::kUnavailable, reply.error().message + " (start one with: perigee serve models/tiny-k2)");
  ASSIGN_OR_RETURN(const Json body, parse_json(reply->body));
  const Json* data = body.find("data");
  if (reply->status != 200 || data == nullptr || !data->is_array() || data->as_array().empty())
    return Error(Code::kUnavailable, fmt::format("/v1/models answered HTTP {}", reply->status));
  const Json& first = data->as_array()[0];
  const Json* id = first.find("id");
  const Json* length = first.find("max_model_len");
  if (id == nullptr || !id->is_string()) return Error(Code::kUnavailable, "/v1/models names no model");
  return ServerFacts{.model = id->as_string(),
                     .max_model_len = length != nullptr && length->is_int() ? length->as_int() : 0};
}

RequestTiming run_request(HttpClient& client, const std::string& model, const LoadRequest& request) {
  RequestTiming timing;
  const std::string body = request_json(model, request);
  timing.send_s = system_clock().now_s();
  const auto reply = client.post("/v1/completions", body, [&](std::string_view text) { read_event(text, timing); });
  if (!reply.ok())
    timing.error = reply.error().message;
  else if (reply->status != 200)
    timing.error = fmt::format("HTTP {}: {}", reply->status, reply->body.substr(0, 300));
  timing.ok = timing.ok && timing.error.empty();
  return timing;
}

std::vector<RequestTiming> run_load(const HttpEndpoint& endpoint, const std::string& model,
                                    const std::vector<LoadRequest>& requests, int concurrency, double rate) {
  std::vector<RequestTiming> timings(requests.size());
  std::atomic<size_t> next{0};
  const double begin = system_clock().now_s();
  const auto work = [&] {
    HttpClient client(endpoint);
    for (size_t i; (i = next.fetch_add(1)) < requests.size();) {
      const double due = rate > 0 ? begin + static_cast<double>(i) / rate : 0;
      const double wait = due - system_clock().now_s();
      if (wait > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait));
      timings[i] = run_request(client, model, requests[i]);
    }
  };
  std::vector<std::thread> threads;
  const size_t count = std::min<size_t>(static_cast<size_t>(concurrency), requests.size());
  for (size_t t = 0; t < count; ++t) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  return timings;
}

std::vector<LoadRequest> random_prompts(int64_t count, int64_t length, int32_t max_tokens, int32_t vocab,
                                        uint64_t seed) {
  Rng rng(seed);
  std::vector<LoadRequest> requests(static_cast<size_t>(count));
  for (LoadRequest& request : requests) {
    request.max_tokens = max_tokens;
    request.prompt.resize(static_cast<size_t>(length));
    for (int32_t& id : request.prompt) id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(vocab)));
  }
  return requests;
}

Summary summarise(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(values.size() - 1);
    const auto low = static_cast<size_t>(place);
    const size_t high = std::min(low + 1, values.size() - 1);
    return values[low] + (values[high] - values[low]) * (place - static_cast<double>(low));
  };
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return {.mean = sum / static_cast<double>(values.size()), .median = at(0.5), .p99 = at(0.99)};
}

}  // namespace perigee
