#include "main/engine_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "base/cgroup.h"
#include "base/log.h"
#include "main/progress.h"
#include "main/speculation_flag.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr int64_t kMostSequences = 65536, kMostTokens = 1 << 20, kMostBlocks = 1 << 20, kMostRanks = 64;
constexpr double kMostSeconds = 86400;

void add_model_flags(CommandLine& flags, EngineFlags& to) {
  RankConfig& rank = to.config.rank;
  flags.group("Model and device");
  add_load_flags(flags, rank.load);
  flags.add(
      "--device", to.device,
      OneOf<std::optional<Device>>{
          {{"auto", std::nullopt}, {"cpu", Device::kCpu}, {"cuda", Device::kCuda}, {"ref", Device::kRef}}},
      "cpu (AVX2, AVX-512, AMX), cuda (a GPU for each rank), ref (the slow definition); auto: cuda if there is a GPU");
  flags.add("--cpu-isa", rank.isa,
            OneOf<std::optional<Isa>>{
                {{"auto", std::nullopt}, {"avx2", Isa::kAvx2}, {"avx512", Isa::kAvx512}, {"amx", Isa::kAmx}}},
            "auto: the best of this machine");
  flags.add("--dtype", to.bf16, OneOf<bool>{{{"auto", true}, {"bfloat16", true}, {"bf16", true}}},
            "what is computed in");
  flags.add(
      "--quantization,-q", rank.quantization,
      OneOf<OnlineQuantization>{
          {{"none", OnlineQuantization::kNone}, {"int8_per_channel_weight_only", OnlineQuantization::kInt8PerChannel}}},
      "on a CPU: what weights become at load that the model stores in 16 bits; those that it stores in fewer stay "
      "as they are");
  flags.add("--tokenizer", to.tokenizer, "only the model folder's own");
}

void add_parallel_flags(CommandLine& flags, EngineFlags& to) {
  flags.group("Parallel");
  const Whole ranks{1, kMostSequences};
  flags.add(
      "--tensor-parallel-size,--tensor-parallel,--tp", to.parallel.tensor, Whole{1, kMostRanks},
      "ranks that each hold a share of the heads, of every expert and of the vocabulary; each on a GPU of its own");
  flags.add_switch("--enable-expert-parallel", to.config.rank.whole_experts,
                   "deal whole experts to the ranks; without it each has a share of every expert");
  flags.add("--decode-context-parallel-size,--dcp", to.config.rank.limits.dcp_size, Whole{1, kMaxDcpSize},
            "ranks that share the cache of latents, each with some of a sequence's blocks; divides the tensor parallel "
            "size");
  flags.add(
      "--comm", to.config.rank.collectives.carrier,
      OneOf<Carrier>{
          {{"auto", Carrier::kAuto}, {"p2p", Carrier::kPeer}, {"host", Carrier::kHost}, {"nccl", Carrier::kNccl}}},
      "how GPUs exchange data: p2p through each other's memory, host through the host's, nccl by NCCL's library; "
      "auto: p2p where all of them reach each other, else host");
  flags.add("--pipeline-parallel-size,--pp", to.parallel.pipeline, ranks, "only 1 in this version");
  flags.add("--data-parallel-size,--dp", to.parallel.data, ranks, "only 1 in this version");
  flags.add(
      "--speculative-config", to.speculative_config,
      "JSON with vLLM's keys: {\"method\": \"ngram\", \"num_speculative_tokens\": 3} verifies in each step three "
      "tokens that followed the same words before; {\"method\": \"eagle3\", \"model\": \"FOLDER\", ...} three that a "
      "draft model guesses");
}

