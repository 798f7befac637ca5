// Tensor maps are made by a function of the driver, which is looked up at run time.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace perigee {

inline cudaError_t find_tensor_map_encoder(PFN_cuTensorMapEncodeTiled_v12000* encode) {
  static PFN_cuTensorMapEncodeTiled_v12000 known = nullptr;
  if (known == nullptr) {
    cudaDriverEntryPointQueryResult found;
    void* entry = nullptr;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    known = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }
  *encode = known;
  return cudaSuccess;
}

}  // namespace perigee
