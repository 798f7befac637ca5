#include <fmt/core.h>

#include <algorithm>

#include "base/cgroup.h"
#include "base/memory_text.h"
#include "model/dummy.h"
#include "model/registry.h"

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
  CHECK(options.ranks.rank >= 0 && options.ranks.rank < options.ranks.size, "rank ", options.ranks.rank, " of ",
        options.ranks.size);
  config.ranks = options.ranks;
  return config;
}

// The least that a rank's packed weights take on any backend: weights keep their stored precision, except that f32
// is stored as bf16.
double least_bytes(std::span<const TensorSpec> specs, const TensorSource& source, const TensorParallel& ranks) {
  double total = 0;
  for (const TensorSpec& spec : specs) {
    const MatrixPart part = part_of(spec, ranks);
    const double numbers = static_cast<double>(part.rows) * static_cast<double>(part.columns);
    const WeightFormat format = source.format(spec);
    const bool int4 = format == WeightFormat::kInt4Group32, fp8 = format == WeightFormat::kF8Block128;
    total += numbers * (int4 ? 0.5 + 2.0 / 32 : fp8 ? 1 : 2);
  }
  return total;
}

// What the device has is known to the caller; what the host's system gives now, with all that is mapped, only here.
Status check_memory(const LoadOptions& options, double needed, const Ops& ops) {
  const bool fits = needed <= static_cast<double>(options.memory_bytes);
  if (fits && (ops.on_device() || Buffer::can_make(static_cast<size_t>(needed)))) return {};
  return bad_input(
      fmt::format("the weights take at least {}, and there are {} for them{}: another machine, a smaller or quantised "
                  "model, or a smaller cache (--kv-cache-memory-bytes)",
                  memory_text(static_cast<int64_t>(needed)), memory_text(options.memory_bytes),
                  fits ? ", of which the system does not give so much in one piece (ulimit -v)" : ""));
}

}  // namespace

Status check_model_files(const LoadOptions& options) {
  ASSIGN_OR_RETURN(const ModelConfig config, configure(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source, open_source(options));
  const std::vector<TensorSpec> specs = find_family(config.architecture)->tensors(config);
  RETURN_IF_ERROR(source->verify(specs, config));
  return check_shards(specs, *source, config.ranks.size);
}

Result<std::unique_ptr<Model>> load_model(const LoadOptions& options, Ops& ops) {
  ASSIGN_OR_RETURN(const ModelConfig config, configure(options));
  const Family* family = find_family(config.architecture);
  CHECK(family != nullptr, config.architecture, " passed the config check and has no family");
  ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source, open_source(options));
  const std::vector<TensorSpec> specs = family->tensors(config);
  RETURN_IF_ERROR(source->verify(specs, config));
  RETURN_IF_ERROR(check_shards(specs, *source, config.ranks.size));
  RETURN_IF_ERROR(check_limits(config, ops.limits(), ops.name()));
  RETURN_IF_ERROR(check_memory(options, least_bytes(specs, *source, config.ranks), ops));
  const int64_t total_bytes = part_bytes(specs, *source, config.ranks);
  WeightReader reader(*source, ops, config.ranks, total_bytes, options.progress);
  std::unique_ptr<Model> model = family->build(config, reader);
  CHECK(reader.read_bytes() == total_bytes, "read ", reader.read_bytes(), " of ", total_bytes, " bytes");
  return model;
}

}  // namespace perigee