void add_scheduler_flags(CommandLine& flags, EngineConfig& to) {
  flags.group("Cache and scheduler");
  flags.add("--kv-cache-memory-bytes", to.rank.cache_bytes, OrAuto{Bytes()},
            "size of the page pool; auto: what gpu-memory-utilization leaves, on a CPU 1G");
  flags.add("--gpu-memory-utilization", to.rank.memory_share, Number{0.01, 1},
            "share of the GPU's memory for weights, workspace and page pool");
  flags.add("--kv-cache-dtype", to.rank.load.cache,
            OneOf<std::optional<LatentFormat>>{{{"auto", std::nullopt},
                                                {"bf16", std::nullopt},
                                                {"bfloat16", std::nullopt},
                                                {"fp8", LatentFormat::kF8E4M3},
                                                {"fp8_e4m3", LatentFormat::kF8E4M3},
                                                {"fp8_ds_mla", LatentFormat::kF8Tiles}}},
            "auto or bf16; fp8: e4m3 with scales of the model or of --kv-scale, else 1; fp8_ds_mla: 656-byte records, "
            "e4m3 with a scale for "
            "each 128 numbers and k_rope in bf16");
  flags.add("--kv-scale", to.rank.load.kv_scale_file,
            "file of perigee calibrate with the scales of an fp8 cache, for a model without its own");
  flags.add("--max-model-len", to.scheduling.max_model_len, Whole{0, 1 << 28},
            "longest prompt + reply; 0: the model's, or what the cache holds");
  flags.add("--speculation-max-context", to.scheduling.speculation_max_context, Whole{0, 1 << 28},
            "longest context of a sequence that verifies drafts; 0: any");
  flags.add("--max-num-seqs", to.rank.limits.max_sequences, OrAuto{Whole{1, kMostSequences}},
            "sequences that run together; auto: 1024 on a GPU, 128 on a CPU");
  flags.add("--max-num-batched-tokens", to.rank.limits.max_step_tokens, OrAuto{Whole{1, kMostTokens}},
            "token budget of a step, prefill and decode together; auto: 8192 on a GPU, 2048 on a CPU");
  flags.add("--max-waiting-seqs", to.max_waiting, Whole{1, 1 << 20}, "queue length; over it requests get 429");
  flags.add_switch("--enable-prefix-caching", to.scheduling.prefix_caching, "reuse the cache of common prefixes");
  flags.add("--checkpoint-interval-blocks", to.scheduling.checkpoint_interval_blocks, Whole{0, kMostBlocks},
            "recurrent models: blocks of 64 tokens between states that stay; 0: none");
  flags.add("--checkpoint-rolling-blocks", to.scheduling.checkpoint_rolling_blocks, Whole{0, kMostBlocks},
            "recurrent models: blocks of output between states saved for the next turn; 0: none");
  flags.add_switch("--deterministic", to.rank.limits.deterministic,
                   "same bits for a request whatever runs beside it, cached or not");
  flags.add_switch("--selfcheck", to.selfcheck, "check the books after every step");
}

void add_rank_flags(CommandLine& flags, EngineConfig& to) {
  flags.group("Ranks");
  flags.add("--rank-timeout-seconds", to.rank_timeouts.behind_s, Number{0.01, kMostSeconds},
            "a rank is lost that is so long behind another one of its group");
  flags.add("--step-timeout-seconds", to.rank_timeouts.step_s, Number{0, kMostSeconds},
            "a rank is lost that works at one step for longer; 0: a step may take any time");
  flags.add("--start-timeout-seconds", to.rank_timeouts.start_s, Number{0, kMostSeconds},
            "the start fails when a rank shows no sign of life for so long; 0: it may take any time");
  flags.add("--replicated-ranks", to.rank.size, Whole{1, kMostRanks},
            "for tests: so many CPU ranks that each hold the whole model");
  flags.add("--fail-at-step", to.rank.fault.step, Whole{-1, INT64_MAX},
            "for tests: a rank is lost in this step; -1: never");
  flags.add("--fail-rank", to.rank.fault.rank, Whole{0, kMostRanks - 1}, "for tests: which one");
  flags.add("--fail-mode", to.rank.fault.mode,
            OneOf<RankFault::Mode>{{{"error", RankFault::Mode::kError}, {"hang", RankFault::Mode::kHang}}},
            "for tests: error (its device is lost) or hang (its thread stops)");
}

// Pasted with every recipe. What they ask for is always so here, is derived from the model, or has no object.
void add_ignored_flags(CommandLine& flags) {
  for (const auto& [name, why] : std::initializer_list<std::pair<const char*, const char*>>{
           {"--trust-remote-code", "no code of a model is executed"},
           {"--enable-auto-tool-choice", "tool calls are always read"},
           {"--enable-chunked-prefill", "prefill is always chunked"},
           {"--async-scheduling", "two plans are always in flight"},
           {"--enforce-eager", "decode steps are graphs on every GPU"},
           {"--enable-log-requests", "each request is a line at --log-level info, without its text"},
           {"--disable-log-requests", "each request is a line at --log-level info, without its text"},
           {"--disable-log-stats", "the line of throughput comes at --log-level info"},
           {"--disable-hybrid-kv-cache-manager", "one page pool holds every kind of cache"}})
    flags.add_ignored_switch(name, why);
  for (const auto& [name, why] : std::initializer_list<std::pair<const char*, const char*>>{
           {"--tool-call-parser", "the model's own markers are read"},
           {"--reasoning-parser", "the model's own markers are read"},
           {"--attention-backend", "kernels follow from device and sizes"},
           {"--block-size", "a block has 64 tokens"},
           {"--compilation-config", "nothing is compiled at start"},
           {"--limit-mm-per-prompt", "images are not read"},
           {"--mm-processor-cache-gb", "images are not read"},
           {"--mm-encoder-tp-mode", "images are not read"}})
    flags.add_ignored_value(name, why);
}

