#include "router/router.h"

#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <unordered_map>

#include "base/clock.h"
#include "base/log.h"
#include "server/api_error.h"
#include "server/auth.h"
#include "server/request_ids.h"

namespace perigee {

namespace {

HttpReply json_reply(const Json& body, int status = 200) {
  HttpReply reply;
  reply.status = status;
  reply.body = dump_json(body);
  return reply;
}

// Paths that workers have; the router's own come before them. None that a worker might resolve to another one.
bool is_workers_path(std::string_view path) {
  if (path.find("/.") != std::string_view::npos || path.find("%2e") != std::string_view::npos ||
      path.find("%2E") != std::string_view::npos)
    return false;
  return path.starts_with("/v1/") || path == "/tokenize" || path == "/detokenize" || path == "/tokenizer_info" ||
         path == "/version";
}

bool is_admin_path(std::string_view path) {
  return path == "/workers" || path == "/workers/drain" || path == "/workers/remove";
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// A request holds its client's connection and one to a worker.
size_t connections_of_two_files() {
  constexpr size_t kOtherFiles = 512;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_max == RLIM_INFINITY) return SIZE_MAX;
  return limit.rlim_max > 4 * kOtherFiles ? (limit.rlim_max - kOtherFiles) / 2 : kOtherFiles;
}

Result<Role> role_named(const std::string& name) {
  for (const Role role : {Role::kPlain, Role::kPrefill, Role::kDecode})
    if (name == role_name(role)) return role;
  return bad_input("role must be plain, prefill or decode", "role");
}

Status check_config(const RouterConfig& config) {
  const bool split = config.forward.split;
  if (!split && !(config.prefill.empty() && config.decode.empty()))
    return bad_input("--prefill and --decode need --vllm-pd-disaggregation", "vllm-pd-disaggregation");
  if (split && !config.workers.empty())
    return bad_input("with --vllm-pd-disaggregation workers are given by --prefill and --decode, not by --worker-urls",
                     "worker-urls");
  for (const std::string& key : config.api_keys)
    if (key.empty()) return bad_input("--api-key is empty, which would let everybody in", "api-key");
  return {};
}

}  // namespace

struct Router::Impl {
  explicit Impl(RouterConfig config_in)
      : config(std::move(config_in)),
        keys(config.api_keys),
        admin_keys({config.admin_key}),
        table(std::make_shared<WorkerTable>(config.table, system_clock())),
        shared(std::make_shared<ForwardShared>(config.forward, table)) {}

  Status add_workers();
  std::optional<HttpReply> probe(const HttpRequest& request);
  std::optional<HttpReply> check(const HttpRequest& request);
  void handle(const std::shared_ptr<Exchange>& exchange, HttpRequest request);
  HttpReply refusal(int status, const std::string& message);
  bool ready() const;
  HttpReply readiness() const;
  bool admits_admin(const HttpRequest& request) const;
  HttpReply admin(const HttpRequest& request);
  Result<HttpReply> change_workers(const HttpRequest& request);
  Json workers_json() const;
  IdleSockets& idle_of(const HttpLoop* loop);

