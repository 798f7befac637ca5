#include "engine/engine.h"
#include "server/backend.h"
#include "server/server.h"

namespace perigee {

namespace {

class EngineBackend : public Backend {
 public:
  explicit EngineBackend(Engine& engine) : engine_(engine) {}

  Result<RequestId> submit(EngineRequest request, OutputSink sink) override {
    return engine_.submit(std::move(request), std::move(sink));
  }
  void cancel(RequestId request, int32_t choice, FinishReason reason) override {
    engine_.cancel(request, choice, reason);
  }
  EngineStats stats() const override { return engine_.stats(); }
  BackendInfo info() const override {
    return {.vocab = engine_.model().vocab,
            .max_model_len = engine_.max_model_len(),
            .max_choices = engine_.max_choices(),
            .num_pages = engine_.num_pages(),
            .eos_ids = engine_.model().eos_ids};
  }

 private:
  Engine& engine_;
};

}  // namespace

std::shared_ptr<Backend> make_engine_backend(Engine& engine) {
  return std::make_shared<EngineBackend>(engine);
}

Result<std::unique_ptr<Server>> Server::start(const ServerConfig& config, Engine* engine) {
  ASSIGN_OR_RETURN(auto server, start(config));
  if (engine != nullptr) server->set_ready(*engine);
  return server;
}

void Server::set_ready(Engine& engine) {
  set_ready(make_engine_backend(engine));
}

}  // namespace perigee