Status check_not_there_yet(const EngineFlags& read) {
  constexpr const char* kOnlyOne = "not in this version; use 1";
  const ParallelSizes& parallel = read.parallel;
  const bool other_tokenizer = !read.tokenizer.empty() && read.tokenizer != read.config.rank.load.path;
  for (const auto& [name, asked, why] : std::initializer_list<std::tuple<const char*, bool, const char*>>{
           {"pipeline-parallel-size", parallel.pipeline > 1, kOnlyOne},
           {"data-parallel-size", parallel.data > 1, kOnlyOne},
           {"tokenizer", other_tokenizer, "only the model folder's own tokenizer is read; leave it out"}})
    if (asked) return Error(Code::kUnavailable, fmt::format("--{}: {}", name, why), name);
  return {};
}

Device best_device() {
  const Status gpu = select_device(0);
  log_info("device: ", gpu.ok() ? "cuda" : fmt::format("cpu; {}", gpu.error().message));
  return gpu.ok() ? Device::kCuda : Device::kCpu;
}

// A limit that is not given follows the device, and gives way to one that is: half a small budget stays for prefills.
Status settle_limits(bool gpu, PlanLimits& limits) {
  const bool any_sequences = limits.max_sequences == 0, any_tokens = limits.max_step_tokens == 0;
  if (any_tokens) limits.max_step_tokens = gpu ? 8192 : 2048;
  if (any_sequences) limits.max_sequences = std::clamp(limits.max_step_tokens / 2, 1, gpu ? 1024 : 128);
  if (any_tokens) limits.max_step_tokens = std::max(limits.max_step_tokens, limits.max_sequences);
  if (limits.max_step_tokens < limits.max_sequences)
    return bad_input(
        fmt::format("--max-num-batched-tokens {} is under --max-num-seqs {}: a decode step needs one token "
                    "for each sequence",
                    limits.max_step_tokens, limits.max_sequences),
        "max-num-batched-tokens");
  return {};
}

Status check_quantization(const RankConfig& rank) {
  if (rank.quantization == OnlineQuantization::kNone || rank.device == Device::kCpu) return {};
  return bad_input(
      "--quantization int8_per_channel_weight_only is there on a CPU only: add --device cpu, or leave it out",
      "quantization");
}

// How many ranks there are, and what each holds.
Status settle_ranks(int32_t tensor_parallel, RankConfig& rank) {
  const bool gpu = rank.device == Device::kCuda;
  if (gpu && rank.size > 1) return bad_input("--replicated-ranks needs --device cpu or ref", "replicated-ranks");
  if (rank.size > 1 && tensor_parallel > 1)
    return bad_input(
        fmt::format("--replicated-ranks {} and --tensor-parallel-size {}: a rank holds all of the model or a share "
                    "of it; leave one of the two out",
                    rank.size, tensor_parallel),
        "replicated-ranks");
  RETURN_IF_ERROR(check_dcp(rank.limits.dcp_size, tensor_parallel));
  if (tensor_parallel > 1) {
    rank.size = tensor_parallel;
    rank.layout = RankLayout::kTensorParallel;
  }
  if (rank.fault.rank >= rank.size)
    return bad_input(fmt::format("--fail-rank {}: the ranks are 0 to {}", rank.fault.rank, rank.size - 1), "fail-rank");
  return {};
}

// A rank that has to wait for a core holds up all others, several times in each layer.
void warn_of_few_cores(const RankConfig& rank) {
  const int cores = available_cores(), threads = std::max(rank.load.num_threads, 1);
  if (rank.device != Device::kCuda && rank.size > 1 && int64_t{rank.size} * threads > cores)
    log_warning(fmt::format("{} ranks of {} on {}: they take turns, and each step is slower than with fewer ranks",
                            rank.size, threads == 1 ? "1 thread" : fmt::format("{} threads", threads),
                            cores == 1 ? "1 core" : fmt::format("{} cores", cores)));
}

}  // namespace

