// The worker of one GPU: plans become device arrays, decode steps run as graphs, ids are sampled where they are needed.
// No CUDA header here.
#pragma once

#include "exec/worker.h"

namespace perigee {

// kUnavailable: built without a toolkit, no GPU, or a model that this backend does not run yet.
Result<std::unique_ptr<Worker>> make_cuda_worker(const WorkerConfig& config,
                                                 std::function<void(StepResult&&)> on_result);

}  // namespace perigee
