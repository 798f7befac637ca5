// The kernels around a step's forward pass: a plan's deltas into the slots, the batch out of them, penalty counts.
#pragma once

#include <cuda_runtime.h>

#include "exec/cuda/records.h"

namespace perigee {

// A packed plan in device memory.
struct PlanArrays {
  const StartRecord* starts = nullptr;
  const AppendRecord* appends = nullptr;
  const RowRecord* rows = nullptr;
  const SampleRecord* samples = nullptr;  // [rows][BatchArrays::places]
  const int32_t* tokens = nullptr;
  // Recurrent models, SlotArrays::state_width pages each.
  const int32_t* start_pages = nullptr;           // [starts][2]: of the state; then of the checkpoint in it, -1: zeros
  const int32_t* checkpoint_positions = nullptr;  // [num_checkpoints]
  const int32_t* checkpoint_pages = nullptr;      // [num_checkpoints]
  int32_t num_starts = 0, num_appends = 0, num_rows = 0, num_checkpoints = 0;
  // Of a step that is a graph: every sequence has so many tokens, those beyond its row's are padding that is sampled
  // nowhere; 0: no graph.
  int32_t width = 0;
};

// The page pool as raw memory; page_bytes is a multiple of 16.
struct RawPages {
  uint8_t* base = nullptr;
  int64_t page_bytes = 0;
};

// Makes the states of the slots that start: copies of checkpoints, or zeros. Nothing without recurrent layers.
cudaError_t start_states(const PlanArrays& plan, const SlotArrays& slots, const RawPages& pool, cudaStream_t stream);
cudaError_t apply_deltas(const PlanArrays& plan, const SlotArrays& slots, cudaStream_t stream);
// Sequences num_rows ... padded_rows - 1 become padding of as many rows as the plan's width, at least one (so
// padded_rows > num_rows only where every sequence has that many), for which nothing is sampled. Moves the slots'
// lengths on by what is certain: a chunk, or one token; accept_picks() does the rest.
cudaError_t build_batch(const PlanArrays& plan, const SlotArrays& slots, const BatchArrays& batch, int32_t padded_rows,
                        cudaStream_t stream);
// A kernel that ends the device's context with an error: for tests of what follows.
cudaError_t break_device(cudaStream_t stream);
// As load_sampling_kernels().
cudaError_t load_step_kernels();
// Counts of a slot that starts: tokens[0 ... num_prompt) as seen, the rest also as sampled.
cudaError_t count_tokens(const SlotArrays& slots, int32_t slot, const int32_t* tokens, int32_t num_tokens,
                         int32_t num_prompt, cudaStream_t stream);

}  // namespace perigee
