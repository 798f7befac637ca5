// gpu_report(): what the driver's management library (NVML, opened at run time) says of a GPU, in one line.
//
// The toolkit's headers are not always there, and these few functions have not changed since NVML 5: so their types are
// written here. Handles are opaque pointers, return codes are 0 for success.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <fmt/core.h>

#include <array>
#include <map>
#include <mutex>

#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

using Handle = void*;
constexpr int kGpuSensor = 0, kSmClock = 1, kUncorrected = 1, kSinceBoot = 0;
// Bits of the clock's limits: the hardware's brake, heat as the driver or the chip sees it, the power supply's brake.
constexpr unsigned long long kSlowedDown = 0x8 | 0x20 | 0x40 | 0x80;

struct Library {
  int (*init)();
  int (*driver)(char*, unsigned);
  int (*handle)(const char*, Handle*);
  int (*name)(Handle, char*, unsigned);
  int (*temperature)(Handle, int, unsigned*);
  int (*power)(Handle, unsigned*);  // mW
  int (*power_limit)(Handle, unsigned*);
  int (*clock)(Handle, int, unsigned*);  // MHz
  int (*clock_limits)(Handle, unsigned long long*);
  int (*memory_errors)(Handle, int, int, unsigned long long*);
};

template <typename F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}

const Library* open_library() {
  void* so = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (so == nullptr) return nullptr;
  static Library f;
  const bool complete =
      find(so, "nvmlInit_v2", f.init) && find(so, "nvmlSystemGetDriverVersion", f.driver) &&
      find(so, "nvmlDeviceGetHandleByPciBusId_v2", f.handle) && find(so, "nvmlDeviceGetName", f.name) &&
      find(so, "nvmlDeviceGetTemperature", f.temperature) && find(so, "nvmlDeviceGetPowerUsage", f.power) &&
      find(so, "nvmlDeviceGetEnforcedPowerLimit", f.power_limit) && find(so, "nvmlDeviceGetClockInfo", f.clock) &&
      find(so, "nvmlDeviceGetCurrentClocksThrottleReasons", f.clock_limits) &&
      find(so, "nvmlDeviceGetTotalEccErrors", f.memory_errors);
  return complete && f.init() == 0 ? &f : nullptr;
}

// What the device says of itself; a part that it does not know is left out.
std::string describe(const Library& nvml, Handle gpu) {
  std::array<char, 96> text{};
  unsigned value = 0, limit = 0;
  unsigned long long bits = 0;
  std::string out;
  if (nvml.name(gpu, text.data(), text.size()) == 0) out += text.data();
  if (nvml.driver(text.data(), text.size()) == 0) out += fmt::format(", driver {}", text.data());
  if (nvml.temperature(gpu, kGpuSensor, &value) == 0) out += fmt::format(", {} C", value);
  if (nvml.power(gpu, &value) == 0 && nvml.power_limit(gpu, &limit) == 0)
    out += fmt::format(", {} of {} W", value / 1000, limit / 1000);
  if (nvml.clock(gpu, kSmClock, &value) == 0) out += fmt::format(", {} MHz", value);
  if (nvml.clock_limits(gpu, &bits) == 0 && (bits & kSlowedDown) != 0) out += ", SLOWED DOWN by heat or power";
  if (nvml.memory_errors(gpu, kUncorrected, kSinceBoot, &bits) == 0 && bits > 0)
    out += fmt::format(", {} UNCORRECTED MEMORY ERRORS since boot", bits);
  return out;
}

}  // namespace

std::string gpu_report(int index) {
  static std::mutex mutex;
  static const Library* const nvml = open_library();
  static std::map<int, Handle> known;  // the runtime names no device once it has lost one
  const std::lock_guard lock(mutex);
  Handle& gpu = known[index];
  if (gpu == nullptr) {
    std::array<char, 32> bus{};
    if (cudaDeviceGetPCIBusId(bus.data(), bus.size(), index) != cudaSuccess) return "not reachable";
    if (nvml == nullptr || nvml->handle(bus.data(), &gpu) != 0) return fmt::format("at {}", bus.data());
  }
  return describe(*nvml, gpu);
}

}  // namespace perigee
