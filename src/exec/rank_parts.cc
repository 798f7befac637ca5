#include "exec/rank_parts.h"

#include <fmt/core.h>

namespace perigee {

void RankParts::set_model(std::unique_ptr<Model> the_model, DType activation) {
  model = std::move(the_model);
  layout = model->cache_layout(config.load.cache.value_or(latent_format(activation)));
}

void RankParts::set_draft(std::unique_ptr<Eagle3> the_draft) {
  draft = std::move(the_draft);
  model->tap(draft->config().taps);
  layout = layout.with_latent_layers(1);
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
    ASSIGN_OR_RETURN(auto draft, Eagle3::size(parts.draft_options(), *parts.model, sizes));
    parts.set_draft(std::move(draft));
  }
  return parts;
}

Result<int32_t> RankParts::pages_in(int64_t bytes) const {
  const int64_t pages = bytes / layout.page_bytes();
  if (pages < least_pages())
    return bad_input(fmt::format("the cache of {} bytes holds {} pages of {} bytes; raise --kv-cache-memory-bytes to "
                                 "at least {}: two blocks{}",
                                 bytes, pages, layout.page_bytes(), least_pages() * layout.page_bytes(),
                                 state_pages() > 0 ? " and a recurrent state" : ""),
                     "kv-cache-memory-bytes");
  return static_cast<int32_t>(std::min<int64_t>(pages, INT32_MAX));
}

int32_t RankParts::max_blocks(int32_t pages) const {
  const int64_t room = int64_t{pages} * config.limits.dcp_size;
  return static_cast<int32_t>(std::min(room, model->info().max_positions / kBlockTokens + 1));
}

}  // namespace perigee
