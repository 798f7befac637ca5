#include "ops/cuda/cuda_ops.h"

namespace perigee {

Result<std::unique_ptr<Ops>> make_cuda_ops(const CudaOptions&) {
  return Error(Code::kUnavailable, "this build has no CUDA backend: run make build where nvcc and a GPU are", "device");
}

}  // namespace perigee
