// Executor: what an engine gives its plans to: a RankGroup, or what a test has in its place.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "control/plan.h"
#include "kv/page_store.h"
#include "model/model.h"

namespace perigee {

// A plan that goes to the ranks, and comes back with its result. The result that it goes with has only memory.
struct Step {
  StepPlan plan;
  StepResult result = {};
};
// Must not block. A lost device comes without its plan.
using OnStep = std::function<void(Step&&)>;

class Executor {
 public:
  virtual ~Executor() = default;

  virtual void submit(Step step) = 0;  // at most kMaxPlansInFlight without a result
  // Exactly once for each plan with masked rows, before, while or after its forward pass runs (mask_box.h). A row
  // without an entry samples freely: its sequence has ended.
  virtual void set_masks(StepMasks masks) = 0;
  virtual const ModelInfo& model() const = 0;
  virtual int64_t weight_bytes() const { return model().weight_bytes; }  // of a rank, with those of a draft
  virtual int32_t num_pages() const = 0;
  virtual int32_t state_pages() const = 0;  // of those, one sequence's recurrent state takes so many; 0: it has none
  // Of each rank, once. kDeviceLost: a GPU has no room for what copies them.
  virtual Result<std::vector<RankPages>> pages(const AreaUse& /*areas*/) const { return std::vector<RankPages>(); }
  virtual double last_build_us() const = 0;  // time to turn the newest plan into a batch
};

}  // namespace perigee
