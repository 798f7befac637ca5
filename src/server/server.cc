#include "server/server.h"

#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "engine/engine.h"
#include "server/app.h"
#include "server/backend.h"

namespace perigee {

namespace {

// Waits for `done` up to `limit_s`.
template <typename Done>
bool wait_until(Done done, double limit_s) {
  const double end_s = system_clock().now_s() + limit_s;
  while (!done()) {
    if (system_clock().now_s() >= end_s) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

Status check_config(const ServerConfig& config) {
  const std::string& field = config.reasoning_field;
  if (field != "both" && field != "reasoning" && field != "reasoning_content")
    return bad_input("reasoning-field must be both, reasoning or reasoning_content", "reasoning-field");
  for (const std::string& key : config.api_keys)  // as from --api-key "$KEY" where KEY is not set
    if (key.empty())
      return bad_input("--api-key is empty, which would let everybody in: give a key, or leave the flag out",
                       "api-key");
  return {};
}

class EngineBackend : public Backend {
 public:
  explicit EngineBackend(Engine& engine) : engine_(engine) {}

  Result<RequestId> submit(EngineRequest request, OutputSink sink) override {
    return engine_.submit(std::move(request), std::move(sink));
  }
  void cancel(RequestId request, int32_t choice, FinishReason reason) override {
    engine_.cancel(request, choice, reason);
  }
  void release(const RemotePrefix& remote) override { engine_.release(remote); }
  EngineStats stats() const override { return engine_.stats(); }
  BackendInfo info() const override {
    return {.vocab = engine_.model().vocab,
            .max_model_len = engine_.max_model_len(),
            .max_choices = engine_.max_choices(),
            .num_pages = engine_.num_pages(),
            .dcp_size = engine_.cache_size().dcp_size,
            .eos_ids = engine_.model().eos_ids,
            .num_drafts = engine_.num_drafts(),
            .takes_leases = engine_.takes_leases()};
  }

 private:
  Engine& engine_;
};

}  // namespace

Server::Server(const ServerConfig& config, std::shared_ptr<App> app, std::unique_ptr<HttpServer> http)
    : config_(config), app_(std::move(app)), http_(std::move(http)) {}

Result<std::unique_ptr<Server>> Server::start(const ServerConfig& config) {
  ASSIGN_OR_RETURN(auto text, ModelText::load(config.model_path));
  return start(config, std::move(text));
}

Result<std::unique_ptr<Server>> Server::start(const ServerConfig& config, std::shared_ptr<const ModelText> text) {
  RETURN_IF_ERROR(check_config(config));
  AppConfig app_config = static_cast<const AppConfig&>(config);
  if (app_config.served_names.empty()) app_config.served_names.push_back(config.model_path);
  const auto app = std::make_shared<App>(std::move(app_config), std::move(text));
  HttpConfig http_config = config.http;
  if (config.api_keys.empty()) http_config.max_connections_per_key = 0;  // no key tells clients apart
  HttpCallbacks callbacks{
      .probe = [app](const HttpRequest& request) { return app->probe(request); },
      .check = [app](const HttpRequest& request) { return app->check_head(request); },
      .handler = [app](const std::shared_ptr<Exchange>& exchange,
                       HttpRequest request) { app->handle(exchange, std::move(request)); },
      .refusal = [app](int status, const std::string& message) { return app->refusal(status, message); }};
  ASSIGN_OR_RETURN(auto http, HttpServer::start(http_config, std::move(callbacks)));
  http->every(config.stats_period_s, [app, period_s = config.stats_period_s] { app->log_stats(period_s); });
  return std::unique_ptr<Server>(new Server(config, app, std::move(http)));
}

Server::~Server() {
  http_->stop();
}

int Server::port() const {
  return http_->port();
}
void Server::set_progress(const std::string& phase, double percent) {
  app_->set_progress(phase, percent);
}
void Server::set_ready(std::shared_ptr<Backend> backend) {
  app_->set_ready(std::move(backend));
}
void Server::drain_and_stop() {
  constexpr double kFlushSeconds = 5;
  app_->begin_drain();
  http_->close_after_replies();
  if (const size_t live = app_->live().count(); live > 0)
    log_info("draining: ", live, " requests in flight, at most ", config_.drain_s, " s");
  if (!wait_until([&] { return app_->live().count() == 0; }, config_.drain_s)) {
    log_warning("drain limit: ending ", app_->live().count(), " requests");
    app_->end_all("the server is shutting down");
  }
  wait_until([&] { return app_->live().count() == 0 && http_->open_answers() == 0; }, kFlushSeconds);
  http_->stop();
}

Result<std::unique_ptr<Server>> Server::start(const ServerConfig& config, Engine* engine) {
  ASSIGN_OR_RETURN(auto server, start(config));
  if (engine != nullptr) server->set_ready(*engine);
  return server;
}

void Server::set_ready(Engine& engine) {
  set_ready(std::make_shared<EngineBackend>(engine));
}

}  // namespace perigee