  const RouterConfig config;
  const KeyRing keys, admin_keys;
  const std::shared_ptr<WorkerTable> table;
  const std::shared_ptr<ForwardShared> shared;
  RequestIds ids;
  std::atomic<bool> draining{false};
  std::atomic<const HttpServer*> serving{nullptr};  // once it is started
  std::mutex mutex;                                 // guards what follows
  std::unordered_map<const HttpLoop*, std::unique_ptr<IdleSockets>> idle;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<HealthChecks> health;
};

Status Router::Impl::add_workers() {
  for (const auto& [urls, role] : {std::pair(&config.workers, Role::kPlain), std::pair(&config.prefill, Role::kPrefill),
                                   std::pair(&config.decode, Role::kDecode)})
    for (const std::string& url : *urls) RETURN_IF_ERROR(table->add(url, role));
  return {};
}

HttpReply Router::Impl::refusal(int status, const std::string& message) {
  shared->metrics.answered(status);
  return error_reply(status, message);
}

bool Router::Impl::ready() const {
  if (draining) return false;
  if (!config.forward.split) return table->takes_requests(Role::kPlain);
  return table->takes_requests(Role::kPrefill) && table->takes_requests(Role::kDecode);
}

HttpReply Router::Impl::readiness() const {
  const bool is_ready = ready();
  Json::Array reasons;
  if (draining) reasons.emplace_back("draining: the router is shutting down");
  for (const Role role : {Role::kPlain, Role::kPrefill, Role::kDecode})
    if ((role != Role::kPlain) == config.forward.split && !table->takes_requests(role))
      reasons.emplace_back(fmt::format("no {} worker takes requests", role_name(role)));
  return json_reply(Json(Json::Object{{"ready", is_ready}, {"reasons", Json(std::move(reasons))}}),
                    is_ready ? 200 : 503);
}

Json Router::Impl::workers_json() const {
  Json::Array workers;
  for (const WorkerView& worker : table->list())
    workers.push_back(Json(Json::Object{{"url", worker.url.text},
                                        {"role", role_name(worker.role)},
                                        {"state", worker.state},
                                        {"breaker", worker.breaker},
                                        {"open_requests", worker.open_requests},
                                        {"requests", worker.requests},
                                        {"failures", worker.failures}}));
  return Json(Json::Object{{"workers", Json(std::move(workers))}});
}

bool Router::Impl::admits_admin(const HttpRequest& request) const {
  return config.admin_key.empty() ? is_loopback(config.http.host) : admin_keys.admits(request);
}

// POST /workers {"url", "role"} adds one, /workers/drain and /workers/remove {"url"} take it out of use.
Result<HttpReply> Router::Impl::change_workers(const HttpRequest& request) {
  ASSIGN_OR_RETURN(const Json body, parse_json(request.body, {.max_bytes = 16u << 10}));
  const Json* url = body.find("url");
  if (url == nullptr || !url->is_string()) return bad_input("url must be a string", "url");
  if (request.path == "/workers") {
    const Json* role = body.find("role");
    const char* usual = config.forward.split ? "" : "plain";
    ASSIGN_OR_RETURN(const Role added, role_named(role != nullptr && role->is_string() ? role->as_string() : usual));
    if ((added != Role::kPlain) != config.forward.split)
      return bad_input(
          "role: prefill and decode workers belong to a router with --vllm-pd-disaggregation, plain ones "
          "to one without",
          "role");
    RETURN_IF_ERROR(table->add(url->as_string(), added));
  } else if (!(request.path == "/workers/drain" ? table->drain(url->as_string()) : table->remove(url->as_string()))) {
    return Error(Code::kNotFound, "there is no worker of that url", "url");
  }
  log_info(request.path, " ", url->as_string().substr(0, 256));
  return json_reply(workers_json());
}

// check() has let it in.
HttpReply Router::Impl::admin(const HttpRequest& request) {
  if (request.method == "GET" && request.path == "/workers") return json_reply(workers_json());
  const std::string* type = request.header("Content-Type");
  if (request.method != "POST") return refusal(405, "workers are changed by POST, and listed by GET /workers");
  // What a web page may send without asking first is not accepted.
  if (type == nullptr || !type->starts_with("application/json"))
    return refusal(415, "Content-Type must be application/json");
  const Result<HttpReply> reply = change_workers(request);
  return reply.ok() ? *reply : error_reply(reply.error());
}

std::optional<HttpReply> Router::Impl::probe(const HttpRequest& request) {
  if (request.method != "GET" && request.method != "HEAD") return std::nullopt;
  const std::string& path = request.path;
  if (path == "/livez") return HttpReply{.content_type = ""};
  if (path == "/readyz") return readiness();
  if (path == "/health" || path == "/ping") return HttpReply{.status = ready() ? 200 : 503, .content_type = ""};
  if (path != "/metrics" || !keys.admits(request)) return std::nullopt;
  return HttpReply{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                   .body = shared->metrics.render(table->list())};
}

std::optional<HttpReply> Router::Impl::check(const HttpRequest& request) {
  if (is_admin_path(request.path)) {
    if (admits_admin(request)) return std::nullopt;
    return refusal(401,
                   "this needs Authorization: Bearer KEY with the key of --admin-api-key; without one, it is open "
                   "where the router listens on loopback alone");
  }
  if (!keys.admits(request)) return refusal(401, "a valid API key is required: Authorization: Bearer KEY");
  if (!is_workers_path(request.path)) return std::nullopt;
  if (draining) return refusal(503, "the router is shutting down; send the request to another one");
  const HttpServer* server = serving;
  if (server != nullptr && static_cast<int64_t>(server->open_answers()) >= config.max_requests)
    return refusal(429, fmt::format("{} requests are under way, the most at once; try again", config.max_requests));
  return std::nullopt;
}

IdleSockets& Router::Impl::idle_of(const HttpLoop* loop) {
  const std::lock_guard lock(mutex);
  auto& sockets = idle[loop];
  if (!sockets) sockets = std::make_unique<IdleSockets>();
  return *sockets;
}

void Router::Impl::handle(const std::shared_ptr<Exchange>& exchange, HttpRequest request) {
  if (is_admin_path(request.path)) return exchange->respond(admin(request));
  if (!is_workers_path(request.path))
    return exchange->respond(refusal(404,
                                     "no such path; there are /v1/…, /tokenize, /detokenize, /tokenizer_info, "
                                     "/version, /livez, /readyz, /health, /metrics and /workers"));
  std::string id = ids.of(request);
  forward(shared, idle_of(exchange->loop().get()), exchange, std::move(request), std::move(id));
}

Router::Router(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Router>> Router::start(RouterConfig config) {
  RETURN_IF_ERROR(check_config(config));
  auto impl = std::make_shared<Impl>(std::move(config));
  RETURN_IF_ERROR(impl->add_workers());
  HttpConfig http = impl->config.http;
  http.max_connections_per_key = 0;
  http.max_connections = std::min(http.max_connections, connections_of_two_files());
  http.sse_comment_s = 1e6;  // workers send comments, where their events end
  // The server is stopped before the router goes; what the callbacks use lives until then.
  Impl* router = impl.get();
  HttpCallbacks callbacks{
      .probe = [router](const HttpRequest& request) { return router->probe(request); },
      .check = [router](const HttpRequest& request) { return router->check(request); },
      .handler = [router](const std::shared_ptr<Exchange>& exchange,
                          HttpRequest request) { router->handle(exchange, std::move(request)); },
      .refusal = [router](int status, const std::string& message) { return router->refusal(status, message); }};
  ASSIGN_OR_RETURN(impl->http, HttpServer::start(http, std::move(callbacks)));
  impl->serving = impl->http.get();
  impl->health = std::make_unique<HealthChecks>(impl->config.health, impl->table);
  return std::unique_ptr<Router>(new Router(std::move(impl)));
}

Router::~Router() {
  impl_->http->stop();
}

int Router::port() const {
  return impl_->http->port();
}
bool Router::ready() const {
  return impl_->ready();
}

void Router::drain_and_stop() {
  impl_->draining = true;
  impl_->http->close_after_replies();
  const double end_s = system_clock().now_s() + impl_->config.drain_s;
  if (const size_t open = impl_->http->open_answers(); open > 0)
    log_info("draining: ", open, " requests in flight, at most ", impl_->config.drain_s, " s");
  while (impl_->http->open_answers() > 0 && system_clock().now_s() < end_s)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (const size_t left = impl_->http->open_answers(); left > 0)
    log_warning("drain limit: ", left, " requests are cut");
  impl_->http->stop();
}

}  // namespace perigee
