// DecodeGraphs: the forward pass of decode steps, captured once for each bucket of rows (DESIGN D11).
//
// A graph reads tokens, positions and block tables from fixed device arrays, so it stays valid at any length; rows
// beyond a step's own are padding.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "exec/cuda/records.h"
#include "model/model.h"
#include "ops/cuda/backend.h"

namespace perigee {

// The batch arrays as a Batch of `rows` rows in `sequences` sequences, all in device memory but `sequences`.
Batch device_batch(const BatchArrays& arrays, const DeviceSequences& device, std::span<const SequenceRows> sequences,
                   int64_t rows, std::span<const int32_t> logit_rows);

class DecodeGraphs {
 public:
  DecodeGraphs(const BatchArrays& arrays, const DeviceSequences& device, int32_t max_rows);
  ~DecodeGraphs();
  DecodeGraphs(const DecodeGraphs&) = delete;
  DecodeGraphs& operator=(const DecodeGraphs&) = delete;

  // Runs each bucket once, so that its kernels are loaded, then captures it. The arrays must hold padding alone.
  Status capture(const Model& model, CudaOps& ops, const PagePool& pool);
  // The rows of the smallest graph for so many; 0: there is none.
  int32_t bucket(int32_t rows) const;
  // Launches the graph of exactly `bucket` rows; its logits [bucket, vocab], row i of sequence i.
  Tensor launch(int32_t bucket, cudaStream_t stream);

 private:
  struct Graph {
    int32_t rows = 0;
    cudaGraphExec_t exec = nullptr;
    Tensor logits;
  };
  Status capture_one(int32_t rows, const Model& model, CudaOps& ops, const PagePool& pool);

  const BatchArrays arrays_;
  const DeviceSequences device_;
  std::vector<SequenceRows> sequences_;
  Buffer identity_;  // 0, 1, 2, ...
  std::vector<Graph> graphs_;
};

}  // namespace perigee
