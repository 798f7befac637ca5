// How kernels of collectives are launched: with programmatic dependent launch, as all of ours are (ops/cuda/launch.h),
// and in clusters where the GPU has them.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace perigee {

struct PeerLaunch {
  unsigned blocks = 1, threads = 1;
  unsigned cluster = 1;  // blocks; compute capability 9.0 or later
  cudaStream_t stream = nullptr;
};

template <typename... Params, typename... Args>
cudaError_t launch_peers(void (*kernel)(Params...), const PeerLaunch& shape, Args&&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = shape.cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace perigee
