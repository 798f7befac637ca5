#include "main/engine_options.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <span>

#include "base/clock.h"
#include "base/log.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

struct IgnoredFlag {
  const char *name, *reason;
};

// Pasted with every recipe. What they ask for is always so here, is derived from the checkpoint, or has no object.
constexpr IgnoredFlag kIgnoredSwitches[] = {
    {"trust-remote-code", "nothing of a checkpoint is executed"},
    {"enable-auto-tool-choice", "tool calls are always read"},
    {"enable-chunked-prefill", "prefill is always chunked"},
    {"enable-expert-parallel", "one rank holds every expert"},
    {"async-scheduling", "two plans are always in flight"},
    {"enforce-eager", "decode steps are graphs on every GPU"},
    {"enable-log-requests", "each request is a line at --log-level info, without its text"},
    {"disable-log-requests", "each request is a line at --log-level info, without its text"},
    {"disable-log-stats", "the line of throughput comes at --log-level info"},
    {"disable-hybrid-kv-cache-manager", "one page pool holds every kind of cache"}};
constexpr IgnoredFlag kIgnoredValues[] = {{"tool-call-parser", "the markers of the checkpoint are read"},
                                          {"reasoning-parser", "the markers of the checkpoint are read"},
                                          {"attention-backend", "kernels follow from device and sizes"},
                                          {"block-size", "a block has 64 tokens"},
                                          {"compilation-config", "nothing is compiled at start"},
                                          {"limit-mm-per-prompt", "images are not read"},
                                          {"mm-processor-cache-gb", "images are not read"},
                                          {"mm-encoder-tp-mode", "images are not read"}};

constexpr const char* kRankCounts[] = {"tensor-parallel-size", "decode-context-parallel-size", "pipeline-parallel-size",
                                       "data-parallel-size"};

constexpr const char* kAuto = "auto";

Result<Device> device(const std::string& name) {
  if (name == "cpu") return Device::kCpu;
  if (name == "cuda") return Device::kCuda;
  if (name == "ref") return Device::kRef;
  if (name != kAuto) return bad_input(str_cat("--device must be auto, cpu, cuda or ref, not \"", name, "\""), "device");
  const Status gpu = select_device(0);
  log_info("device: ", gpu.ok() ? "cuda" : str_cat("cpu; ", gpu.error().message));
  return gpu.ok() ? Device::kCuda : Device::kCpu;
}

struct BatchLimits {
  int64_t sequences = 0, tokens = 0;
};

// A limit that is not given follows the device, and gives way to one that is: half a small budget stays for prefills.
Result<BatchLimits> batch_limits(bool gpu, const Options& options) {
  const bool any_sequences = options.text("max-num-seqs") == kAuto;
  const bool any_tokens = options.text("max-num-batched-tokens") == kAuto;
  BatchLimits limits{.sequences = gpu ? 1024 : 128, .tokens = gpu ? 8192 : 2048};
  if (!any_sequences) {
    ASSIGN_OR_RETURN(limits.sequences, options.integer("max-num-seqs", 1, 65536));
  }
  if (!any_tokens) {
    ASSIGN_OR_RETURN(limits.tokens, options.integer("max-num-batched-tokens", 1, 1 << 20));
  }
  if (any_sequences) limits.sequences = std::clamp<int64_t>(limits.tokens / 2, 1, limits.sequences);
  if (any_tokens) limits.tokens = std::max(limits.tokens, limits.sequences);
  if (limits.tokens < limits.sequences)
    return bad_input(str_cat("--max-num-batched-tokens ", limits.tokens, " is under --max-num-seqs ", limits.sequences,
                             ": a decode step needs one token for each sequence"),
                     "max-num-batched-tokens");
  return limits;
}

Result<int64_t> cache_bytes(bool gpu, const Options& options) {
  if (options.text("kv-cache-memory-bytes") == kAuto) return gpu ? 0 : int64_t{1} << 30;
  return options.bytes("kv-cache-memory-bytes");
}