void add_load_flags(CommandLine& flags, LoadOptions& to) {
  flags.add("model,--model", to.path, "folder with config.json");
  flags.add("--load-format", to.format,
            OneOf<LoadFormat>{{{"auto", LoadFormat::kSafetensors},
                               {"safetensors", LoadFormat::kSafetensors},
                               {"fastsafetensors", LoadFormat::kSafetensors},
                               {"dummy", LoadFormat::kDummy}}},
            "auto, safetensors, or dummy (made-up weights, for sizing)");
  flags.add("--threads", to.num_threads, Whole{0, 1024},
            "threads of each CPU rank; 0: the cores that this process (its mask, its container) may use, divided among "
            "the ranks");
  flags.add("--latent-norm-eps", to.latent_norm_eps, Number{-1, 1},
            "eps of the q_a and kv_a norms; -1: rms_norm_eps (transformers uses 1e-6)");
  flags.add_switch("--kimi-linear-biased-routing", to.kimi_linear_biased_routing,
                   "weigh experts with the selection bias, as Kimi-Linear's own code does");
  flags.add_switch("--language-model-only", to.language_model_only, "skip the vision part of a multimodal model");
}

EngineFlags::EngineFlags() {
  config.rank.cache_bytes = config.rank.limits.max_sequences = config.rank.limits.max_step_tokens = 0;
}

void add_engine_flags(CommandLine& flags, EngineFlags& to) {
  add_model_flags(flags, to);
  add_parallel_flags(flags, to);
  add_scheduler_flags(flags, to.config);
  add_rank_flags(flags, to.config);
  add_kv_transfer_flags(flags, to.kv_transfer);
  add_ignored_flags(flags);
}

Status check_model_folder(const std::string& path) {
  if (path.empty()) return bad_input("no model given: give a folder with config.json, such as models/tiny-k2", "model");
  std::error_code unknown;
  if (std::filesystem::is_regular_file(path, unknown))
    return bad_input(
        fmt::format("the model is {}, which is a file, expected a folder: give the folder that contains it", path),
        "model");
  if (!std::filesystem::is_directory(path, unknown))
    return bad_input(
        fmt::format("the model folder {} does not exist: give a folder on this machine (models are not downloaded)",
                    path),
        "model");
  if (!std::filesystem::exists(std::filesystem::path(path) / "config.json", unknown))
    return bad_input(fmt::format("the model folder {} has no config.json: give a folder with config.json, weights and "
                                 "tokenizer",
                                 path),
                     "model");
  return {};
}

Status check_dcp(int32_t dcp_size, int32_t tensor_parallel) {
  if (tensor_parallel % dcp_size == 0) return {};
  return bad_input(
      fmt::format("--decode-context-parallel-size {} does not divide --tensor-parallel-size {}: the ranks of a dcp "
                  "group are some of those; use 1{}",
                  dcp_size, tensor_parallel,
                  tensor_parallel > 1 ? fmt::format(", {} or another divisor", tensor_parallel) : ""),
      "decode-context-parallel-size");
}

Result<EngineConfig> settle(const CommandLine& flags, EngineFlags read) {
  RankConfig& rank = read.config.rank;
  RETURN_IF_ERROR(check_model_folder(rank.load.path));
  RETURN_IF_ERROR(check_not_there_yet(read));
  flags.log_ignored();
  rank.device = read.device ? *read.device : best_device();
  const bool gpu = rank.device == Device::kCuda;
  if (!gpu && flags.given("gpu-memory-utilization"))
    log_info("--gpu-memory-utilization has no effect on a CPU: --kv-cache-memory-bytes sizes the page pool");
  if (!gpu && rank.cache_bytes == 0) rank.cache_bytes = int64_t{1} << 30;
  RETURN_IF_ERROR(check_quantization(rank));
  RETURN_IF_ERROR(settle_limits(gpu, rank.limits));
  RETURN_IF_ERROR(settle_ranks(read.parallel.tensor, rank));
  RETURN_IF_ERROR(read_speculative_config(read.speculative_config, rank));
  RETURN_IF_ERROR(check_draft_folder(rank.draft_model));
  warn_of_few_cores(rank);
  rank.load.progress = Progress("GB", 1e9, 2);
  return std::move(read.config);
}

}  // namespace perigee
