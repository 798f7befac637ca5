#include "main/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/count_text.h"
#include "base/memory_text.h"
#include "engine/handovers.h"
#include "exec/host_device.h"

namespace perigee {
namespace {

constexpr size_t kWays = 3;
constexpr int64_t kMostRanks = 64;

// What could be changed so that it fits, each tried by a plan of its own.
class WaysOut {
 public:
  WaysOut(const EngineConfig& config, const MemoryPlan& plan) : config_(config), plan_(plan) {}

  std::vector<std::string> list() {
    if (plan_.device == Device::kCuda) try_more_gpus();
    try_shared_cache();
    try_fp8_cache();
    try_shorter_context();
    try_smaller_cache();
    if (plan_.device == Device::kCuda) try_smaller_steps();
    // These always help, if they can be had.
    if (2 * plan_.weights > plan_.limit) add("a checkpoint with INT4 or FP8 weights, or a smaller model");
    const bool share = plan_.device == Device::kCuda && config_.rank.cache_bytes == 0;
    add(fmt::format(
        "{} with {} for each rank", plan_.device == Device::kCuda ? "GPUs" : "a machine",
        memory_text(static_cast<int64_t>(static_cast<double>(needed()) / (share ? config_.rank.memory_share : 1)))));
    add("a smaller model");
    add(plan_.device == Device::kCuda ? "a higher --gpu-memory-utilization"
                                      : "a higher limit of this process (ulimit -v, or its container's)");
    ways_.resize(kWays);
    return std::move(ways_);
  }

 private:
  int64_t needed() const {
    return plan_.fixed() + std::max(plan_.pool, plan_.needed_pages() * plan_.layout.bytes_per_page());
  }
  void add(std::string way) { ways_.push_back(std::move(way)); }
  bool fits(const EngineConfig& config) const {
    const auto plan = plan_memory(config, plan_.machine);
    return plan.ok() && plan->fits();
  }

  void try_more_gpus() {
    EngineConfig other = config_;
    other.rank.layout = RankLayout::kTensorParallel;
    for (other.rank.size = plan_.ranks * 2; other.rank.size <= kMostRanks; other.rank.size *= 2) {
      if (!fits(other)) continue;
      return add(fmt::format("more GPUs: --tensor-parallel-size {} on as many", other.rank.size));
    }
  }
  void try_shared_cache() {
    EngineConfig other = config_;
    const int32_t shards = config_.rank.shard().size;
    int32_t& dcp = other.rank.limits.dcp_size;
    for (++dcp; dcp <= std::min(shards, kMaxDcpSize); ++dcp)
      if (shards % dcp == 0 && fits(other))
        return add(fmt::format("a cache that ranks share: --decode-context-parallel-size {}", dcp));
  }
  void try_fp8_cache() {
    EngineConfig other = config_;
    other.rank.load.cache = LatentFormat::kF8E4M3;
    if (!config_.rank.load.cache && fits(other)) add("--kv-cache-dtype fp8, which halves the cache of a token");
  }
  void try_shorter_context() {
    EngineConfig other = config_;
    const int64_t tokens = plan_.cache_size().max_tokens();
    other.scheduling.max_model_len = static_cast<int32_t>(tokens);
    if (plan_.length_asked && tokens > 0 && fits(other))
      add(fmt::format("a shorter context: --max-model-len {}", tokens));
  }
  void try_smaller_cache() {
    const int64_t page = plan_.layout.bytes_per_page(), room = (plan_.limit - plan_.fixed()) / page * page;
    EngineConfig other = config_;
    other.rank.cache_bytes = room;
    if (config_.rank.cache_bytes > room && room > 0 && fits(other))
      add(fmt::format("lower --kv-cache-memory-bytes to {} at most", room));
    other.rank.cache_bytes = (needed() - plan_.fixed() + page - 1) / page * page;
    if (config_.rank.cache_bytes > 0 && config_.rank.cache_bytes < other.rank.cache_bytes && fits(other))
      add(fmt::format("raise --kv-cache-memory-bytes to {}", other.rank.cache_bytes));
  }
  void try_smaller_steps() {
    EngineConfig other = config_;
    other.rank.limits.max_step_tokens = std::min(other.rank.limits.max_step_tokens, 2048);
    other.rank.limits.max_sequences = std::min(other.rank.limits.max_sequences, 128);
    if (fits(other))
      add(fmt::format("smaller steps: --max-num-batched-tokens {} --max-num-seqs {}", other.rank.limits.max_step_tokens,
                      other.rank.limits.max_sequences));
  }

