#include <algorithm>
#include <thread>

#include "model/dummy.h"
#include "model/registry.h"

namespace perigee {
namespace {

Result<std::unique_ptr<TensorSource>> open_source(const LoadOptions& options) {
  if (options.format == LoadFormat::kSafetensors)
    return open_checkpoint_source(options.path, options.language_model_only);
  const unsigned cores = std::max(std::thread::hardware_concurrency(), 1u);
  return make_dummy_source(options.num_threads > 0 ? options.num_threads : static_cast<int>(cores));
}

}  // namespace

Result<std::unique_ptr<Model>> load_model(const LoadOptions& options, Ops& ops) {
  ASSIGN_OR_RETURN(const ModelConfig config, read_config(options.path));
  const Family* family = find_family(config.architecture);
  CHECK(family != nullptr, config.architecture, " passed the config check and has no family");
  ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source, open_source(options));
  const std::vector<TensorSpec> specs = family->tensors(config);
  ASSIGN_OR_RETURN(const int64_t total_bytes, source->verify(specs, config));
  const double latent_eps = options.latent_norm_eps < 0 ? config.rms_norm_eps : options.latent_norm_eps;
  WeightReader reader(*source, ops, total_bytes, options.progress);
  std::unique_ptr<Model> model = family->build(config, latent_eps, reader);
  if (options.progress) options.progress("weights", total_bytes, total_bytes);
  return model;
}

}  // namespace perigee