// One progress line at most each second, with rate and time left.
class LoadProgress {
 public:
  void operator()(const char* phase, int64_t done, int64_t total) {
    const double now = system_clock().now_s();
    if (phase != phase_) {
      if (phase_ != nullptr) begin_s_ = now;  // the first phase began when this object was made
      phase_ = phase;
      last_s_ = now;
    }
    if (done < total && now - last_s_ < 1.0) return;
    last_s_ = now;
    const double elapsed = std::max(now - begin_s_, 1e-9);
    const double rate = static_cast<double>(done) / elapsed;
    char line[160];
    std::snprintf(line, sizeof line, "%s: %.2f of %.2f GB (%.0f %%), %.2f GB/s, %.0f s left", phase,
                  static_cast<double>(done) * 1e-9, static_cast<double>(total) * 1e-9,
                  total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100.0, rate * 1e-9,
                  rate > 0 ? static_cast<double>(total - done) / rate : 0.0);
    log_info(line);
  }

 private:
  const char* phase_ = nullptr;
  double begin_s_ = system_clock().now_s(), last_s_ = 0;
};

void add_device_options(Options& options) {
  const char* group = "Model and device";
  options.positional("model", "folder with config.json");
  options.add("load-format", "auto", "auto, safetensors, or dummy (made-up weights, for sizing)", group);
  options.add("device", "auto",
              "cpu (AVX2, AVX-512, AMX), cuda (one GPU), ref (the slow definition); auto: cuda if there is a GPU",
              group);
  options.add("cpu-isa", "auto", "auto (the best of this machine), avx2, avx512 or amx", group);
  options.add("threads", "0",
              "threads of the CPU backend; 0: one for each core that this process (its mask, its container) may use",
              group);
  options.add("latent-norm-eps", "-1", "eps of the q_a and kv_a norms; -1: rms_norm_eps (transformers uses 1e-6)",
              group);
  options.add_switch("kimi-linear-biased-routing", false,
                     "weigh experts with the selection bias, as Kimi-Linear's own code does", group);
  options.add_switch("language-model-only", false, "skip the vision part of a multimodal checkpoint", group);
  for (const char* name : kRankCounts) options.add(name, "1", "only 1 in this version", group);
  options.add("speculative-config", "", "not in this version", group);
  options.add("kv-transfer-config", "", "not in this version", group);
  options.add("dtype", kAuto, "auto or bfloat16: what is computed in", group);
  options.add("tokenizer", "", "only the model folder's own", group);
  options.alias("-tp", "tensor-parallel-size");
  options.alias("-dcp", "decode-context-parallel-size");
  options.alias("-pp", "pipeline-parallel-size");
  options.alias("-dp", "data-parallel-size");
}

void add_scheduler_options(Options& options) {
  const char* group = "Cache and scheduler";
  options.add("kv-cache-memory-bytes", "auto",
              "size of the page pool; auto: what gpu-memory-utilization leaves, on a CPU 1G", group);
  options.add("gpu-memory-utilization", "0.9", "share of the GPU's memory for weights, workspace and page pool", group);
  options.add("kv-cache-dtype", "auto", "auto or bf16; fp8: e4m3 with the checkpoint's scales or 1", group);
  options.add("max-model-len", "0", "longest prompt + reply; 0: the model's, or what the cache holds", group);
  options.add("max-num-seqs", "auto", "sequences that run together; auto: 1024 on a GPU, 128 on a CPU", group);
  options.add("max-num-batched-tokens", "auto",
              "token budget of a step, prefill and decode together; auto: 8192 on a GPU, 2048 on a CPU", group);
  options.add("max-waiting-seqs", "4096", "queue length; over it requests get 429", group);
  options.add_switch("enable-prefix-caching", true, "reuse the cache of common prefixes", group);
  options.add("checkpoint-interval-blocks", "64",
              "recurrent models: blocks of 64 tokens between states that stay; 0: none", group);
  options.add("checkpoint-turn-blocks", "4",
              "recurrent models: blocks of output between states saved for the next turn; "
              "0: none",
              group);
  options.add_switch("deterministic", false, "same bits for a request whatever runs beside it, cached or not", group);
  options.add_switch("selfcheck", false, "check the books after every step", group);
}

