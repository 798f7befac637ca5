#include <fmt/core.h>

#include <algorithm>

#include "base/cgroup.h"
#include "base/memory_text.h"
#include "model/dummy.h"
#include "model/registry.h"
#include "model/shape_source.h"

namespace perigee {
namespace {

Result<std::unique_ptr<TensorSource>> open_source(const LoadOptions& options) {
  if (options.format == LoadFormat::kSafetensors) return open_file_source(options.path, options.language_model_only);
  return make_dummy_source(options.num_threads > 0 ? options.num_threads : available_cores());
}

// What the file says and the options change.
Result<ModelConfig> configure(const LoadOptions& options) {
  ASSIGN_OR_RETURN(ModelConfig config, read_config(options.path));
  if (options.latent_norm_eps >= 0) config.latent_norm_eps = options.latent_norm_eps;
  if (options.kimi_linear_biased_routing && config.architecture != "KimiLinearForCausalLM")
    return bad_input(
        fmt::format("biased routing weights are for KimiLinearForCausalLM, this is a {}", config.architecture),
        "kimi-linear-biased-routing");
  config.bias_in_weights = options.kimi_linear_biased_routing;
  config.uniform_routing = options.uniform_routing;
  CHECK(options.ranks.rank >= 0 && options.ranks.rank < options.ranks.size, "rank ", options.ranks.rank, " of ",
        options.ranks.size);
  config.ranks = options.ranks;
  return config;
}

// What the device has is known to the caller; what the host's system gives now, with all that is mapped, only here.
Status check_memory(const LoadOptions& options, int64_t needed, const WeightPacker& packer) {
  const bool fits = needed <= options.memory_bytes;
  if (fits && (packer.on_device() || Buffer::can_make(static_cast<size_t>(needed)))) return {};
  return bad_input(
      fmt::format("the weights take {}, and there are {} for them{}: another machine, a smaller or quantised model, or "
                  "a smaller cache (--kv-cache-memory-bytes)",
                  memory_text(needed), memory_text(options.memory_bytes),
                  fits ? ", of which the system does not give so much in one piece (ulimit -v)" : ""));
}

// A model's tensors, all checked.
struct OpenModel {
  ModelConfig config;
  const Family* family = nullptr;
  std::unique_ptr<TensorSource> source;
  std::vector<TensorSpec> specs;
  CacheScales cache_scales;
};

// The model's own, those of --kv-scale, or none.
Result<CacheScales> find_cache_scales(const OpenModel& open, const LoadOptions& options) {
  constexpr const char* kFlag = "kv-scale";
  const std::vector<std::string> attentions = latent_attentions(open.config);
  CacheScales stored;
  const std::string* missing = nullptr;
  for (const std::string& attention : attentions)
    if (const auto scale = open.source->cache_scale(attention))
      stored.emplace(attention, *scale);
    else if (missing == nullptr)
      missing = &attention;
  if (!stored.empty() && missing != nullptr)
    return bad_input(fmt::format("{}: tensor {}.k_scale is missing: expected the scale of an fp8 cache in every layer "
                                 "with latent attention or in none, found {} of {}",
                                 options.path, *missing, stored.size(), attentions.size()),
                     *missing + ".k_scale");
  if (options.kv_scale_file.empty()) return stored;
  if (options.cache != LatentFormat::kF8E4M3)
    return bad_input("--kv-scale is for --kv-cache-dtype fp8; leave it out", kFlag);
  if (!stored.empty())
    return bad_input(fmt::format("--kv-scale: {} has scales of its own, such as {}.k_scale; leave the flag out",
                                 options.path, stored.begin()->first),
                     kFlag);
  return read_cache_scales(options.kv_scale_file, attentions);
}

Result<OpenModel> open_model(const LoadOptions& options) {
  OpenModel open;
  ASSIGN_OR_RETURN(open.config, configure(options));
  open.family = find_family(open.config.architecture);
  CHECK(open.family != nullptr, open.config.architecture, " passed the config check and has no family");
  ASSIGN_OR_RETURN(open.source, open_source(options));
  open.specs = open.family->tensors(open.config);
  RETURN_IF_ERROR(open.source->verify(open.specs, open.config));
  RETURN_IF_ERROR(check_shards(open.specs, *open.source, open.config.ranks.size));
  ASSIGN_OR_RETURN(open.cache_scales, find_cache_scales(open, options));
  return open;
}

// Reads all that a rank keeps of `source`.
std::unique_ptr<Model> build(const OpenModel& open, const TensorSource& source, WeightPacker& packer,
                             WeightReader::Progress progress) {
  const int64_t total_bytes = part_bytes(open.specs, source, open.config.ranks);
  WeightReader reader(source, packer, open.config.ranks, total_bytes, open.cache_scales, std::move(progress));
  std::unique_ptr<Model> model = open.family->build(open.config, reader);
  CHECK(reader.read_bytes() == total_bytes, "read ", reader.read_bytes(), " of ", total_bytes, " bytes");
  return model;
}

// Whether the model's latents can be kept so.
Status check_cache(const ModelConfig& c, std::optional<LatentFormat> format) {
  if (format != LatentFormat::kF8Tiles) return {};
  constexpr int64_t kLatent = 512, kRope = 64;  // the record's
  constexpr const char* kFlag = "kv-cache-dtype";
  if (c.num_layers == c.num_kda_layers())
    return bad_input("--kv-cache-dtype fp8_ds_mla: no layer of this model has latent attention; use auto", kFlag);
  if (c.kv_lora != kLatent || c.rope != kRope)
    return bad_input(fmt::format("--kv-cache-dtype fp8_ds_mla: its record is for kv_lora_rank {} and qk_rope_head_dim "
                                 "{}, config.json has {} and {}; use fp8 or bf16",
                                 kLatent, kRope, c.kv_lora, c.rope),
                     kFlag);
  return {};
}

Status check_backend(const OpenModel& open, const LoadOptions& options, const WeightPacker& packer) {
  RETURN_IF_ERROR(check_limits(open.config, packer.limits(), packer.name()));
  return check_cache(open.config, options.cache);
}

std::unique_ptr<Model> size_open_model(const OpenModel& open, WeightPacker& sizes) {
  return build(open, ShapeSource(*open.source), sizes, nullptr);
}

}  // namespace

Status check_model_files(const LoadOptions& options) {
  const auto open = open_model(options);
  return open.ok() ? Status() : Status(open.error());
}

Result<std::unique_ptr<Model>> size_model(const LoadOptions& options, WeightPacker& sizes) {
  ASSIGN_OR_RETURN(const OpenModel open, open_model(options));
  RETURN_IF_ERROR(check_backend(open, options, sizes));
  return size_open_model(open, sizes);
}

Result<std::unique_ptr<Model>> load_model(const LoadOptions& options, Ops& ops) {
  ASSIGN_OR_RETURN(const OpenModel open, open_model(options));
  RETURN_IF_ERROR(check_backend(open, options, ops));
  const std::unique_ptr<Model> sized = size_open_model(open, *ops.sizes());
  RETURN_IF_ERROR(check_memory(options, sized->info().weight_bytes, ops));
  return build(open, *open.source, ops, options.progress);
}

}  // namespace perigee
