#include "exec/cuda/cuda_worker.h"

namespace perigee {

Result<std::unique_ptr<Worker>> make_cuda_worker(const WorkerConfig&, std::function<void(StepResult&&)>) {
  return Error(Code::kUnavailable, "this build has no CUDA backend: run make build where nvcc and a GPU are", "device");
}

}  // namespace perigee
