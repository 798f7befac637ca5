// PlanUpload: a plan's records packed into pinned memory and copied to the GPU in one piece. Two of them take turns, so
// that the next plan is packed while the copy of the last may still be under way.
#pragma once

#include <algorithm>
#include <span>

#include "control/plan.h"
#include "exec/cuda/records.h"
#include "exec/cuda/step_kernels.h"
#include "exec/slots.h"
#include "ops/batch.h"
#include "tensor/cuda/check.h"
#include "tensor/tensor.h"

namespace perigee {

struct UploadLimits {
  int32_t max_sequences = 0, max_tokens = 0, max_blocks = 0, max_logit_rows = 0, state_width = 0, max_checkpoints = 0;
  int32_t places = 1;  // that a sequence is sampled at
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
  // The values, copied; where they will be in device memory.
  template <typename T>
  std::span<const T> place(std::span<const T> values) {
    T* to = take<T>(std::ssize(values));
    std::copy(values.begin(), values.end(), to);
    return {device(to), values.size()};
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

// The plan and its rows, as the host's batch has them (forms apart), for the kernels of step_kernels.h. `slots` have
// the plan's starts and appends. `width`: see PlanArrays.
PlanArrays pack_plan(const StepPlan& plan, std::span<const SequenceRows> sequences, const Slots& slots,
                     int32_t state_width, int32_t width, PlanUpload& upload);

// SamplingParams as the kernels read them.
SlotParams slot_params(const SamplingParams& params);

}  // namespace perigee
