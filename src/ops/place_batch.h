// PlacedBatch: a batch whose arrays lie where the backend reads them. For callers that build a batch in host memory and
// run it once; a worker keeps its arrays on the device instead.
#pragma once

#include "ops/ops.h"

namespace perigee {

class PlacedBatch {
 public:
  // Copies the arrays of `host` into the step's arena when the backend is a device; else it is `host` itself. Requires
  // begin_step() before; valid until the next one. Recurrent models: `state_pages` is how many pages the units of a
  // sequence take.
  PlacedBatch(const Batch& host, Ops& ops, int32_t state_pages = 0);
  PlacedBatch(const PlacedBatch&) = delete;
  PlacedBatch& operator=(const PlacedBatch&) = delete;
  const Batch& batch() const { return batch_; }

 private:
  void place_blocks(const Batch& host, Ops& ops);
  void place_states(const Batch& host, Ops& ops, int32_t state_pages);

  Batch batch_;
  DeviceSequences device_;
};

}  // namespace perigee
