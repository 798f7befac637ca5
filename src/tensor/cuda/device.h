// Memory of a GPU, of host memory it can reach, and copies. No CUDA header, so that any caller may include it.
//
// After a failure of a GPU every function here does nothing for threads that use it, and device_status() keeps the
// first error: callers on the step path look at it once a step, not at each call.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"
#include "tensor/tensor.h"

namespace perigee {

// Uses GPU `index` from the calling thread on. kUnavailable: no toolkit at build, no driver or no such GPU.
Status select_device(int index);

Buffer device_buffer(size_t bytes);  // uninitialised, 256-byte aligned; empty after a failure
Buffer pinned_buffer(size_t bytes);  // host memory, zeroed, that the GPU copies from and to without a stop
int64_t num_device_allocations();    // of both kinds so far by the calling thread: constant on the step path
struct DeviceMemory {
  int64_t free = 0, total = 0;  // bytes
};
DeviceMemory device_memory();  // of the selected GPU
// Name, driver, heat, power and clock of GPU `index` in one line, with what is wrong with it in capitals; for logs.
std::string gpu_report(int index);

// Between any two of host and device memory; complete when it returns.
void device_copy(void* to, const void* from, size_t bytes);

// The first error of the calling thread's GPU since the process began, kDeviceLost with what was being done, or
// success.
Status device_status();

}  // namespace perigee
