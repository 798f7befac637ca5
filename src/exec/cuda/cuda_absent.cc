#include "exec/cuda/cuda_device.h"
#include "tensor/cuda/device.h"

namespace perigee {

Result<std::unique_ptr<RankDevice>> make_cuda_device(const RankConfig& config) {
  return without_gpu(select_device(config.rank).error());
}

}  // namespace perigee
