// RankParts: what the phases of a rank work on, and how large a step and its memory may become.
#pragma once

#include <algorithm>
#include <memory>

#include "exec/batch_builder.h"
#include "exec/rank_config.h"
#include "exec/slots.h"
#include "model/eagle3.h"
#include "ops/ops.h"

namespace perigee {

struct RankParts {
  RankConfig config;
  std::unique_ptr<Ops> ops;
  std::unique_ptr<Ops> observed;  // null without an observer
  std::unique_ptr<Model> model;
  std::unique_ptr<Eagle3> draft;  // reads the model's weights; null without one
  CacheLayout layout;
  std::unique_ptr<BatchBuilder> builder;
  int32_t num_pages = 0;         // once the group has agreed on it, and
  std::unique_ptr<Slots> slots;  // these with it

  // `activation`: of the ops that run it.
  void set_model(std::unique_ptr<Model> the_model, DType activation);
  // Of the model that is set. kBadInput: a cache that it cannot have.
  Status set_draft(std::unique_ptr<Eagle3> the_draft, DType activation);
  LoadOptions draft_options() const;
  int64_t weight_bytes() const { return model->info().weight_bytes + (draft ? draft->weight_bytes() : 0); }
  // Where a draft keeps those of all of a dcp group's blocks, other ranks' among them.
  bool has_own_draft_cache() const { return layout.draft().layers > 0; }
  // On a GPU: else the blocks of that cache are numbered as the target's are.
  bool has_draft_tables() const { return has_own_draft_cache() && config.limits.dcp_size > 1; }
  // What steps outside of graphs run on.
  Ops& step_ops() const { return observed ? *observed : *ops; }
  int32_t state_pages() const { return static_cast<int32_t>(layout.state_pages()); }
  int32_t ring_tokens() const { return 1 + config.limits.num_drafts; }  // of a sequence, uncertain at a time
  int64_t ring_bytes() const { return config.limits.max_sequences * layout.ring_slot_bytes(ring_tokens()); }
  int64_t pool_bytes() const { return num_pages * layout.bytes_per_page(); }  // the other arenas follow the pages
  int64_t least_pages() const { return 2 + layout.state_pages(); }            // for any work
  // Pages that fit. kBadInput names the flag when they are too few for any work.
  Result<int32_t> pages_in(int64_t bytes) const;
  int32_t max_blocks(int32_t pages) const;  // of one sequence, on all ranks of a dcp group
  int32_t max_tokens() const {
    return std::max(config.limits.max_step_tokens, config.limits.max_sequences);
  }  // of a step
  int32_t max_rows_of_logits() const {
    return std::min(max_logit_rows(config.limits.max_sequences * (1 + config.limits.num_drafts)), max_tokens());
  }
};

// The parts of a rank that has loaded nothing, of a model without weights (size_model): for asking them what it takes.
Result<RankParts> size_parts(RankConfig config, WeightPacker& sizes);

}  // namespace perigee
