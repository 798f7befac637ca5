// `perigee router`: one address in front of several servers, until SIGTERM.
#include "router/router.h"

#include <fmt/format.h>

#include <cstdio>
#include <random>
#include <thread>

#include "base/log.h"
#include "main/command_line.h"
#include "main/commands.h"
#include "main/signals.h"

namespace perigee {
namespace {

constexpr int kStartFailed = 1;

const OneOf<PolicyKind> kPolicies{{{"cache_aware", PolicyKind::kCacheAware},
                                   {"round_robin", PolicyKind::kRoundRobin},
                                   {"power_of_two", PolicyKind::kPowerOfTwo},
                                   {"random", PolicyKind::kRandom}}};

struct RouterFlags {
  RouterConfig config;
  PolicyConfig policy;
  int64_t data_parallel_size = 1;
  bool no_retries = false, no_breaker = false, print_config = false;
  LogLevel log_level = LogLevel::kInfo;
};

void add_worker_flags(CommandLine& flags, RouterFlags& to) {
  RouterConfig& config = to.config;
  flags.group("Workers");
  flags.add_list("--worker-urls", config.workers, "URLs of servers of one model");
  flags.add_switch("--vllm-pd-disaggregation", config.forward.split,
                   "prompts are computed by prefill workers, replies by decode workers");
  flags.add_list("--prefill", config.prefill, "URLs of prefill workers");
  flags.add_list("--decode", config.decode, "URLs of decode workers");
  flags.add("--intra-node-data-parallel-size", to.data_parallel_size, Whole{1, 1 << 16},
            "engines behind one worker URL; only 1: each server has a URL of its own");
  flags.group("Choice of a worker");
  flags.add("--policy", to.policy.kind, kPolicies, "how a worker is chosen");
  flags.add("--prefill-policy", config.table.prefill.kind, kPolicies, "the same of prefill workers; default: --policy");
  flags.add("--decode-policy", config.table.decode.kind, kPolicies, "the same of decode workers; default: --policy");
  flags.add("--cache-threshold", to.policy.cache_threshold, Number{0, 1},
            "cache_aware: the part of a prompt that a worker must have seen to be preferred");
  flags.add("--balance-abs-threshold", to.policy.balance_abs_threshold, Whole{0, 1 << 20},
            "cache_aware: unless it has so many more open requests than another,");
  flags.add("--balance-rel-threshold", to.policy.balance_rel_threshold, Number{1, 1e6}, "and so many times as many");
}

void add_failure_flags(CommandLine& flags, RouterFlags& to) {
  RouterConfig& config = to.config;
  flags.group("Failures");
  flags.add("--retry-max-retries", config.forward.max_retries, Whole{0, 100},
            "other workers that a request is tried by, before a byte of its reply has come");
  flags.add_switch("--disable-retries", to.no_retries, "a request is tried once");
  flags.add("--cb-failure-threshold", config.table.breaker.failures, Whole{1, 1 << 20},
            "failures that take a worker out of use,");
  flags.add("--cb-window-duration-secs", config.table.breaker.window_s, Number{0, 86400}, "within so many seconds,");
  flags.add("--cb-timeout-duration-secs", config.table.breaker.open_s, Number{0, 86400}, "for so many,");
  flags.add("--cb-success-threshold", config.table.breaker.successes, Whole{1, 1 << 20},
            "until so many single requests went well");
  flags.add_switch("--disable-circuit-breaker", to.no_breaker, "failures take no worker out of use");
  flags.add("--health-check-endpoint", config.health.path, "path that a worker answers with 200 when it is ready");
  flags.add("--health-check-interval-secs", config.health.interval_s, Number{0.05, 3600}, "between two such questions");
  flags.add("--health-check-timeout-secs", config.health.timeout_s, Number{0.05, 3600}, "for its answer");
  flags.add("--health-failure-threshold", config.table.lost_after_failures, Whole{1, 1000},
            "questions without an answer after which a worker counts as lost,");
  flags.add("--health-success-threshold", config.table.back_after_successes, Whole{1, 1000},
            "until so many were answered");
  flags.add("--request-timeout-secs", config.forward.times.silence_s, Number{0.1, 86400},
            "how long a worker may send nothing of a reply");
  flags.add("--connect-timeout-secs", config.forward.times.connect_s, Number{0.05, 3600}, "to connect to a worker");
}

void add_ignored_router_flags(CommandLine& flags) {
  for (const char* name :
       {"--retry-initial-backoff-ms", "--retry-max-backoff-ms", "--retry-backoff-multiplier", "--retry-jitter-factor"})
    flags.add_ignored_value(name, "a retry goes to another worker, and needs no pause");
  for (const char* name : {"--prometheus-port", "--prometheus-host"})
    flags.add_ignored_value(name, "metrics are at /metrics of --port");
  for (const char* name : {"--queue-size", "--queue-timeout-secs", "--rate-limit-tokens-per-second"})
    flags.add_ignored_value(name, "requests wait at their worker, whose 429 is passed on");
  for (const char* name : {"--max-tree-size", "--eviction-interval-secs"})
    flags.add_ignored_value(name, "what cache_aware remembers takes 16 MB at most");
  for (const char* name : {"--worker-startup-timeout-secs", "--worker-startup-check-interval"})
    flags.add_ignored_value(name, "the router does not wait for workers: one that is ready is used");
  flags.add_ignored_value("--kv-connector", "transfer parameters are passed on as they are");
  flags.add_ignored_value("--log-dir", "the log goes to standard error");
}

void add_router_flags(CommandLine& flags, RouterFlags& to) {
  RouterConfig& config = to.config;
  add_worker_flags(flags, to);
  add_failure_flags(flags, to);
  flags.group("Server");
  flags.add("--host", config.http.host, "address to listen on");
  flags.add("--port", config.http.port, Whole{0, 65535}, "port; 0: any free one");
  flags.add_list("--api-key", config.api_keys, "keys that clients must send, and workers get; none: open");
  flags.add("--admin-api-key", config.admin_key, "key of /workers; none: open where --host is a loopback address");
  flags.add("--max-concurrent-requests", config.max_requests, Whole{1, 1 << 20}, "over it 429");
  flags.add("--max-payload-size", config.http.max_body_bytes, Whole{1, 1 << 30}, "bytes of a request's body");
  flags.add("--drain-seconds", config.drain_s, Number{0, 86400}, "how long SIGTERM lets requests finish");
  flags.add("--front-end-threads", config.http.threads, Whole{1, 256}, "event loops that carry requests");
  flags.add("--log-level", to.log_level, log_levels(), "debug, info, warning or error");
  flags.add_switch("--print-config", to.print_config, "print every setting with its source and stop");
  flags.add_config_file();
  add_ignored_router_flags(flags);
}

// `--prefill URL PORT`: the port of a transfer that is set up by the router; here workers do that themselves.
void drop_bootstrap_ports(std::vector<std::string>& urls) {
  std::erase_if(urls, [](const std::string& word) {
    return word == "none" || (!word.empty() && word.find_first_not_of("0123456789") == std::string::npos);
  });
}

Status settle(const CommandLine& flags, RouterFlags& read) {
  RouterConfig& config = read.config;
  drop_bootstrap_ports(config.prefill);
  if (read.data_parallel_size != 1)
    return bad_input(
        "--intra-node-data-parallel-size must be 1: start a server for each replica, and name the URL of "
        "each",
        "intra-node-data-parallel-size");
  if (read.no_retries) config.forward.max_retries = 0;
  if (read.no_breaker) config.table.breaker.failures = 0;
  std::random_device device;
  for (const auto& [policy, name] :
       {std::pair(&config.table.plain, "policy"), std::pair(&config.table.prefill, "prefill-policy"),
        std::pair(&config.table.decode, "decode-policy")}) {
    const PolicyKind kind = flags.given(name) ? policy->kind : read.policy.kind;
    *policy = read.policy;
    policy->kind = kind;
    policy->seed = device();
  }
  config.table.plain.kind = read.policy.kind;
  return {};
}

int serve_until_signal(const RouterConfig& config) {
  const Signals signals;
  auto router = Router::start(config);
  if (!router.ok()) {
    log_error("cannot start: ", router.error().message);
    return kStartFailed;
  }
  const bool v6 = config.http.host.find(':') != std::string::npos;
  const size_t workers = config.workers.size() + config.prefill.size() + config.decode.size();
  log_info(fmt::format("listening on http://{}{}{}:{}, with {} worker{}", v6 ? "[" : "", config.http.host,
                       v6 ? "]" : "", (*router)->port(), workers, workers == 1 ? "" : "s"));
  if (config.forward.split && (config.prefill.empty() || config.decode.empty()))
    log_warning("no --", config.prefill.empty() ? "prefill" : "decode",
                " worker: requests get 503 until POST /workers adds one");
  const int signal = signals.wait();
  log_info(Signals::name(signal), "; a second signal stops at once");
  std::thread([&signals] { stop_at_second_signal(signals, [] { return 0; }); }).detach();
  (*router)->drain_and_stop();
  log_info("stopped");
  leave(0);
}

}  // namespace

int run_router(const std::vector<std::string>& words) {
  RouterFlags read;
  read.config.http.port = 30000;
  read.config.http.max_connections = 16384;
  CommandLine flags("perigee router", "One address in front of several servers of a model.");
  add_router_flags(flags, read);
  const auto fail = [](const Error& error) { return print_refusal("perigee router", error); };
  if (Status status = flags.parse(words); !status.ok()) return fail(status.error());
  if (read.print_config) return std::fputs(flags.resolved().c_str(), stdout) < 0;
  set_log_level(read.log_level);
  if (Status status = settle(flags, read); !status.ok()) return fail(status.error());
  flags.log_ignored();
  log_info("perigee ", PERIGEE_VERSION, "; settings that are not defaults: ", flags.resolved_given());
  return serve_until_signal(read.config);
}

}  // namespace perigee
