// The worker of one GPU: plans become device arrays, decode steps run as graphs, ids are sampled where they are needed.
// No CUDA header here.
#pragma once

#include "exec/worker.h"

namespace perigee {

// Why there is no GPU to use, with the way out.
inline Error without_gpu(Error why) {
  why.message += "; --device cpu needs none, and --device auto takes one only where there is one";
  return why;
}

// kUnavailable: built without a toolkit, no GPU, or a model that this backend does not run yet.
Result<std::unique_ptr<Worker>> make_cuda_worker(const WorkerConfig& config,
                                                 std::function<void(StepResult&&)> on_result);

}  // namespace perigee
