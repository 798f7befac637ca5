// DecodeGraphs: decode steps as graphs, captured once for each bucket of rows (DESIGN D11): the forward pass to the
// logits; then sampling, for which masks may have been uploaded in between; then, with drafts, the next ones. A
// sequence has the same number of tokens in each: one, and its drafts.
//
// Graphs read tokens, positions, block tables and sampling records from fixed device arrays, so they stay valid at any
// length; rows beyond a step's own are padding. Their temporaries lie in the arena of the Ops, which must not grow any
// more.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <vector>

#include "exec/cuda/device_drafter.h"
#include "exec/cuda/records.h"
#include "exec/cuda/step_sampling.h"
#include "model/model.h"
#include "ops/cuda/backend.h"

namespace perigee {

// The batch arrays as a Batch of `rows` rows in `sequences` sequences, all in device memory but `sequences`.
Batch device_batch(const BatchArrays& arrays, const DeviceSequences& device, std::span<const SequenceRows> sequences,
                   int64_t rows, std::span<const int32_t> logit_rows);

class DecodeGraphs {
 public:
  // `arrays.places` tokens a row.
  DecodeGraphs(const BatchArrays& arrays, const DeviceSequences& device, int32_t max_rows);
  ~DecodeGraphs();
  DecodeGraphs(const DecodeGraphs&) = delete;
  DecodeGraphs& operator=(const DecodeGraphs&) = delete;

  // Runs each bucket once, so that its kernels are loaded, then captures it. The arrays must hold padding alone, and
  // the ops be silent: what ranks exchange is captured only.
  Status capture(const Model& model, CudaOps& ops, const PagePool& pool, StepSampling& sampling,
                 DeviceDrafter* drafter);
  // The rows of the smallest graphs for so many; 0: there are none.
  int32_t bucket(int32_t rows) const;
  // Launch the graphs of exactly `bucket` rows, a value of bucket(): logits of sequence i become rows from i * places
  // on; then StepSampling::sample() of all rows, for steps of that buffer; then their drafts.
  void forward(int32_t bucket, cudaStream_t stream) const;
  void sample(int32_t bucket, int32_t buffer, cudaStream_t stream) const;
  void draft(int32_t bucket, cudaStream_t stream) const;

 private:
  struct Graphs {
    int32_t rows = 0;
    cudaGraphExec_t forward = nullptr;
    std::array<cudaGraphExec_t, 2> sample = {};  // by buffer
    cudaGraphExec_t draft = nullptr;             // null without drafts
  };
  Result<Graphs> capture_bucket(int32_t rows, const Model& model, CudaOps& ops, const PagePool& pool,
                                StepSampling& sampling, DeviceDrafter* drafter);
  const Graphs& of(int32_t bucket) const;

  const BatchArrays arrays_;
  const DeviceSequences device_;
  std::vector<SequenceRows> sequences_;
  Buffer identity_;  // 0, 1, 2, ...
  std::vector<Graphs> graphs_;
  const Arena* arena_ = nullptr;
  int64_t num_growths_ = 0;  // of the arena, when the graphs were captured
};

}  // namespace perigee
