// For tests of CUDA kernels: arrays in device memory, bf16 and e4m3 on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace perigee {

inline bool has_gpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

inline void must(cudaError_t error) {
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// A device copy of a vector; freed with it.
template <typename T>
struct Device {
  explicit Device(const std::vector<T>& host) : size(host.size()) {
    must(cudaMalloc(&data, std::max<size_t>(1, size) * sizeof(T)));
    must(cudaMemcpy(data, host.data(), size * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(size_t count, uint8_t byte) : size(count) {  // every byte of it
    must(cudaMalloc(&data, std::max<size_t>(1, size) * sizeof(T)));
    must(cudaMemset(data, byte, size * sizeof(T)));
  }
  ~Device() { cudaFree(data); }
  Device(const Device&) = delete;
  T* data = nullptr;
  size_t size;
};

template <typename T>
std::vector<T> download(const Device<T>& from) {
  std::vector<T> out(from.size);
  must(cudaMemcpy(out.data(), from.data, from.size * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}

inline float bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
inline uint16_t bf16_bits(float x) {
  return __nv_bfloat16_raw(__float2bfloat16(x)).x;
}
inline float e4m3_value(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

// Of device 0; portable: as if it were of the oldest supported kind.
inline int compute_capability(bool portable) {
  cudaDeviceProp device{};
  must(cudaGetDeviceProperties(&device, 0));
  return portable ? 80 : device.major * 10 + device.minor;
}

}  // namespace perigee
