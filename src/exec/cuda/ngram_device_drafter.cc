#include "exec/cuda/device_drafter.h"
#include "exec/cuda/draft_kernels.h"
#include "tensor/cuda/check.h"

namespace perigee {
namespace {

class NgramDeviceDrafter final : public DeviceDrafter {
 public:
  NgramDeviceDrafter(NgramMatch match, const DeviceArrays& arrays, cudaStream_t stream)
      : match_(match), slots_(arrays.slots()), batch_(arrays.batch()), stream_(stream) {}

  void draft(const DeviceStep& step) override {
    const auto rows = static_cast<int32_t>(step.batch.sequences.size());
    cuda_ok(look_up_drafts(slots_, batch_, rows, match_, stream_), "looking drafts up");
  }

 private:
  const NgramMatch match_;
  const SlotArrays slots_;
  const BatchArrays batch_;
  const cudaStream_t stream_;
};

}  // namespace

std::unique_ptr<DeviceDrafter> make_device_ngram_drafter(NgramMatch match, const DeviceArrays& arrays,
                                                         cudaStream_t stream) {
  return std::make_unique<NgramDeviceDrafter>(match, arrays, stream);
}

}  // namespace perigee