void add_rank_options(Options& options) {
  const char* group = "Ranks";
  const RankTimeouts timeouts;
  options.add("rank-timeout-seconds", str_cat(timeouts.behind_s),
              "a rank is lost that is so long behind another one of its group", group);
  options.add("step-timeout-seconds", str_cat(timeouts.step_s),
              "a rank is lost that works at one step for longer; 0: a step may take any time", group);
  options.add("start-timeout-seconds", str_cat(timeouts.start_s),
              "the start fails when a rank shows no sign of life for so long; 0: it may take any time", group);
  options.add("replicated-ranks", "1", "for tests: so many CPU ranks that each hold the whole model", group);
  options.add("fail-at-step", "-1", "for tests: a rank is lost in this step; -1: never", group);
  options.add("fail-rank", "0", "for tests: which one", group);
  options.add("fail-mode", "error", "for tests: error (its device is lost) or hang (its thread stops)", group);
}

// What a flag asks for and this version cannot do.
Status check_not_there_yet(const Options& options) {
  for (const char* name : kRankCounts) {
    ASSIGN_OR_RETURN(const int64_t size, options.integer(name, 1, 65536));
    if (size != 1)
      return Error(Code::kUnavailable, str_cat("--", name, " ", size, ": this version runs one rank; use 1"), name);
  }
  if (options.given("speculative-config"))
    return Error(Code::kUnavailable, "--speculative-config: this version has no speculation; leave it out",
                 "speculative-config");
  if (options.given("kv-transfer-config"))
    return Error(Code::kUnavailable,
                 "--kv-transfer-config: this version does not separate prefill and decode; leave it out",
                 "kv-transfer-config");
  if (const std::string& dtype = options.text("dtype"); dtype != kAuto && dtype != "bfloat16" && dtype != "bf16")
    return Error(Code::kUnavailable, str_cat("--dtype must be auto or bfloat16, not \"", dtype, "\""), "dtype");
  if (const std::string& other = options.text("tokenizer"); !other.empty() && other != options.text("model"))
    return Error(Code::kUnavailable,
                 str_cat("--tokenizer ", other, ": only the model folder's own tokenizer is read; leave it out"),
                 "tokenizer");
  return {};
}

// How many ranks, when one of them is lost, and which one a test loses.
Status read_ranks(const Options& options, EngineConfig& config) {
  constexpr double kMostSeconds = 86400;
  ASSIGN_OR_RETURN(config.rank_timeouts.behind_s, options.number("rank-timeout-seconds", 0.01, kMostSeconds));
  ASSIGN_OR_RETURN(config.rank_timeouts.step_s, options.number("step-timeout-seconds", 0, kMostSeconds));
  ASSIGN_OR_RETURN(config.rank_timeouts.start_s, options.number("start-timeout-seconds", 0, kMostSeconds));
  ASSIGN_OR_RETURN(const int64_t size, options.integer("replicated-ranks", 1, 64));
  if (size > 1 && config.rank.device == Device::kCuda)
    return bad_input("--replicated-ranks needs --device cpu or ref", "replicated-ranks");
  config.rank.size = static_cast<int32_t>(size);
  RankFault& fault = config.rank.fault;
  ASSIGN_OR_RETURN(fault.step, options.integer("fail-at-step", -1, INT64_MAX));
  ASSIGN_OR_RETURN(const int64_t rank, options.integer("fail-rank", 0, size - 1));
  fault.rank = static_cast<int32_t>(rank);
  const std::string& mode = options.text("fail-mode");
  if (mode != "error" && mode != "hang")
    return bad_input(str_cat("--fail-mode must be error or hang, not \"", mode, "\""), "fail-mode");
  fault.mode = mode == "hang" ? RankFault::Mode::kHang : RankFault::Mode::kError;
  return {};
}

void log_ignored(const Options& options) {
  for (const auto& list :
       {std::span<const IgnoredFlag>(kIgnoredSwitches), std::span<const IgnoredFlag>(kIgnoredValues)})
    for (const IgnoredFlag& flag : list)
      if (options.given(flag.name)) log_info("--", flag.name, " has no effect: ", flag.reason);
}

}  // namespace

void add_engine_options(Options& options) {
  add_device_options(options);
  add_scheduler_options(options);
  add_rank_options(options);
  const char* group = "Accepted from vLLM, without effect";
  for (const IgnoredFlag& flag : kIgnoredSwitches) options.add_switch(flag.name, false, flag.reason, group);
  for (const IgnoredFlag& flag : kIgnoredValues) options.add(flag.name, "", flag.reason, group);
}

