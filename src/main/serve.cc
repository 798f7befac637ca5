// `perigee serve MODEL`: opens the port, loads the model, serves until SIGTERM, drains.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "base/memory_text.h"
#include "engine/engine.h"
#include "main/api_keys.h"
#include "main/commands.h"
#include "main/engine_options.h"
#include "main/options.h"
#include "server/server.h"

namespace perigee {
namespace {

constexpr int kUsageError = 2;
constexpr int kStartFailed = 1;
constexpr int kDeviceLost = 70;

void add_server_options(Options& options) {
  const char* group = "Server";
  options.add("host", "127.0.0.1", "address to listen on", group);
  options.add("port", "8000", "port; 0: any free one", group);
  options.add_list("served-model-name", "names clients may use; default: the folder's name", group);
  options.add_list("api-key", "keys that clients must send; none: open", group);
  options.add_switch("require-key", false, "refuse to start without --api-key", group);
  options.add_switch("ignore-priority", false, "the priority of requests has no effect; on when there are several keys",
                     group);
  options.add("reasoning-field", "both", "both, reasoning_content or reasoning", group);
  options.add("drain-seconds", "60", "how long SIGTERM lets accepted requests finish", group);
  options.add("stall-seconds", "60", "/livez turns 503 when no step ends for so long while work is in flight", group);
  options.add("front-end-threads", "1", "threads of the HTTP front end", group);
  options.add("config", "", "YAML file whose keys are these flags", group);
  options.add("log-level", "info", "debug, info, warning or error", group);
  options.add_switch("print-config", false, "print every setting with its source and stop", group);
}

// The folder's name; of a snapshot in the cache of Hugging Face, models--ORG--NAME/snapshots/REVISION, ORG/NAME.
std::string model_name(const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  const std::string holder = folder.parent_path().parent_path().filename();
  constexpr std::string_view kModels = "models--";
  const size_t cut = holder.find("--", kModels.size());
  if (folder.parent_path().filename() != "snapshots" || !holder.starts_with(kModels) || cut == std::string::npos)
    return folder.filename();
  return str_cat(holder.substr(kModels.size(), cut - kModels.size()), "/", holder.substr(cut + 2));
}

Status set_level(const std::string& name) {
  if (name == "debug")
    set_log_level(LogLevel::kDebug);
  else if (name == "info")
    set_log_level(LogLevel::kInfo);
  else if (name == "warning")
    set_log_level(LogLevel::kWarning);
  else if (name == "error")
    set_log_level(LogLevel::kError);
  else
    return bad_input(str_cat("--log-level must be debug, info, warning or error, not \"", name, "\""), "log-level");
  return {};
}

Result<ServerConfig> server_config(const Options& options) {
  ServerConfig config;
  config.host = options.text("host");
  ASSIGN_OR_RETURN(const int64_t port, options.integer("port", 0, 65535));
  ASSIGN_OR_RETURN(config.drain_s, options.number("drain-seconds", 0, 86400));
  ASSIGN_OR_RETURN(config.stall_s, options.number("stall-seconds", 1, 86400));
  ASSIGN_OR_RETURN(const int64_t threads, options.integer("front-end-threads", 1, 256));
  config.port = static_cast<int>(port);
  config.threads = static_cast<int>(threads);
  config.model_path = options.text("model");
  config.served_names = options.list("served-model-name");
  if (config.served_names.empty()) config.served_names = {model_name(config.model_path)};
  ASSIGN_OR_RETURN(config.api_keys, api_keys(options, std::getenv("VLLM_API_KEY")));
  config.ignore_priority = ignores_priority(options, config.api_keys.size());
  config.reasoning_field = options.text("reasoning-field");
  const std::string& field = config.reasoning_field;
  if (field != "both" && field != "reasoning_content" && field != "reasoning")
    return bad_input(str_cat("--reasoning-field must be both, reasoning_content or reasoning, not \"", field, "\""),
                     "reasoning-field");
  const bool loopback = config.host == "localhost" || config.host == "::1" || config.host.starts_with("127.");
  if (options.given("host") && !loopback && config.api_keys.empty())
    log_warning("--host ", config.host, " without --api-key: anyone who reaches this address can use the server");
  return config;
}

// The signals that this process handles, blocked in this and all later threads, so that waiting for them is the only
// way to see them.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) sigaddset(&set_, signal);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
  }
  // SIGTERM or SIGINT; nullopt: `limit` is over. The others mean nothing here, and end nothing.
  std::optional<int> wait(timespec limit) const {
    const int signal = sigtimedwait(&set_, nullptr, &limit);
    if (signal == SIGTERM || signal == SIGINT) return signal;
    if (signal > 0) log_info(signal == SIGHUP ? "SIGHUP" : signal == SIGUSR1 ? "SIGUSR1" : "SIGUSR2", " has no effect");
    return std::nullopt;
  }
  int wait() const {
    for (;;)
      if (const auto signal = wait({.tv_sec = 3600})) return *signal;
  }
  static const char* name(int signal) { return signal == SIGTERM ? "SIGTERM" : "SIGINT"; }

 private:
  sigset_t set_;
};

// Ends the process without its destructors: what runs in it cannot be waited for.
[[noreturn]] void leave(int code) {
  flush_log();
  std::_Exit(code);
}

// Ends the process at a signal that comes while the model loads: nobody is served yet, so there is nothing to drain.
class LoadingWatch {
 public:
  explicit LoadingWatch(const Signals& signals) : thread_([this, &signals] { run(signals); }) {}
  LoadingWatch(const LoadingWatch&) = delete;
  LoadingWatch& operator=(const LoadingWatch&) = delete;
  ~LoadingWatch() {
    loaded_ = true;
    thread_.join();
  }

