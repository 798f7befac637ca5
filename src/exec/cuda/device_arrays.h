// DeviceArrays: the memory of the slots and of a step's batch on the GPU, at addresses that never change.
#pragma once

#include "exec/cuda/records.h"
#include "ops/batch.h"
#include "tensor/tensor.h"

namespace perigee {

struct ArraySizes {
  int64_t slots = 0;   // sequences that run together
  int64_t tokens = 0;  // of a step, at least `slots`
  int64_t max_blocks = 0, vocab = 0, state_width = 0;
  int64_t checkpoints = 0;      // of a step
  int64_t places = 1;           // that a sequence is sampled at in a step
  int64_t history = 0;          // tokens of a slot that are kept for prompt lookup
  int32_t rank = 0, ranks = 1;  // that share the vocabulary, and with it the slots' counts of ids
  bool shared = false;          // blocks of a sequence lie with several ranks
  bool draft_tables = false;    // of all of them, for a draft's own cache
};

class DeviceArrays {
 public:
  // Zeroed. A failure shows in device_status().
  explicit DeviceArrays(const ArraySizes& sizes);
  const SlotArrays& slots() const { return slots_; }
  const BatchArrays& batch() const { return batch_; }
  // The batch's arrays under the names that ops know them by: for the model, and for a draft model.
  DeviceSequences sequences() const;
  DeviceSequences draft_sequences() const;

 private:
  void cut_slots(const ArraySizes& sizes, uint8_t* memory);
  void cut_batch(const ArraySizes& sizes, uint8_t* memory);
  template <typename T>
  void cut(T*& array, int64_t count, uint8_t* memory);

  SlotArrays slots_;
  BatchArrays batch_;
  Buffer memory_;
  size_t used_ = 0;
};

}  // namespace perigee
