#include "exec/cuda/cuda_worker.h"
#include "tensor/cuda/device.h"

namespace perigee {

Result<std::unique_ptr<Worker>> make_cuda_worker(const WorkerConfig&, std::function<void(StepResult&&)>) {
  return without_gpu(select_device(0).error());
}

}  // namespace perigee
