// Work on a stream as a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include "base/result.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"

namespace perigee {

// What `work` puts on the stream, as a graph that is ready to launch, the caller's to destroy. Its kernels must have
// been loaded: work has run once before.
template <typename Work>
Result<cudaGraphExec_t> capture_graph(cudaStream_t stream, Work&& work) {
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t exec = nullptr;
  // Relaxed: other threads of this process may allocate meanwhile.
  cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "starting a capture");
  work();
  cuda_ok(cudaStreamEndCapture(stream, &captured), "capturing a decode step");
  RETURN_IF_ERROR(device_status());
  cuda_ok(cudaGraphInstantiate(&exec, captured, 0), "making a graph");
  cudaGraphDestroy(captured);
  cuda_ok(cudaGraphUpload(exec, stream), "loading a graph");
  RETURN_IF_ERROR(device_status());
  return exec;
}

}  // namespace perigee
