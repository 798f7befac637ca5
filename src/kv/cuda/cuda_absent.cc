#include "kv/cuda/gpu_pages.h"
#include "tensor/cuda/device.h"

namespace perigee {

Result<std::shared_ptr<PageMemory>> make_gpu_pages(const GpuPagesOptions& options) {
  return select_device(options.gpu).error();
}

}  // namespace perigee