  const EngineConfig& config_;
  const MemoryPlan& plan_;
  std::vector<std::string> ways_;
};

std::string parts_text(const MemoryPlan& plan) {
  std::string text = fmt::format("{} of weights", memory_text(plan.weights));
  if (plan.workspace.total() > 0) text += fmt::format(", about {} of workspace", memory_text(plan.workspace.total()));
  if (plan.ring > 0) text += fmt::format(", {} of rings", memory_text(plan.ring));
  if (plan.transfers > 0) text += fmt::format(", {} for transfers of caches", memory_text(plan.transfers));
  return text;
}

std::string line(const char* name, const std::string& value) {
  return fmt::format("{:<22} {}\n", name, value);
}

// Of the longest.
int64_t whole_sequences(const MemoryPlan& plan) {
  return static_cast<int64_t>(plan.cache_size().sequences_of(plan.max_model_len));
}

int64_t bytes_a_token(const CacheGroup& group) {
  return group.layers * group.row_bytes();
}

}  // namespace

Machine Machine::of_gpus(std::span<const Gpu> gpus) {
  const Gpu& first = gpus.front();
  return {.name = fmt::format("{} x {}", gpus.size(), first.name),
          .bytes = first.bytes,
          .compute_capability = first.compute_capability};
}

Result<Machine> this_machine(const RankConfig& config) {
  if (config.device != Device::kCuda) return Machine{.name = "this machine", .bytes = host_memory_bytes()};
  const std::vector<Gpu> gpus = list_gpus();
  RETURN_IF_ERROR(check_gpus(gpus, config.size));
  return Machine::of_gpus(std::span(gpus).first(static_cast<size_t>(config.size)));
}

Result<MemoryPlan> plan_memory(const EngineConfig& config, const Machine& machine) {
  RETURN_IF_ERROR(check_positions(config));
  RankConfig rank = config.rank;
  rank.load.ranks = rank.shard();
  const bool gpu = rank.device == Device::kCuda;
  ASSIGN_OR_RETURN(const RankParts parts, gpu ? size_gpu_parts(rank) : size_host_parts(rank));
  MemoryPlan plan{.device = rank.device,
                  .ranks = rank.size,
                  .dcp_size = rank.limits.dcp_size,
                  .dealing = rank.limits.dealing(),
                  .machine = machine};
  plan.weights = parts.weight_bytes();
  plan.layout = parts.layout;
  plan.least_pages = parts.least_pages();
  plan.length_asked = config.scheduling.max_model_len > 0;
  plan.max_model_len = plan.length_asked ? config.scheduling.max_model_len : parts.model->info().max_positions;
  plan.max_sequences = rank.limits.max_sequences;
  if (!gpu) {
    plan.limit = machine.bytes / rank.size;
    plan.ring = parts.state_pages() > 0 ? parts.ring_bytes() : 0;
    plan.pool = rank.cache_bytes / plan.layout.bytes_per_page() * plan.layout.bytes_per_page();
    return plan;
  }
  ASSIGN_OR_RETURN(ModelConfig model, read_config(rank.load.path));
  model.ranks = rank.load.ranks;
  plan.workspace = estimate_gpu_workspace(parts, model, machine.compute_capability);
  plan.transfers = Handovers::gpu_bytes(config.handover);
  plan.limit = rank.cache_bytes > 0 ? machine.bytes
                                    : static_cast<int64_t>(rank.memory_share * static_cast<double>(machine.bytes));
  const int64_t pool = gpu_pool_bytes(rank, machine.bytes, plan.fixed());
  plan.pool = pool > 0 ? pool / plan.layout.bytes_per_page() * plan.layout.bytes_per_page() : pool;
  return plan;
}

Status check_fits(const EngineConfig& config, const MemoryPlan& plan) {
  if (plan.fits()) return {};
  const bool gpu = plan.device == Device::kCuda, length = plan.length_asked && plan.pages() >= plan.least_pages;
  std::string why, field = gpu ? "gpu-memory-utilization" : "kv-cache-memory-bytes";
  if (plan.fixed() + std::max<int64_t>(plan.pool, 0) <= plan.limit && length) {
    field = "max-model-len";
    why = fmt::format("--max-model-len {} does not fit the cache of {} tokens beside {}", plan.max_model_len,
                      plan.cache_size().max_tokens(), parts_text(plan));
  } else if (const int64_t least = plan.needed_pages() * plan.layout.bytes_per_page();
             config.rank.cache_bytes > 0 && plan.pool < least && plan.fixed() + least <= plan.limit) {
    field = "kv-cache-memory-bytes";
    why = fmt::format("a cache of {} bytes holds {} of {} bytes, and {} are needed", config.rank.cache_bytes,
                      count_text(plan.pages(), "page"), plan.layout.bytes_per_page(), plan.needed_pages());
  } else {
    const int64_t cache = std::max(plan.pool, least);
    why = fmt::format("a rank takes {} and a cache of {}, which is over the memory that {} may have, {}{}",
                      parts_text(plan), memory_text(cache), gpu ? "it" : "this process", memory_text(plan.limit),
                      gpu && config.rank.cache_bytes == 0
                          ? fmt::format(" (--gpu-memory-utilization {:g} of {})", config.rank.memory_share,
                                        memory_text(plan.machine.bytes))
                      : plan.ranks > 1 ? " for each of its ranks"
                                       : "");
  }
  const std::vector<std::string> ways = WaysOut(config, plan).list();
  return bad_input(fmt::format("{}. Ways out: {}; {}; or {}", why, ways[0], ways[1], ways[2]), field);
}

std::string plan_text(const MemoryPlan& plan) {
  const bool gpu = plan.device == Device::kCuda;
  const int64_t page = plan.layout.bytes_per_page();
  std::string out = line("ranks", fmt::format("{} on {}, {}{}", plan.ranks, plan.machine.name,
                                              memory_text(plan.machine.bytes), gpu ? " each" : ""));
  if (plan.dcp_size > 1) out += line("dcp groups", fmt::format("{} ranks share the cache", plan.dcp_size));
  out += line("a rank may take", memory_text(plan.limit));
  out += line("weights", memory_text(plan.weights));
  if (gpu) {
    out += line("workspace", fmt::format("{} (estimated: {} of arrays, {} of temporaries, {} of the driver's)",
                                         memory_text(plan.workspace.total()), memory_text(plan.workspace.arrays),
                                         memory_text(plan.workspace.temporaries), memory_text(plan.workspace.context)));
    out += line("graphs", fmt::format("{} (estimated)", memory_text(plan.workspace.graphs)));
  } else {
    out += line("workspace", "not planned on a host: it grows with the first large steps");
  }
  if (plan.ring > 0) out += line("rings", memory_text(plan.ring));
  if (plan.transfers > 0) out += line("cache transfers", memory_text(plan.transfers));
  out += line("page pool", plan.pool < 0 ? fmt::format("none: {} lack", memory_text(-plan.pool))
                                         : fmt::format("{}: {} of {}", memory_text(plan.pool),
                                                       count_text(plan.pages(), "page"), count_text(page, "byte")));
  for (const CacheGroup& group : plan.layout.groups()) {
    if (group.arena == kDraftArena)
      out += line("  draft", fmt::format("{} bytes a token, {}, in {} beside each page", grouped(bytes_a_token(group)),
                                         group.kind == CacheKind::kFull ? dtype_name(group.numbers)
                                                                        : latent_format_name(group.format),
                                         count_text(group.block_ratio, "block")));
    else if (group.kind == CacheKind::kLatent)
      out += line("  latents", fmt::format("{} bytes a token, {}, {}", grouped(bytes_a_token(group)),
                                           latent_format_name(group.format), count_text(group.layers, "layer")));
    else
      out += line("  state", fmt::format("{} bytes a sequence, and a checkpoint: {}",
                                         grouped(plan.layout.state_pages() * plan.layout.page_bytes()),
                                         count_text(plan.layout.state_pages(), "page")));
  }
  out +=
      line("fits", fmt::format("{}; {} of {}; at most {} at once", count_text(plan.cache_size().max_tokens(), "token"),
                               count_text(whole_sequences(plan), "sequence"), count_text(plan.max_model_len, "token"),
                               plan.max_sequences));
  return out;
}

Json plan_json(const MemoryPlan& plan) {
  Json out;
  out.set("ranks", plan.ranks);
  out.set("dcp_size", plan.dcp_size);
  out.set("machine", plan.machine.name);
  out.set("machine_bytes", plan.machine.bytes);
  out.set("limit_bytes", plan.limit);
  out.set("weight_bytes", plan.weights);
  if (plan.device == Device::kCuda) {
    Json workspace;
    workspace.set("estimated", true);
    workspace.set("context_bytes", plan.workspace.context);
    workspace.set("array_bytes", plan.workspace.arrays);
    workspace.set("temporary_bytes", plan.workspace.temporaries);
    out.set("workspace", std::move(workspace));
    out.set("graph_bytes", plan.workspace.graphs);
  }
  out.set("ring_bytes", plan.ring);
  out.set("transfer_bytes", plan.transfers);
  out.set("pool_bytes", std::max<int64_t>(plan.pool, 0));
  out.set("page_bytes", plan.layout.page_bytes());
  out.set("pages", plan.pages());
  Json::Array groups;
  for (const CacheGroup& group : plan.layout.groups()) {
    const bool state = group.kind == CacheKind::kState;
    Json one;
    one.set("kind", state ? "state" : group.arena == kDraftArena ? "draft" : "latent");
    one.set("layers", group.layers);
    one.set("bytes_a_token", state ? 0 : bytes_a_token(group));
    one.set("bytes_a_sequence", state ? plan.layout.state_pages() * plan.layout.page_bytes() : 0);
    groups.push_back(std::move(one));
  }
  out.set("cache_groups", std::move(groups));
  out.set("tokens", plan.cache_size().max_tokens());
  out.set("max_model_len", plan.max_model_len);
  out.set("sequences", whole_sequences(plan));
  out.set("fits", plan.fits());
  return out;
}

}  // namespace perigee
