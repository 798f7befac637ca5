// App: the routes. Turns HTTP requests into replies and generations; knows no sockets.
//
// Thread-safe: handlers run on the executors of their exchanges, the rest may be called from any thread. What reads
// bodies or text (app_requests.cc) runs in a pool, and its outcome is posted back: an executor only moves bytes.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "grammar/grammar_compiler.h"
#include "server/app_config.h"
#include "server/auth.h"
#include "server/backend.h"
#include "server/generation.h"
#include "server/health.h"
#include "server/http_types.h"
#include "server/metrics.h"
#include "server/model_text.h"
#include "server/request_fields.h"
#include "server/request_ids.h"
#include "server/work_pool.h"

namespace perigee {

class App {
  struct PendingRequest;  // on its way through the pool
  struct Prepared;        // what came of it

 public:
  App(AppConfig config, std::shared_ptr<const ModelText> text);

  // Before the body is read: the key, and 503 while loading or draining.
  std::optional<HttpReply> check_head(const HttpRequest& request) const;
  void handle(const std::shared_ptr<Exchange>& exchange, HttpRequest request);

  // Answers health probes and scrapes; nullopt: it is another request. Waits for nothing.
  std::optional<HttpReply> probe(const HttpRequest& request) const;

  HttpReply refusal(int status, const std::string& message) const;  // counts it

  void set_progress(const std::string& phase, double percent);  // while loading
  void set_ready(std::shared_ptr<Backend> backend);
  void begin_drain() { draining_ = true; }
  LiveGenerations& live() { return *live_; }  // requests in the pool included
  void end_all(const std::string& message);   // and whatever is still in the pool is not begun

  // Logs throughput since the last call, unless nothing happened. To be called every `period_s`.
  void log_stats(double period_s);

 private:
  struct Route {
    const char* method;
    const char* path;
    bool open;                                                                             // needs no key
    void (App::*handler)(const std::shared_ptr<Exchange>&, const HttpRequest&) = nullptr;  // on the executor, or:
    Result<Prepared> (App::*prepare)(PendingRequest&) = nullptr;                           // in the pool
    bool takes_get() const { return std::string_view(method) == "GET"; }
  };
  static const std::vector<Route>& routes();
  using ExchangePtr = const std::shared_ptr<Exchange>&;

  void models(ExchangePtr exchange, const HttpRequest& request);
  void model(ExchangePtr exchange, const HttpRequest& request);
  Json model_json(const std::string& name) const;
  void answer_probe(ExchangePtr exchange, const HttpRequest& request);  // of a request with a body
  HttpReply scrape() const;
  std::string allowed_methods(const HttpRequest& request) const;
  static std::string no_such_path();
  void version(ExchangePtr exchange, const HttpRequest& request);
  void load(ExchangePtr exchange, const HttpRequest& request);

  struct Serving {  // what exists once the model is loaded
    std::shared_ptr<Backend> backend;
    RequestContext context;
    bool takes_leases = false;
  };
  std::shared_ptr<const Serving> serving() const;
  bool is_open(const HttpRequest& request) const;
  static void answer(ExchangePtr exchange, const HttpRequest& request, HttpReply reply);
  void refuse(ExchangePtr exchange, const HttpRequest& request, const Error& error);
  void answer_or_refuse(ExchangePtr exchange, const HttpRequest& request, const Result<Json>& result);
  HealthInputs health_inputs() const;
  std::optional<Error> check_length(const HttpRequest& request, const RequestContext& context) const;
  Result<std::string> model_name(const std::string& asked) const;

  // Requests, in app_requests.cc.
  using PendingPtr = std::shared_ptr<PendingRequest>;
  void deliver(ExchangePtr exchange, const PendingPtr& pending, Result<Prepared> result);
  template <typename Work>
  void answer_or_abandon(ExchangePtr exchange, const PendingPtr& pending, const Work& work);
  void compile(ExchangePtr exchange, const PendingPtr& pending, Prepared prepared);
  void prepare_in_pool(ExchangePtr exchange, HttpRequest request, Result<Prepared> (App::*prepare)(PendingRequest&));
  void finish(ExchangePtr exchange, const PendingRequest& pending, Result<Prepared>& prepared);
  Result<Prepared> prepare_completions(PendingRequest& pending);
  Result<Prepared> prepare_chat(PendingRequest& pending);
  Result<Prepared> prepare_tokenize(PendingRequest& pending);
  Result<Prepared> prepare_detokenize(PendingRequest& pending);
  Result<Prepared> prepare_tokenizer_info(PendingRequest& pending);
  Result<Json> body_of(PendingRequest& pending, size_t max_tokens) const;
  static Prepared reply_with(const Json& body);
  Status check_fields(const RequestFields& fields, int64_t num_prompts, const RequestContext& context) const;
  Status check_room(const Serving& serving) const;
  Result<Json> generation_body_of(PendingRequest& pending, const Serving& serving) const;
  Result<std::unique_ptr<GenerationSpec>> make_spec(PendingRequest& pending, const Serving& serving,
                                                    const RequestFields& fields, std::vector<TokenIds> prompts);
  ReplyContext reply_context(const Serving& serving) const;
  void log_unknown_fields(const std::vector<std::string>& names);
  void log_once(const std::string& warning);

  const AppConfig config_;
  const std::shared_ptr<const ModelText> text_;
  const KeyRing keys_;
  const std::shared_ptr<Metrics> metrics_;
  const std::shared_ptr<LiveGenerations> live_ = std::make_shared<LiveGenerations>();
  const int64_t started_;  // seconds since 1970
  RequestIds ids_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::shared_ptr<const Serving> serving_;
  std::string phase_ = "starting";
  double percent_ = 0;
  std::set<std::string> logged_fields_, logged_warnings_;
  SchedulerGauges last_gauges_;
  std::unique_ptr<GrammarCompiler> compiler_;  // from set_ready() on, where there is a tokenizer
  WorkPool pool_;                              // last: its threads use everything above
};

}  // namespace perigee