 private:
  void run(const Signals& signals) {
    constexpr timespec kPeriod{.tv_sec = 0, .tv_nsec = 20'000'000};
    while (!loaded_) {
      const auto signal = signals.wait(kPeriod);
      if (!signal) continue;
      log_warning(Signals::name(*signal), " while loading: stopping now");
      leave(0);
    }
  }

  std::atomic<bool> loaded_{false};
  std::thread thread_;
};

// A second signal ends the process at once. A SIGTERM within a second of the first is its echo: whoever signals the
// process group and a supervisor that passes it on both send one.
void stop_at_second_signal(const Signals& signals, const std::atomic<bool>& lost) {
  constexpr double kEchoSeconds = 1;
  const double first_s = system_clock().now_s();
  for (;;) {
    const int signal = signals.wait();
    if (lost) leave(kDeviceLost);
    if (signal == SIGTERM && system_clock().now_s() - first_s < kEchoSeconds) {
      log_info("SIGTERM again within a second: the same one");
      continue;
    }
    log_warning("second signal: stopping now");
    leave(0);
  }
}

// Loads; /readyz tells how far it is.
Result<std::unique_ptr<Engine>> load_engine(EngineConfig config, Server& server, const Signals& signals) {
  config.rank.load.progress = [show = config.rank.load.progress, &server](const char* phase, int64_t done,
                                                                          int64_t total) {
    show(phase, done, total);
    server.set_progress(phase, total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100);
  };
  const LoadingWatch watch(signals);
  return Engine::create(config);
}

void log_sizes(const Engine& engine, double seconds, bool fp8_cache) {
  const int64_t tokens = static_cast<int64_t>(engine.num_pages()) * kBlockTokens;
  log_info("Model loading took ", memory_text(engine.model().weight_bytes), " and ", seconds, " s");
  log_info("KV cache size: ", tokens, " tokens (", engine.num_pages(), " blocks of ", kBlockTokens, ")",
           !fp8_cache                        ? ""
           : engine.model().has_cache_scales ? ", fp8 (e4m3) with the checkpoint's scales"
                                             : ", fp8 (e4m3) with a scale of 1, uncalibrated");
  if (engine.state_pages() > 0)
    log_info("Recurrent state: ", engine.state_pages(), " of those pages a sequence, and a checkpoint");
  const int64_t pages = (engine.max_model_len() + kBlockTokens - 1) / kBlockTokens + engine.state_pages();
  log_info("Maximum concurrency for ", engine.max_model_len(),
           " tokens per request: ", static_cast<double>(engine.num_pages()) / static_cast<double>(pages), "x");
}

int serve_until_signal(const Options& options, const ServerConfig& server_settings, EngineConfig engine_settings) {
  const Signals signals;
  auto server = Server::start(server_settings, nullptr);
  if (!server.ok()) {
    log_error("cannot start: ", server.error().message);
    return kStartFailed;
  }
  const bool v6 = server_settings.host.find(':') != std::string::npos;
  const std::string url = str_cat("http://", v6 ? "[" : "", server_settings.host, v6 ? "]:" : ":", (*server)->port());
  log_info("listening on ", url, ", loading ", options.text("model"));
  std::atomic<bool> lost{false};
  engine_settings.on_device_lost = [&lost](const std::string& why) {
    log_error("device lost: ", why);
    lost = true;
    kill(getpid(), SIGTERM);  // ends the wait below; every stream has got its error
  };
  const double begin = system_clock().now_s();
  auto engine = load_engine(engine_settings, **server, signals);
  if (!engine.ok()) {
    log_error("cannot load ", options.text("model"), ": ", engine.error().message);
    (*server)->drain_and_stop();
    leave(kStartFailed);  // a rank may still load
  }
  log_sizes(**engine, system_clock().now_s() - begin, engine_settings.rank.fp8_cache);
  (*server)->set_ready(**engine);
  log_info("ready: ", url, "/v1");

  const int signal = signals.wait();
  if (lost) {
    (*server)->drain_and_stop();
    leave(kDeviceLost);  // nothing that belongs to the device can be given back
  }
  log_info(Signals::name(signal), "; a second signal stops at once");
  std::thread([&signals, &lost] { stop_at_second_signal(signals, lost); }).detach();
  (*server)->drain_and_stop();
  (*engine)->shutdown();
  log_info("stopped");
  return 0;
}

}  // namespace

int run_serve(const std::vector<std::string>& arguments) {
  Options options("perigee serve", "Serves a model folder over the OpenAI API.");
  add_engine_options(options);
  add_server_options(options);
  const auto fail = [](const Error& error) {
    const bool help = error.code == Code::kCancelled;
    std::fprintf(help ? stdout : stderr, "%s%s\n", help ? "" : "perigee serve: ", error.message.c_str());
    return help ? 0 : kUsageError;
  };
  if (Status status = options.parse(arguments); !status.ok()) return fail(status.error());
  if (options.enabled("print-config")) return std::fputs(options.resolved().c_str(), stdout) < 0;
  if (options.text("model").empty() && options.list("served-model-name").size() + options.list("api-key").size() > 1)
    return fail(
        bad_input("no model given: --served-model-name and --api-key take every word behind them; name the "
                  "model's folder before them",
                  "model"));
  if (Status status = set_level(options.text("log-level")); !status.ok()) return fail(status.error());
  const auto engine_settings = engine_config(options);
  if (!engine_settings.ok()) return fail(engine_settings.error());
  const auto server_settings = server_config(options);
  if (!server_settings.ok()) return fail(server_settings.error());
  log_info("perigee ", PERIGEE_VERSION, "; settings that are not defaults: ", options.resolved_given());
  return serve_until_signal(options, *server_settings, *engine_settings);
}

}  // namespace perigee
