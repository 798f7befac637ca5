// DeviceActivity: what a GPU did and when, from the driver's profiling interface (CUPTI, loaded when asked for). For
// traces; not for serving. No CUDA header here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"

namespace perigee {

struct DeviceActivity {
  enum class Kind : uint8_t { kKernel, kCopyIn, kCopyOut, kCopy, kFill };  // copies from and to the host, within
  Kind kind = Kind::kKernel;
  std::string name;                  // of a kernel, as the compiler mangled it
  int64_t begin_ns = 0, end_ns = 0;  // the device's clock
  int32_t gpu = 0;
  uint64_t mark = 0;  // ActivityTrace::mark() at its launch; 0: none, or launched by a graph
  bool operator<(const DeviceActivity& other) const { return begin_ns < other.begin_ns; }
};

// One at a time in a process. Kernels of graphs appear one by one.
class ActivityTrace {
 public:
  // Before anything is done on the GPU. kUnavailable: no CUPTI here; the message says how to get it.
  static Result<std::unique_ptr<ActivityTrace>> create();
  virtual ~ActivityTrace() = default;

  // `marks`: mark() is going to be called, which costs a record for each call of the driver besides.
  virtual Status start(bool marks) = 0;
  // Work launched from the calling thread from now on carries `id`; 0 ends that.
  virtual void mark(uint64_t id) = 0;
  // Everything since start(), of all GPUs, in the order of its beginning; waits for the calling thread's GPU.
  virtual Result<std::vector<DeviceActivity>> stop() = 0;
};

}  // namespace perigee