Status check_model_folder(const std::string& path) {
  if (path.empty()) return bad_input("no model given: name a folder with config.json, such as models/tiny-k2", "model");
  std::error_code unknown;
  if (std::filesystem::is_regular_file(path, unknown))
    return bad_input(str_cat(path, " is a file: name the folder that it is in"), "model");
  if (!std::filesystem::is_directory(path, unknown))
    return bad_input(str_cat("there is no folder ", path, "; models are not downloaded: name one on this machine"),
                     "model");
  return {};
}

Result<EngineConfig> engine_config(const Options& options) {
  EngineConfig config;
  RETURN_IF_ERROR(check_model_folder(options.text("model")));
  RETURN_IF_ERROR(check_not_there_yet(options));
  log_ignored(options);

  LoadOptions& load = config.rank.load;
  load.path = options.text("model");
  const std::string& format = options.text("load-format");
  if (format != "auto" && format != "safetensors" && format != "fastsafetensors" && format != "dummy")
    return bad_input(str_cat("--load-format must be auto, safetensors or dummy, not \"", format, "\""), "load-format");
  load.format = format == "dummy" ? LoadFormat::kDummy : LoadFormat::kSafetensors;
  ASSIGN_OR_RETURN(load.latent_norm_eps, options.number("latent-norm-eps", -1, 1));
  load.kimi_linear_biased_routing = options.enabled("kimi-linear-biased-routing");
  load.language_model_only = options.enabled("language-model-only");
  load.progress = [progress = LoadProgress()](const char* phase, int64_t done, int64_t total) mutable {
    progress(phase, done, total);
  };

  ASSIGN_OR_RETURN(config.rank.device, device(options.text("device")));
  const bool gpu = config.rank.device == Device::kCuda;
  if (!gpu && options.given("gpu-memory-utilization"))
    log_info("--gpu-memory-utilization has no effect on a CPU: --kv-cache-memory-bytes sizes the page pool");
  const std::string& isa = options.text("cpu-isa");
  if (isa != "auto") {
    const Result<Isa> wanted = parse_isa(isa);
    if (!wanted.ok())
      return bad_input(str_cat("--cpu-isa must be auto, avx2, avx512 or amx, not \"", isa, "\""), "cpu-isa");
    config.rank.isa = *wanted;
  }
  const std::string& dtype = options.text("kv-cache-dtype");
  config.rank.fp8_cache = dtype == "fp8" || dtype == "fp8_e4m3";
  if (dtype != "auto" && dtype != "bf16" && dtype != "bfloat16" && !config.rank.fp8_cache)
    return Error(Code::kUnavailable, str_cat("--kv-cache-dtype must be auto, bf16 or fp8, not \"", dtype, "\""),
                 "kv-cache-dtype");

  RETURN_IF_ERROR(read_ranks(options, config));
  ASSIGN_OR_RETURN(const int64_t threads, options.integer("threads", 0, 1024));
  load.num_threads = static_cast<int>(threads);
  ASSIGN_OR_RETURN(config.rank.memory_share, options.number("gpu-memory-utilization", 0.01, 1));
  ASSIGN_OR_RETURN(config.rank.cache_bytes, cache_bytes(gpu, options));
  ASSIGN_OR_RETURN(const int64_t model_len, options.integer("max-model-len", 0, 1 << 28));
  ASSIGN_OR_RETURN(const BatchLimits limits, batch_limits(gpu, options));
  ASSIGN_OR_RETURN(const int64_t waiting, options.integer("max-waiting-seqs", 1, 1 << 20));
  ASSIGN_OR_RETURN(const int64_t interval, options.integer("checkpoint-interval-blocks", 0, 1 << 20));
  ASSIGN_OR_RETURN(const int64_t turn, options.integer("checkpoint-turn-blocks", 0, 1 << 20));
  config.scheduling.checkpoint_interval_blocks = static_cast<int32_t>(interval);
  config.scheduling.checkpoint_turn_blocks = static_cast<int32_t>(turn);
  config.scheduling.max_model_len = static_cast<int32_t>(model_len);
  config.rank.limits.max_sequences = static_cast<int32_t>(limits.sequences);
  config.rank.limits.max_step_tokens = static_cast<int32_t>(limits.tokens);
  config.max_waiting = static_cast<int32_t>(waiting);
  config.scheduling.prefix_caching = options.enabled("enable-prefix-caching");
  config.rank.limits.deterministic = options.enabled("deterministic");
  config.selfcheck = options.enabled("selfcheck");
  return config;
}

}  // namespace perigee
