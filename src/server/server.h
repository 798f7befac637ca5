// Server: the OpenAI-compatible front end of one engine: HTTP, SSE, metrics, health, drain.
//
// The port opens at once. Until set_ready(), /v1 answers 503 with Retry-After and /readyz says how far loading is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/app_config.h"
#include "server/backend.h"
#include "server/http_server.h"
#include "server/model_text.h"

namespace perigee {

struct ServerConfig : AppConfig {
  HttpConfig http;
  double drain_s = 60;
  double stats_period_s = 10;  // of the throughput line
};

class App;

class Server {
 public:
  // Loads tokenizer and template from model_path, then opens the port. `engine` may be null and set ready later; it
  // must outlive the server. Errors name the file, the field or the address.
  static Result<std::unique_ptr<Server>> start(const ServerConfig& config, Engine* engine);
  static Result<std::unique_ptr<Server>> start(const ServerConfig& config);
  // The same with text of the caller's (tests).
  static Result<std::unique_ptr<Server>> start(const ServerConfig& config, std::shared_ptr<const ModelText> text);
  ~Server();

  int port() const;
  void set_progress(const std::string& phase, double percent);  // thread-safe
  void set_ready(Engine& engine);                               // thread-safe
  void set_ready(std::shared_ptr<Backend> backend);             // thread-safe

  // New requests get 503 and /readyz turns 503 at once; returns when nothing is in flight or after drain_s, when what
  // is left is ended with an error. Then the port closes.
  void drain_and_stop();

 private:
  Server(const ServerConfig& config, std::shared_ptr<App> app, std::unique_ptr<HttpServer> http);
  const ServerConfig config_;
  const std::shared_ptr<App> app_;
  const std::unique_ptr<HttpServer> http_;
};

}  // namespace perigee
