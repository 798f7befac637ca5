#include "exec/rank_parts.h"

#include <fmt/core.h>

namespace perigee {
namespace {

// A draft with keys and values by head.
Status check_heads(int64_t dim, LatentFormat numbers, Device device) {
  if (numbers == LatentFormat::kF8Tiles)
    return bad_input(
        "--speculative-config: draft_kv_cache_dtype: this draft keeps keys and values by head, as bfloat16 or fp8",
        "speculative-config");
  if (device == Device::kCuda && dim != 32 && dim != 64 && dim != 128)
    return bad_input(fmt::format("--speculative-config: config.json of the draft: head_dim: a GPU runs heads of 32, 64 "
                                 "or 128, found {}; --device cpu takes any",
                                 dim),
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
  const Eagle3Config& of = the_draft->config();
  LatentFormat numbers = config.draft_cache.value_or(of.has_latents() ? layout.latent().format : LatentFormat::kF8E4M3);
  if (!of.has_latents()) {
    RETURN_IF_ERROR(check_heads(of.full.dim, numbers, config.device));
    if (f32) numbers = LatentFormat::kF32;
  }
  draft = std::move(the_draft);
  model->tap(draft->config().taps);
  layout = draft->cache_layout(layout, numbers, config.limits.dcp_size);
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
