// What tensor/cuda/device.h says on a build without a toolkit: there is no GPU.
#include "tensor/cuda/activity.h"
#include "tensor/cuda/device.h"
#include "tensor/cuda/gpus.h"

namespace perigee {

Status select_device(int) {
  return Error(Code::kUnavailable, "this build has no CUDA backend: run make build where nvcc and a GPU are", "device");
}
std::vector<Gpu> list_gpus() {
  return {};
}
Buffer device_buffer(size_t) {
  return {};
}
Buffer pinned_buffer(size_t) {
  return {};
}
int64_t num_device_allocations() {
  return 0;
}
DeviceMemory device_memory() {
  return {};
}
std::string gpu_report(int) {
  return {};
}
void device_copy(void*, const void*, size_t) {}
Status device_status() {
  return select_device(0);
}
Result<std::unique_ptr<ActivityTrace>> ActivityTrace::create() {
  return select_device(0).error();
}

}  // namespace perigee
