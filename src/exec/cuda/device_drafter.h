// DeviceDrafter: a drafter (exec/drafter.h) of a GPU. It works on the stream after a step has sampled, on what the step
// has left in the arrays of slots and batch, and leaves its drafts in those of the slots: no draft waits for the host,
// and a graph may hold its work.
#pragma once

#include <memory>

#include "comm/comm.h"
#include "exec/cuda/device_arrays.h"
#include "exec/ngram_match.h"
#include "model/eagle3.h"
#include "ops/cuda/backend.h"

namespace perigee {

// A step that has sampled.
struct DeviceStep {
  const Batch& batch;
  const ModelOutput& output;
  const PagePool& pool;
  Ops& ops;  // whose step this still is
};

class DeviceDrafter {
 public:
  virtual ~DeviceDrafter() = default;
  virtual void draft(const DeviceStep& step) = 0;
};

// By prompt lookup (exec/ngram_drafter.h), in the history of the slots.
std::unique_ptr<DeviceDrafter> make_device_ngram_drafter(NgramMatch match, const DeviceArrays& arrays,
                                                         cudaStream_t stream);

// By a model that reads the target's hidden states, greedily (exec/eagle_drafter.h). `max_tokens`: of a step.
std::unique_ptr<DeviceDrafter> make_device_eagle_drafter(const Eagle3& model, const DeviceArrays& arrays, int32_t slots,
                                                         int32_t max_tokens, CudaOps& ops);

}  // namespace perigee
