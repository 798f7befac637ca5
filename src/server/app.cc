#include "server/app.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/clock.h"
#include "base/log.h"
#include "base/utf8.h"
#include "server/api_error.h"
#include "server/app_requests.h"
#include "server/reply_format.h"

namespace perigee {

namespace {

constexpr std::string_view kModelPath = "/v1/models/";
constexpr size_t kPoolCapacity = 1024;  // requests that wait to be read

HttpReply empty_reply(int status) {
  HttpReply reply;
  reply.status = status;
  reply.content_type = "";
  return reply;
}

size_t longest_token_bytes(const ModelText& text) {
  return text.tokenizer() == nullptr ? 0 : text.tokenizer()->longest_token_bytes();
}

}  // namespace

App::App(AppConfig config, std::shared_ptr<const ModelText> text)
    : config_(std::move(config)),
      text_(std::move(text)),
      keys_(config_.api_keys),
      metrics_(std::make_shared<Metrics>(config_.served_names.front())),
      started_(static_cast<int64_t>(wall_time_s())),
      pool_(WorkPool::default_threads(), kPoolCapacity) {}

const std::vector<App::Route>& App::routes() {
  static const std::vector<Route> kRoutes = {
      {.method = "POST", .path = "/v1/completions", .prepare = &App::prepare_completions},
      {.method = "POST", .path = "/v1/chat/completions", .prepare = &App::prepare_chat},
      {"GET", "/v1/models", false, &App::models},
      {.method = "POST", .path = "/tokenize", .prepare = &App::prepare_tokenize},
      {.method = "POST", .path = "/detokenize", .prepare = &App::prepare_detokenize},
      {.method = "GET", .path = "/tokenizer_info", .prepare = &App::prepare_tokenizer_info},
      {"GET", "/version", false, &App::version},
      {"GET", "/load", false, &App::load},
      {"GET", "/metrics", false, &App::answer_probe},
      {"GET", "/ping", false, &App::answer_probe},
      {"POST", "/ping", false, &App::answer_probe},
      {"GET", "/health", true, &App::answer_probe},
      {"GET", "/livez", true, &App::answer_probe},
      {"GET", "/readyz", true, &App::answer_probe},
  };
  return kRoutes;
}

bool App::is_open(const HttpRequest& request) const {
  if (request.path == "/metrics") return config_.metrics_open;
  const auto& all = routes();
  return std::any_of(all.begin(), all.end(), [&](const Route& r) { return r.open && request.path == r.path; });
}

HttpReply App::refusal(int status, const std::string& message) const {
  metrics_->refused(status);
  return error_reply(status, message);
}

// One access line. Probes and scrapes stay out of the log.
void App::answer(ExchangePtr exchange, const HttpRequest& request, HttpReply reply) {
  log_info(request.method, " ", request.path.substr(0, 128), " ", reply.status);
  exchange->respond(std::move(reply));
}

// The line names the field that was refused, not what it held.
void App::refuse(ExchangePtr exchange, const HttpRequest& request, const Error& error) {
  HttpReply reply = error_reply(error);
  metrics_->refused(reply.status);
  log_info(request.method, " ", request.path.substr(0, 128), " ", reply.status,
           error.field.empty() ? "" : ", because of ", error.field);
  exchange->respond(std::move(reply));
}

void App::answer_or_refuse(ExchangePtr exchange, const HttpRequest& request, const Result<Json>& result) {
  if (!result.ok()) return refuse(exchange, request, result.error());
  answer(exchange, request, json_reply(*result));
}

std::shared_ptr<const App::Serving> App::serving() const {
  const std::lock_guard lock(mutex_);
  return serving_;
}

std::optional<HttpReply> App::check_head(const HttpRequest& request) const {
  if (!is_open(request) && !keys_.admits(request))
    return refusal(401, "a valid API key is required: Authorization: Bearer KEY");
  if (request.path.empty()) return refusal(400, "the request target must be a path");
  const bool needs_model = request.path.starts_with("/v1/") || request.path.ends_with("tokenize");
  if (!needs_model) return std::nullopt;
  if (draining_) return refusal(503, "the server is shutting down; send the request to another one");
  const auto now_serving = serving();
  if (!now_serving) return refusal(503, "the model is still loading; see /readyz");
  const std::optional<Error> too_long = check_length(request, now_serving->context);
  if (too_long) return refusal(status_of(too_long->code), too_long->message);
  return std::nullopt;
}

void App::handle(const std::shared_ptr<Exchange>& exchange, HttpRequest request) {
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  for (const Route& route : routes()) {
    if (request.path != route.path || method != route.method) continue;
    if (route.prepare != nullptr) return prepare_in_pool(exchange, std::move(request), route.prepare);
    return (this->*route.handler)(exchange, request);
  }
  const std::string allowed = allowed_methods(request);
  if (allowed.empty()) return answer(exchange, request, refusal(404, no_such_path()));
  if (method == "GET" && request.path.starts_with(kModelPath)) return model(exchange, request);
  HttpReply reply =
      method == "OPTIONS" ? empty_reply(200) : refusal(405, "this path does not take that method, but " + allowed);
  reply.headers.emplace_back("Allow", allowed);
  answer(exchange, request, std::move(reply));
}

std::string App::no_such_path() {
  std::string paths;
  for (const Route& route : routes())
    if (paths.find(route.path) == std::string::npos)
      paths += fmt::format("{}{}", paths.empty() ? "" : ", ", route.path);
  return "no such path; there are " + paths;
}

// For the header Allow; "": no such path.
std::string App::allowed_methods(const HttpRequest& request) const {
  std::string allowed;
  for (const Route& route : routes())
    if (request.path == route.path) allowed += std::string(route.method) + (route.takes_get() ? ", HEAD, " : ", ");
  if (request.path.starts_with(kModelPath) && request.path != kModelPath) allowed = "GET, HEAD, ";
  return allowed.empty() ? allowed : allowed + "OPTIONS";
}

// No body of that many bytes can be a prompt that fits: it is refused before it is read. JSON may write a byte of text
// as \u00XX, and a token is at most so many bytes; what is not prompt text (tools, reasoning that the template leaves
// out, blanks) has 4 MiB.
std::optional<Error> App::check_length(const HttpRequest& request, const RequestContext& context) const {
  constexpr uint64_t kSlack = 4u << 20, kBytesPerByte = 6, kBytesPerId = 12;
  const std::string* given = request.header("Content-Length");
  uint64_t length = 0;
  if (given == nullptr || request.method != "POST") return std::nullopt;
  if (std::from_chars(given->data(), given->data() + given->size(), length).ec != std::errc()) return std::nullopt;
  const uint64_t per_token = std::max(kBytesPerId, kBytesPerByte * longest_token_bytes(*text_));
  const uint64_t prompts = request.path == "/v1/completions" ? context.caps.max_prompts : 1;
  const uint64_t limit = kSlack + prompts * per_token * static_cast<uint64_t>(context.max_model_len);
  if (length <= limit) return std::nullopt;
  return Error(
      Code::kTooLarge,
      fmt::format(
          "a body of {} bytes cannot be a prompt for this model's context of {} tokens; at most {} bytes are read",
          length, context.max_model_len, limit));
}

void App::set_progress(const std::string& phase, double percent) {
  const std::lock_guard lock(mutex_);
  phase_ = phase;
  percent_ = percent;
}

void App::set_ready(std::shared_ptr<Backend> backend) {
  const BackendInfo info = backend->info();
  auto serving = std::make_shared<Serving>();
  serving->backend = std::move(backend);
  serving->takes_leases = info.takes_leases;
  serving->context = {.caps = caps_for(config_.caps, info.max_model_len, longest_token_bytes(*text_)),
                      .served_names = config_.served_names,
                      .defaults = text_->defaults(),
                      .vocab = info.vocab,
                      .max_model_len = info.max_model_len,
                      .max_choices = info.max_choices,
                      .eos_ids = info.eos_ids,
                      .has_tokenizer = text_->tokenizer() != nullptr,
                      .kimi_strict = config_.kimi_strict};
  metrics_->set_engine(info);
  auto tokenizer = text_->shared_tokenizer();
  if (tokenizer != nullptr && !info.eos_ids.empty())
    compiler_ = std::make_unique<GrammarCompiler>(std::move(tokenizer), info.eos_ids, GrammarCompilerOptions());
  const std::lock_guard lock(mutex_);
  serving_ = std::move(serving);
}

HealthInputs App::health_inputs() const {
  HealthInputs inputs;
  const auto now_serving = serving();
  inputs.draining = draining_;
  inputs.stall_s = config_.stall_s;
  inputs.loaded = now_serving != nullptr;
  if (now_serving) inputs.stats = now_serving->backend->stats();
  const std::lock_guard lock(mutex_);
  inputs.phase = phase_;
  inputs.percent = percent_;
  return inputs;
}

std::optional<HttpReply> App::probe(const HttpRequest& request) const {
  const std::string& path = request.path;
  if (path != "/livez" && path != "/readyz" && path != "/health" && path != "/metrics" && path != "/ping")
    return std::nullopt;
  const bool reads = request.method == "GET" || request.method == "HEAD";
  if (!reads && !(path == "/ping" && request.method == "POST")) return std::nullopt;
  if (!is_open(request) && !keys_.admits(request)) return std::nullopt;
  if (path == "/livez") return empty_reply(check_liveness(health_inputs()) ? 200 : 503);
  if (path == "/metrics") return scrape();
  const Readiness readiness = check_readiness(health_inputs());
  HttpReply reply = path == "/readyz" ? json_reply(readiness.body) : empty_reply(200);
  reply.status = readiness.ready ? 200 : 503;
  return reply;
}

// A probe that came with a body, so that it went the way of other requests.
void App::answer_probe(ExchangePtr exchange, const HttpRequest& request) {
  exchange->respond(probe(request).value_or(empty_reply(404)));
}

HttpReply App::scrape() const {
  const auto now_serving = serving();
  HttpReply reply;
  reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
  reply.body = metrics_->render(now_serving ? now_serving->backend->stats() : EngineStats());
  return reply;
}

void App::version(ExchangePtr exchange, const HttpRequest& request) {
  answer(exchange, request, json_reply(Json(Json::Object{{"version", PERIGEE_VERSION}, {"engine", "perigee"}})));
}

void App::load(ExchangePtr exchange, const HttpRequest& request) {
  answer(exchange, request, json_reply(Json(Json::Object{{"server_load", static_cast<int64_t>(live_->count())}})));
}

Json App::model_json(const std::string& name) const {
  return Json(Json::Object{{"id", name},
                           {"object", "model"},
                           {"created", started_},
                           {"owned_by", "perigee"},
                           {"root", config_.model_path},
                           {"parent", Json()},
                           {"max_model_len", serving()->context.max_model_len},
                           {"permission", Json(Json::Array{})}});
}

// GET /v1/models/NAME; clients may write the slash of ORG/NAME as %2F.
void App::model(ExchangePtr exchange, const HttpRequest& request) {
  const std::string_view given = std::string_view(request.path).substr(kModelPath.size());
  std::string asked;
  for (size_t at = 0; at < given.size(); ++at) {
    const bool slash = given.substr(at, 3) == "%2F" || given.substr(at, 3) == "%2f";
    asked += slash ? '/' : given[at];
    at += slash ? 2 : 0;
  }
  const Result<std::string> name = model_name(asked);
  answer_or_refuse(exchange, request, name.ok() ? Result<Json>(model_json(*name)) : name.error());
}

void App::models(ExchangePtr exchange, const HttpRequest& request) {
  Json::Array data;
  for (const std::string& name : config_.served_names) data.push_back(model_json(name));
  answer(exchange, request, json_reply(Json(Json::Object{{"object", "list"}, {"data", Json(std::move(data))}})));
}

Result<std::string> App::model_name(const std::string& asked) const {
  return served_name(config_.served_names, asked);
}

void App::end_all(const std::string& message) {
  ended_ = true;
  live_->end_all(message);
}

// What many requests may cause.
void App::log_once(const std::string& warning) {
  constexpr size_t kMaxWarnings = 256, kMaxBytes = 512;
  const std::lock_guard lock(mutex_);
  std::string shown = excerpt(warning, kMaxBytes);
  for (char& c : shown)  // a client's names may hold line ends
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  if (logged_warnings_.size() < kMaxWarnings && logged_warnings_.insert(shown).second)
    log_warning(shown, " (said once)");
}

void App::log_unknown_fields(const std::vector<std::string>& names) {
  constexpr size_t kMaxNames = 256;
  const std::lock_guard lock(mutex_);
  for (const std::string& name : names) {
    std::string shown = name.substr(0, 64);
    for (char& c : shown)
      if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-' && c != '.') c = '?';
    if (logged_fields_.size() < kMaxNames && logged_fields_.insert(shown).second)
      log_warning("request field '", shown, "' is unknown and has no effect (said once)");
  }
}

namespace {

// Of the last period, with the names that vLLM's line has. Nothing where nothing was drafted.
void log_speculation(const SpeculationTotals& now, const SpeculationTotals& last, double period_s) {
  const auto rows = static_cast<double>(now.rows - last.rows), drafts = static_cast<double>(now.drafts - last.drafts);
  const auto accepted = static_cast<double>(now.accepted() - last.accepted());
  if (rows == 0) return;
  std::string rates;
  for (size_t i = 0; i < now.accepted_at.size() && now.accepted_at[i] > 0; ++i)
    rates += fmt::format("{}{:.3f}", rates.empty() ? "" : ", ",
                         static_cast<double>(now.accepted_at[i] - last.accepted_at[i]) / rows);
  log_info(
      fmt::format("SpecDecoding metrics: Mean acceptance length: {:.2f}, Accepted throughput: {:.2f} tokens/s, "
                  "Drafted throughput: {:.2f} tokens/s, Accepted: {:.0f} tokens, Drafted: {:.0f} tokens, "
                  "Per-position acceptance rate: {}, Avg Draft acceptance rate: {:.1f}%",
                  1 + accepted / rows, accepted / period_s, drafts / period_s, accepted, drafts,
                  rates.empty() ? "0.000" : rates, 100 * accepted / drafts));
}

}  // namespace

void App::log_stats(double period_s) {
  const auto now_serving = serving();
  if (!now_serving) return;
  const EngineStats stats = now_serving->backend->stats();
  const SchedulerGauges& now = stats.scheduler;
  SchedulerGauges last;
  {
    const std::lock_guard lock(mutex_);
    last = std::exchange(last_gauges_, now);
  }
  const int64_t prompt = now.prompt_tokens - last.prompt_tokens;
  const int64_t generated = now.generated_tokens - last.generated_tokens;
  const int32_t waiting = now.waiting + now.awaiting;
  if (prompt + generated + now.running + waiting == 0) return;
  const double hit_rate = now.prefix_queries > 0
                              ? 100.0 * static_cast<double>(now.prefix_hits) / static_cast<double>(now.prefix_queries)
                              : 0;
  log_info(
      fmt::format("Engine 000: Avg prompt throughput: {:.1f} tokens/s, Avg generation throughput: {:.1f} tokens/s, "
                  "Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {:.1f}%, Prefix cache hit rate: {:.1f}%",
                  static_cast<double>(prompt) / period_s, static_cast<double>(generated) / period_s, now.running,
                  waiting, 100 * stats.kv_usage, hit_rate));
  log_speculation(now.speculation, last.speculation, period_s);
}

}  // namespace perigee
