// `perigee serve MODEL`: opens the port, loads the model, serves until SIGTERM, drains.
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/count_text.h"
#include "base/log.h"
#include "base/memory_text.h"
#include "engine/engine.h"
#include "main/api_keys.h"
#include "main/commands.h"
#include "main/engine_flags.h"
#include "main/memory_plan.h"
#include "main/signals.h"
#include "server/server.h"

namespace perigee {
namespace {

constexpr int kStartFailed = 1;
constexpr int kDeviceLost = 70;

struct ServeFlags {
  EngineFlags engine;
  ServerConfig server;
  bool key_required = false, print_config = false;
  LogLevel log_level = LogLevel::kInfo;
};

void add_serve_flags(CommandLine& flags, ServeFlags& to) {
  ServerConfig& server = to.server;
  flags.group("Server");
  flags.add("--host", server.http.host, "address to listen on");
  flags.add("--port", server.http.port, Whole{0, 65535}, "port; 0: any free one");
  flags.add_list("--served-model-name", server.served_names, "names clients may use; default: the folder's name");
  add_key_flags(flags, server, to.key_required);
  flags.add(
      "--reasoning-field", server.reasoning_field,
      OneOf<std::string>{{{"both", "both"}, {"reasoning_content", "reasoning_content"}, {"reasoning", "reasoning"}}},
      "fields of a reply that hold its reasoning");
  flags.add_switch("--kimi-strict", server.kimi_strict,
                   "refuse the sampling parameters and thinking efforts that Kimi's own API refuses");
  flags.add("--drain-seconds", server.drain_s, Number{0, 86400}, "how long SIGTERM lets accepted requests finish");
  flags.add("--stall-seconds", server.stall_s, Number{1, 86400},
            "/livez turns 503 when no step ends for so long while work is in flight");
  flags.add("--front-end-threads", server.http.threads, Whole{1, 256}, "threads of the HTTP front end");
  flags.add("--log-level", to.log_level, log_levels(), "debug, info, warning or error");
  flags.add_switch("--print-config", to.print_config, "print every setting with its source and stop");
  flags.add_config_file();
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
  return fmt::format("{}/{}", holder.substr(kModels.size(), cut - kModels.size()), holder.substr(cut + 2));
}

Status settle(const CommandLine& flags, const std::string& model, bool key_required, ServerConfig& server) {
  server.model_path = model;
  if (server.served_names.empty()) server.served_names = {model_name(model)};
  RETURN_IF_ERROR(settle_keys(flags, key_required, std::getenv("VLLM_API_KEY"), server));
  const bool loopback =
      server.http.host == "localhost" || server.http.host == "::1" || server.http.host.starts_with("127.");
  if (flags.given("host") && !loopback && server.api_keys.empty())
    log_warning("--host ", server.http.host, " without --api-key: anyone who reaches this address can use the server");
  return {};
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

// Before hundreds of gigabytes are read. A GPU's workspace is only estimated: where that alone decides, the rank does.
Status check_memory(const EngineConfig& config) {
  if (config.rank.device == Device::kCuda && list_gpus().empty()) return {};  // the rank knows why
  ASSIGN_OR_RETURN(const Machine machine, this_machine(config.rank));
  ASSIGN_OR_RETURN(MemoryPlan plan, plan_memory(config, machine));
  log_info(fmt::format("memory of a rank, of {}: {} of weights, {} of page pool", memory_text(plan.limit),
                       memory_text(plan.weights), memory_text(std::max<int64_t>(plan.pool, 0))));
  Status fits = check_fits(config, plan);
  if (fits.ok() || plan.device != Device::kCuda) return fits;
  plan.pool += plan.workspace.total();
  plan.workspace = {};
  if (!plan.fits()) return fits;
  log_warning(fits.error().message);
  return {};
}

// Loads; /readyz tells how far it is.
Result<std::unique_ptr<Engine>> load_engine(EngineConfig config, Server& server, const Signals& signals) {
  config.rank.load.progress = [show = config.rank.load.progress, &server](const char* phase, int64_t done,
                                                                          int64_t total) {
    show(phase, done, total);
    server.set_progress(phase, total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100);
  };
  const LoadingWatch watch(signals);
  RETURN_IF_ERROR(check_memory(config));
  return Engine::create(config);
}

// Behind the size of the cache.
std::string cache_text(const LoadOptions& load, const ModelInfo& model) {
  if (load.cache == LatentFormat::kF8Tiles) return ", fp8_ds_mla (656 bytes a token and layer)";
  if (load.cache != LatentFormat::kF8E4M3) return "";
  if (!load.kv_scale_file.empty()) return str_cat(", fp8 (e4m3) with the scales of ", load.kv_scale_file);
  if (model.has_cache_scales) return ", fp8 (e4m3) with the model's scales";
  return ", fp8 (e4m3) with a scale of 1, uncalibrated: perigee calibrate makes scales";
}

// Size and concurrency in vLLM's words.
void log_sizes(const Engine& engine, double seconds, const RankConfig& rank) {
  const CacheSize cache = engine.cache_size();
  log_info("Model loading took ", memory_text(engine.weight_bytes()), " and ", seconds, " s");
  log_info(rank.device == Device::kCuda ? "GPU" : "CPU", " KV cache size: ", grouped(cache.max_tokens()), " tokens (",
           cache.pages, " blocks of ", kBlockTokens,
           cache.dcp_size > 1 ? str_cat(" on each of ", cache.dcp_size, " ranks") : "", ")",
           cache_text(rank.load, engine.model()));
  if (cache.state_pages > 0)
    log_info("Recurrent state: ", cache.state_pages, " of those blocks a sequence, and a checkpoint");
  log_info(fmt::format("Maximum concurrency for {} tokens per request: {:.2f}x", grouped(engine.max_model_len()),
                       cache.sequences_of(engine.max_model_len())));
}

int serve_until_signal(const ServerConfig& server_config, EngineConfig engine_config) {
  const Signals signals;
  const std::string& model = server_config.model_path;
  auto server = Server::start(server_config, nullptr);
  if (!server.ok()) {
    log_error("cannot start: ", server.error().message);
    return kStartFailed;
  }
  const bool v6 = server_config.http.host.find(':') != std::string::npos;
  const std::string url =
      fmt::format("http://{}{}{}:{}", v6 ? "[" : "", server_config.http.host, v6 ? "]" : "", (*server)->port());
  log_info("listening on ", url, ", loading ", model);
  std::atomic<bool> lost{false};
  engine_config.on_device_lost = [&lost](const std::string& why) {
    log_error("device lost: ", why);
    lost = true;
    kill(getpid(), SIGTERM);  // ends the wait below; every stream has got its error
  };
  const double begin = system_clock().now_s();
  auto engine = load_engine(engine_config, **server, signals);
  if (!engine.ok()) {
    log_error("cannot start ", model, ": ", engine.error().message);
    (*server)->drain_and_stop();
    leave(kStartFailed);  // a rank may still load
  }
  log_sizes(**engine, system_clock().now_s() - begin, engine_config.rank);
  (*server)->set_ready(**engine);
  log_info("ready: ", url, "/v1");

  const int signal = signals.wait();
  if (lost) {
    (*server)->drain_and_stop();
    leave(kDeviceLost);  // nothing that belongs to the device can be given back
  }
  log_info(Signals::name(signal), "; a second signal stops at once");
  std::thread([&signals, &lost] {
    stop_at_second_signal(signals, [&lost] { return lost ? kDeviceLost : 0; });
  }).detach();
  (*server)->drain_and_stop();
  (*engine)->shutdown();
  server->reset();  // before the engine: a request that is given up only now still lets a lease go
  flush_log();      // a full log has no room for the last line
  log_info("stopped");
  return 0;
}

}  // namespace

int run_serve(const std::vector<std::string>& words) {
  ServeFlags read;
  CommandLine flags("perigee serve", "Serves a model folder over the OpenAI API.");
  add_engine_flags(flags, read.engine);
  add_serve_flags(flags, read);
  const auto fail = [](const Error& error) { return print_refusal("perigee serve", error); };
  if (Status status = flags.parse(words); !status.ok()) return fail(status.error());
  if (read.print_config) return std::fputs(flags.resolved().c_str(), stdout) < 0;
  const std::string model = read.engine.config.rank.load.path;
  if (model.empty() && read.server.served_names.size() + read.server.api_keys.size() > 1)
    return fail(
        bad_input("no model given: --served-model-name and --api-key take every word behind them; name the "
                  "model's folder before them",
                  "model"));
  set_log_level(read.log_level);
  const KvTransferFlags kv_transfer = read.engine.kv_transfer;
  auto engine_config = settle(flags, std::move(read.engine));
  if (!engine_config.ok()) return fail(engine_config.error());
  const KvTransferVariables variables{.host = std::getenv("VLLM_NIXL_SIDE_CHANNEL_HOST"),
                                      .port = std::getenv("VLLM_NIXL_SIDE_CHANNEL_PORT"),
                                      .runtime_folder = std::getenv("XDG_RUNTIME_DIR")};
  if (Status status = settle_kv_transfer(flags, variables, kv_transfer, engine_config->handover); !status.ok())
    return fail(status.error());
  if (Status status = settle(flags, model, read.key_required, read.server); !status.ok()) return fail(status.error());
  log_info("perigee ", PERIGEE_VERSION, "; settings that are not defaults: ", flags.resolved_given());
  return serve_until_signal(read.server, *engine_config);
}

}  // namespace perigee
