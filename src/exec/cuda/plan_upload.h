// PlanUpload: a plan's records packed into pinned memory and copied to the GPU in one piece. Two of them take turns, so
// that the next plan is packed while the copy of the last may still be under way.
#pragma once

#include <functional>
#include <vector>

#include "control/plan.h"
#include "exec/cuda/records.h"
#include "exec/cuda/step_kernels.h"
#include "tensor/arena.h"
#include "tensor/cuda/check.h"

namespace perigee {

struct UploadLimits {
  int32_t max_sequences = 0, max_tokens = 0, max_blocks = 0, max_logit_rows = 0;
  int64_t bytes() const;
};

class PlanUpload {
 public:
  explicit PlanUpload(const UploadLimits& limits);

  // Waits until the memory's last copy is done; then it may be packed anew.
  void begin();
  // Room for `count` records, to be filled before send(); their place in device memory is device(pointer).
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  template <typename T>
  const T* device(const T* host) const {
    return reinterpret_cast<const T*>(device_.data() + (reinterpret_cast<const uint8_t*>(host) - host_.data()));
  }
  void send(const Stream& stream);
  // The same memory is free again once what was queued on the stream up to here is done.
  void fence(const Stream& stream) { fence_.record(stream); }

 private:
  void* take_bytes(size_t bytes);
  Buffer host_, device_;
  size_t used_ = 0;
  Event fence_;
};

// SamplingParams as the kernels read them.
SlotParams slot_params(const SamplingParams& params);

}  // namespace perigee
