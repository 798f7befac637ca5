// One way to launch a kernel: with programmatic dependent launch, so that a kernel's blocks may start while the tail of
// the kernel before it still runs.
//
// The convention that makes this safe: every kernel calls dependency_wait() (mma.cuh) before it touches memory that an
// earlier kernel wrote or still reads, and only then dependency_trigger(). So when a kernel passes its wait, all
// kernels before its predecessor are complete too. What is complete for longer than that (weights, settled lists, old
// keys) may be read ahead of the wait; relate_kernel beside another's carry leaves the wait to its last block.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace perigee {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic; above 48 KiB the kernel's limit must have been raised once (allow_shared)
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
// otherwise set aside room for one block only); once per device, before the first launch. Loads the kernel too.
template <typename... Params>
cudaError_t allow_shared(void (*kernel)(Params...), size_t bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

}  // namespace perigee
