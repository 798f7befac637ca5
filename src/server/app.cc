#include "server/app.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <random>

#include "base/clock.h"
#include "base/log.h"
#include "base/rng.h"
#include "server/api_error.h"
#include "server/reply_json.h"
#include "server/text_endpoints.h"

namespace perigee {

namespace {

uint64_t random_key() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

constexpr std::string_view kModelPath = "/v1/models/";

HttpReply empty_reply(int status) {
  HttpReply reply;
  reply.status = status;
  reply.content_type = "";
  return reply;
}

// One access line. Probes and scrapes stay out of the log.
void answer(const std::shared_ptr<Exchange>& exchange, const HttpRequest& request, HttpReply reply) {
  log_info(request.method, " ", request.path.substr(0, 128), " ", reply.status);
  exchange->respond(std::move(reply));
}

bool is_json(const HttpRequest& request) {
  const std::string* type = request.header("Content-Type");
  if (type == nullptr) return true;
  std::string lower = *type;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower.starts_with("application/json");
}

// What not even an empty queue has room for: to try again would not help.
Status check_choices(int64_t num_prompts, int64_t n, int64_t limit) {
  if (num_prompts * n <= limit) return {};
  const char* field = num_prompts > 1 ? "prompt" : "n";
  return bad_input(str_cat(num_prompts, num_prompts > 1 ? " prompts" : " prompt", " with n ", n, " are ",
                           num_prompts * n, " sequences; this server runs and queues at most ", limit,
                           num_prompts > 1 ? ": send several requests" : ": lower n",
                           ", or raise --max-waiting-seqs where it is started"),
                   field);
}

}  // namespace

App::App(AppConfig config, std::shared_ptr<const ModelText> text)
    : config_(std::move(config)),
      text_(std::move(text)),
      keys_(config_.api_keys),
      metrics_(std::make_shared<Metrics>(config_.served_names.front())),
      id_key_(random_key()),
      started_(static_cast<int64_t>(wall_time_s())) {}

const std::vector<App::Route>& App::routes() {
  static const std::vector<Route> kRoutes = {
      {"POST", "/v1/completions", false, &App::completions},
      {"POST", "/v1/chat/completions", false, &App::chat},
      {"GET", "/v1/models", false, &App::models},
      {"POST", "/tokenize", false, &App::post_tokenize},
      {"POST", "/detokenize", false, &App::post_detokenize},
      {"GET", "/tokenizer_info", false, &App::get_tokenizer_info},
      {"GET", "/version", false, &App::version},
      {"GET", "/load", false, &App::load},
      {"GET", "/metrics", false, &App::metrics},
      {"GET", "/ping", false, &App::health},
      {"POST", "/ping", false, &App::health},
      {"GET", "/health", true, &App::health},
      {"GET", "/livez", true, &App::livez},
      {"GET", "/readyz", true, &App::readyz},
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
  if (!serving()) return refusal(503, "the model is still loading; see /readyz");
  return std::nullopt;
}

void App::handle(const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  bool path_known = false;
  for (const Route& route : routes()) {
    if (request.path != route.path) continue;
    path_known = true;
    if (method == route.method) return (this->*route.handler)(exchange, request);
  }
  if (method == "GET" && request.path.starts_with(kModelPath) && request.path != kModelPath)
    return model(exchange, request);
  if (path_known) return answer(exchange, request, refusal(405, "this path does not take that method"));
  answer(exchange, request, refusal(404, "no such path; the API is under /v1"));
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
  const size_t token_bytes = text_->tokenizer() == nullptr ? 0 : text_->tokenizer()->longest_token_bytes();
  serving->context = {.caps = caps_for(config_.caps, info.max_model_len, token_bytes),
                      .served_names = config_.served_names,
                      .defaults = text_->defaults(),
                      .vocab = info.vocab,
                      .max_model_len = info.max_model_len,
                      .max_choices = info.max_choices,
                      .eos_ids = info.eos_ids,
                      .has_tokenizer = text_->tokenizer() != nullptr};
  metrics_->set_engine(info);
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

void App::health(ExchangePtr exchange, const HttpRequest&) {
  exchange->respond(empty_reply(check_readiness(health_inputs()).ready ? 200 : 503));
}

void App::livez(ExchangePtr exchange, const HttpRequest&) {
  exchange->respond(empty_reply(check_liveness(health_inputs()) ? 200 : 503));
}

void App::readyz(ExchangePtr exchange, const HttpRequest&) {
  const Readiness readiness = check_readiness(health_inputs());
  HttpReply reply = json_reply(readiness.body);
  reply.status = readiness.ready ? 200 : 503;
  exchange->respond(std::move(reply));
}

void App::metrics(ExchangePtr exchange, const HttpRequest&) {
  const auto now_serving = serving();
  HttpReply reply;
  reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
  reply.body = metrics_->render(now_serving ? now_serving->backend->stats() : EngineStats());
  exchange->respond(std::move(reply));
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

Result<Json> App::body_of(const HttpRequest& request) const {
  if (!is_json(request))
    return bad_input("Content-Type must be application/json (curl: -H 'Content-Type: application/json')");
  return parse_body(request.body, serving()->context.caps);
}

void App::post_tokenize(ExchangePtr exchange, const HttpRequest& request) {
  Result<Json> body = body_of(request);
  answer_or_refuse(exchange, request, body.ok() ? tokenize(*body, serving()->context, *text_) : body);
}

void App::post_detokenize(ExchangePtr exchange, const HttpRequest& request) {
  Result<Json> body = body_of(request);
  answer_or_refuse(exchange, request, body.ok() ? detokenize(*body, serving()->context, *text_) : body);
}

void App::get_tokenizer_info(ExchangePtr exchange, const HttpRequest& request) {
  answer_or_refuse(exchange, request, tokenizer_info(*text_));
}

Result<std::string> App::model_name(const std::string& asked) const {
  return served_name(config_.served_names, asked);
}

std::string App::new_id() {
  const uint64_t n = id_counter_++;
  return fmt::format("{:016x}{:016x}", random_u64(id_key_, 2 * n), random_u64(id_key_, 2 * n + 1));
}

Result<GenerationSpec> App::make_spec(const RequestFields& fields, const HttpRequest& request,
                                      std::vector<TokenIds> prompts) {
  const auto now_serving = serving();
  const int64_t limit = now_serving->context.max_model_len;
  ASSIGN_OR_RETURN(std::string model, model_name(fields.model));
  if (fields.max_tokens && fields.sampling.min_tokens > *fields.max_tokens)
    return bad_input(str_cat("min_tokens ", fields.sampling.min_tokens, " is over max_tokens ", *fields.max_tokens),
                     "min_tokens");
  RETURN_IF_ERROR(check_choices(std::ssize(prompts), fields.n, now_serving->context.max_choices));
  for (const TokenIds& prompt : prompts) {
    const int64_t length = std::ssize(*prompt);
    if (length == 0) return bad_input("the prompt has no tokens", "prompt");
    // echo with max_tokens 0 still needs one place, which the engine fills and nobody sees.
    const int64_t wanted = std::max<int64_t>(1, fields.max_tokens.value_or(1));
    if (length + wanted > limit)
      return bad_input(str_cat("this model's context is ", limit, " tokens; the prompt has ", length, " and ", wanted,
                               " are wanted; shorten the prompt or lower max_tokens"),
                       "input_tokens");
  }
  log_unknown_fields(fields.unknown);
  GenerationSpec spec;
  spec.backend = now_serving->backend;
  spec.metrics = metrics_;
  spec.live = live_;
  spec.prompts = std::move(prompts);
  spec.fields = fields;
  if (!spec.fields.seed) spec.fields.seed = random_u64(id_key_ ^ 0x5EED, id_counter_++);
  spec.model = std::move(model);
  spec.id = new_id();
  spec.path = request.path;
  spec.max_model_len = limit;
  return spec;
}

ReplyContext App::reply_context(const Serving& serving) const {
  return {.text = text_, .eos_ids = serving.context.eos_ids, .reasoning_field = config_.reasoning_field};
}

std::optional<Error> App::start_completions(ExchangePtr exchange, const HttpRequest& http) {
  constexpr int64_t kDefaultMaxTokens = 16;
  const double arrival_s = system_clock().now_s();
  const auto now_serving = serving();
  const Result<Json> body = body_of(http);
  if (!body.ok()) return body.error();
  const Result<CompletionRequest> request = parse_completion_request(*body, now_serving->context);
  if (!request.ok()) return request.error();
  std::vector<TokenIds> prompts;
  for (const PromptInput& prompt : request->prompts) {
    if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt))
      prompts.push_back(std::make_shared<const std::vector<int32_t>>(*ids));
    else
      prompts.push_back(std::make_shared<const std::vector<int32_t>>(
          text_->tokenizer()->encode(std::get<std::string>(prompt), SpecialsIn::kRecognised)));
  }
  Result<GenerationSpec> spec = make_spec(request->fields, http, prompts);
  if (!spec.ok()) return spec.error();
  if (!spec->fields.max_tokens) spec->fields.max_tokens = kDefaultMaxTokens;
  spec->arrival_s = arrival_s;
  spec->format = make_completion_format(reply_context(*now_serving), *request, std::move(prompts));
  Generation::start(std::move(*spec), exchange);
  return std::nullopt;
}

std::optional<Error> App::start_chat(ExchangePtr exchange, const HttpRequest& http) {
  const double arrival_s = system_clock().now_s();
  const auto now_serving = serving();
  const Result<Json> body = body_of(http);
  if (!body.ok()) return body.error();
  const Result<ChatRequest> request = parse_chat_request(*body, now_serving->context);
  if (!request.ok()) return request.error();
  if (!text_->has_chat()) return bad_input("this checkpoint has no chat template; use /v1/completions", "messages");
  Result<std::vector<int32_t>> ids =
      text_->encode_chat(request->messages, request->tools, request->template_kwargs, request->add_generation_prompt);
  if (!ids.ok()) return ids.error();
  const auto prompt = std::make_shared<const std::vector<int32_t>>(std::move(*ids));
  Result<GenerationSpec> spec = make_spec(request->fields, http, {prompt});
  if (!spec.ok()) return spec.error();
  spec->arrival_s = arrival_s;
  spec->format = make_chat_format(reply_context(*now_serving), *request, prompt);
  Generation::start(std::move(*spec), exchange);
  return std::nullopt;
}

void App::completions(ExchangePtr exchange, const HttpRequest& request) {
  if (const auto error = start_completions(exchange, request)) refuse(exchange, request, *error);
}

void App::chat(ExchangePtr exchange, const HttpRequest& request) {
  if (const auto error = start_chat(exchange, request)) refuse(exchange, request, *error);
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
  if (prompt + generated + now.running + now.waiting == 0) return;
  const double hit_rate = now.prefix_queries > 0
                              ? 100.0 * static_cast<double>(now.prefix_hits) / static_cast<double>(now.prefix_queries)
                              : 0;
  log_info(
      fmt::format("Engine 000: Avg prompt throughput: {:.1f} tokens/s, Avg generation throughput: {:.1f} tokens/s, "
                  "Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {:.1f}%, Prefix cache hit rate: {:.1f}%",
                  static_cast<double>(prompt) / period_s, static_cast<double>(generated) / period_s, now.running,
                  now.waiting, 100 * stats.kv_usage, hit_rate));
}

}  // namespace perigee
