// Tensor maps are made by a function of the driver, which is looked up at run time.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace perigee {

inline cudaError_t find_tensor_map_encoder(PFN_cuTensorMapEncodeTiled_v12000* encode) {
  static const auto known = [] {  // of the process: the driver serves all its GPUs
    cudaDriverEntryPointQueryResult found;
    void* entry = nullptr;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    const bool there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(there ? entry : nullptr);
  }();
  *encode = known;
  return known != nullptr ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace perigee
