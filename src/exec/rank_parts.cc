#include "exec/rank_parts.h"

#include <fmt/core.h>

namespace perigee {
namespace {

// A draft with keys and values by head.
Status check_on_gpu(int64_t dim, const PlanLimits& limits) {
  if (dim != 32 && dim != 64 && dim != 128)
    return bad_input(fmt::format("--speculative-config: config.json of the draft: head_dim: a GPU runs heads of 32, 64 "
                                 "or 128, found {}; --device cpu takes any",
                                 dim),
                     "speculative-config");
  if (limits.dcp_size > 1)
    return bad_input(
        "--speculative-config: a draft with keys and values by head reads all of a text's blocks, of which a GPU knows "
        "only its own under --decode-context-parallel-size; use a draft with latent attention, or leave that flag out",
        "speculative-config");
  return {};
}

}  // namespace

void RankParts::set_model(std::unique_ptr<Model> the_model, DType activation) {
  model = std::move(the_model);
  layout = model->cache_layout(config.load.cache.value_or(latent_format(activation)));
}

Status RankParts::set_draft(std::unique_ptr<Eagle3> the_draft, DType activation) {
  const bool f32 = activation == DType::kF32;
  const LatentFormat numbers = config.draft_cache.value_or(f32 ? LatentFormat::kF32 : LatentFormat::kF8E4M3);
  if (the_draft->config().has_latents() && config.draft_cache && numbers != layout.latent().format)
    return bad_input(
        "--speculative-config: draft_kv_cache_dtype differs from --kv-cache-dtype: this draft's cache lies "
        "in its target's blocks; leave it out",
        "speculative-config");
  if (!the_draft->config().has_latents() && numbers == LatentFormat::kF8Tiles)
    return bad_input(
        "--speculative-config: draft_kv_cache_dtype: this draft keeps keys and values by head, as bfloat16 "
        "or fp8",
        "speculative-config");
  if (the_draft->config().has_latents() && config.draft_layer == Eagle3::Layer::kWhole && config.limits.dcp_size > 1)
    return bad_input(
        "--speculative-config: draft_tensor_parallel_size 1: this draft's cache lies in its target's blocks, which "
        "--decode-context-parallel-size divides, and so its heads must be divided; leave it out",
        "speculative-config");
  if (!the_draft->config().has_latents() && config.device == Device::kCuda)
    RETURN_IF_ERROR(check_on_gpu(the_draft->config().full.dim, config.limits));
  draft = std::move(the_draft);
  model->tap(draft->config().taps);
  const DType dtype = f32 ? DType::kF32 : numbers == LatentFormat::kBF16 ? DType::kBF16 : DType::kF8E4M3;
  layout = draft->cache_layout(layout, dtype, config.limits.dcp_size);
  return {};
}

LoadOptions RankParts::draft_options() const {
  LoadOptions options = config.load;
  options.path = config.draft_model;
  return options;
}

Result<RankParts> size_parts(RankConfig config, WeightPacker& sizes) {
  RankParts parts;
  parts.config = std::move(config);
  ASSIGN_OR_RETURN(auto model, size_model(parts.config.load, sizes));
  parts.set_model(std::move(model), sizes.activation_dtype());
  if (!parts.config.draft_model.empty()) {
    ASSIGN_OR_RETURN(auto draft, Eagle3::size(parts.draft_options(), *parts.model, sizes, parts.config.draft_layer));
    RETURN_IF_ERROR(parts.set_draft(std::move(draft), sizes.activation_dtype()));
  }
  return parts;
}

Result<int32_t> RankParts::pages_in(int64_t bytes) const {
  const int64_t page_bytes = layout.bytes_per_page(), pages = bytes / page_bytes;
  if (pages < least_pages())
    return bad_input(fmt::format("the cache of {} bytes holds {} pages of {} bytes; raise --kv-cache-memory-bytes to "
                                 "at least {}: two blocks{}",
                                 bytes, pages, page_bytes, least_pages() * page_bytes,
                                 state_pages() > 0 ? " and a recurrent state" : ""),
                     "kv-cache-memory-bytes");
  return static_cast<int32_t>(std::min<int64_t>(pages, INT32_MAX));
}

int32_t RankParts::max_blocks(int32_t pages) const {
  const int64_t room = int64_t{pages} * config.limits.dcp_size;
  return static_cast<int32_t>(std::min(room, model->info().max_positions / kBlockTokens + 1));
}

}  // namespace perigee
