// The CUDA backend: Ops on one GPU, activations bf16, the residual stream f32. No CUDA header here.
#pragma once

#include <memory>

#include "base/result.h"
#include "ops/ops.h"

namespace perigee {

struct CudaOptions {
  int device = 0;
  bool deterministic = false;  // no cuBLASLt: one GEMM configuration for each (out, in), whatever the number of rows
  // For tests: the kernels of GPUs other than Hopper; temporary arrays as a memory checker wants them (Arena); no
  // cuBLASLt, whose bulk stores such a checker does not see.
  bool portable = false, separate_arrays = false, no_library = false;
  // Their operands lie in this GPU's memory; both outlive the Ops.
  Comm* comm = &Comm::alone();
  Comm* dcp = &Comm::alone();
};

// What the kernels read by 16 bytes, stage in shared memory or keep one a thread.
inline constexpr ShapeLimits kCudaLimits = {.unit = 8,
                                            .latent_unit = 128,
                                            .max_latent = 512,
                                            .max_rope = 64,
                                            .max_experts = 1024,
                                            .max_groups = 64,
                                            .max_top_k = 64};

// kUnavailable: built without a toolkit, or no such GPU.
Result<std::unique_ptr<Ops>> make_cuda_ops(const CudaOptions& options);
std::unique_ptr<WeightPacker> make_cuda_sizes();  // without a GPU, too

}  // namespace perigee
