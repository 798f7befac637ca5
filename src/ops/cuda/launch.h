// One way to launch a kernel: with programmatic dependent launch, so that a kernel's blocks may start while the tail of
// the kernel before it still runs.
//
// The convention that makes this safe: every kernel calls dependency_wait() (mma.cuh) before it touches memory that an
// earlier kernel wrote or still reads, and only then dependency_trigger(). So when a kernel passes its wait, all
// kernels before its predecessor are complete too. Ahead of it a kernel may read weights, and what was complete before
// its predecessor began (lists of experts), the latter from L2: L1 may hold what lay there before. The machine code is
// checked for it (tools/gpu_fence.py). relate_kernel beside another's carry leaves the wait to its last block.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "tensor/cuda/per_device.h"

namespace perigee {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic; above 48 KiB the kernel's limit must have been raised (allow_shared)
  cudaStream_t stream = nullptr;
};

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

// Raises a kernel's limit of dynamic shared memory and lets it use the whole of a multiprocessor's (the driver may
// otherwise set aside room for one block only). On each device before the first launch there. Loads the kernel too.
template <typename... Params>
cudaError_t allow_shared(void (*kernel)(Params...), size_t bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// The same where a kernel's limit is the same at every launch; takes effect on the first call of each device.
template <auto kKernel>
cudaError_t allow_shared_once(size_t bytes) {
  static PerDevice<cudaError_t> allowed;
  return allowed.get(current_device(), [&] { return allow_shared(kKernel, bytes); });
}

// What kernels are chosen and launched by, of the current device; 1 where it does not tell.
struct DeviceLimits {
  int capability = 1;  // 80, 90, 120, ...
  int multiprocessors = 1;
  int shared_of_block = 1, shared_of_multiprocessor = 1;  // bytes
};

inline const DeviceLimits& device_limits() {
  static PerDevice<DeviceLimits> known;
  const int device = current_device();
  return known.get(device, [device] {
    const auto attribute = [device](cudaDeviceAttr which) {
      int value = 1;
      cudaDeviceGetAttribute(&value, which, device);
      return value;
    };
    return DeviceLimits{
        attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor),
        attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
        attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
  });
}

}  // namespace perigee
