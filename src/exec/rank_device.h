// RankDevice: what of a rank depends on its device: where pages and step arrays lie, how the phases of rank.h run
// there, and how to wait for them. The host's is host_device.h, a GPU's is cuda/cuda_device.h.
//
// All calls come from the rank's thread. A step's work may still be under way when a phase returns; steps run in the
// order of their calls. Two steps may lie between apply() and collect(), told apart by their buffer, 0 or 1.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exec/mask_box.h"
#include "exec/rank_parts.h"

namespace perigee {

class RankDevice {
 public:
  virtual ~RankDevice() = default;

  // --- Start, in this order ---
  virtual Result<std::unique_ptr<Ops>> make_ops() = 0;
  virtual int64_t weight_memory() const { return INT64_MAX; }  // bytes that there are for weights
  // Reserves everything except the page pool. `parts` outlive the device. Returns the pages there is room for.
  virtual Result<int32_t> warm_up(RankParts& parts) = 0;
  // The page pool of parts.num_pages, and what holds its address. No memory is reserved afterwards.
  virtual Status reserve() = 0;

  // The page pool, on the device. Others may read and write pages that no step touches (RankConfig::shared_pages).
  virtual uint8_t* pages() { return nullptr; }

  // --- The phases of a step, each once, in this order ---
  virtual void apply(const StepPlan& plan, const Batch& batch, int32_t buffer) = 0;
  virtual void forward(const StepPlan& plan, const Batch& batch, int32_t buffer) = 0;
  // Waits for the step's masks. Only of a plan with masked rows, when every step before it has been collected.
  virtual void mask(const StepPlan& plan, MaskBox& masks) = 0;
  virtual void sample(const StepPlan& plan, int32_t buffer) = 0;
  virtual bool is_done(int32_t buffer) = 0;
  // Of a step that is done: fills in a result that has begun. kDeviceLost: what the device failed at; nothing can be
  // run after that.
  virtual Status collect(const StepPlan& plan, int32_t buffer, StepResult& result) = 0;

  virtual void fail() = 0;      // tests: loses the device in the step that runs
  virtual void log_loss() = 0;  // what is known of a lost device; may hang
};

}  // namespace perigee
