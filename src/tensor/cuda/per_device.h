// What a process keeps for each of its GPUs: made when a GPU first asks for it, once, whatever threads ask at a time.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "base/check.h"

namespace perigee {

constexpr int kMostDevices = 64;  // GPUs of a process

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

template <typename T>
class PerDevice {
 public:
  // The value of GPU `device`; `make()` gives it, on the first call for that GPU.
  template <typename Make>
  const T& get(int device, const Make& make) {
    CHECK(device >= 0 && device < kMostDevices, "GPU ", device, ": there may be ", kMostDevices);
    Entry& entry = entries_[static_cast<size_t>(device)];
    std::call_once(entry.made, [&] { entry.value = make(); });
    return entry.value;
  }

 private:
  struct Entry {
    std::once_flag made;
    T value{};
  };
  std::array<Entry, kMostDevices> entries_;
};

}  // namespace perigee
