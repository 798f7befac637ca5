#include "tensor/cuda/device.h"

#include <cuda_runtime.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

#include "base/memory_text.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/gpus.h"
#include "tensor/cuda/per_device.h"

namespace perigee {
namespace {

thread_local int64_t allocations = 0;
thread_local int selected = 0;  // GPU

// Of one GPU, so that the rank of another one is not lost in its place.
struct Failure {
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string first_error;
};

Failure& own_failure() {
  static std::array<Failure, kMostDevices> failures;
  return failures[static_cast<size_t>(selected)];
}

bool has_failed() {
  return own_failure().failed;
}

}  // namespace

bool cuda_ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  Failure& failure = own_failure();
  std::lock_guard lock(failure.mutex);
  if (failure.failed) return false;
  failure.first_error = fmt::format("the GPU failed at {}: {}", what, cudaGetErrorString(error));
  failure.failed = true;
  return false;
}

Status device_status() {
  Failure& failure = own_failure();
  if (!failure.failed) return {};
  std::lock_guard lock(failure.mutex);
  return Error(Code::kDeviceLost, failure.first_error);
}

Status select_device(int index) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0)
    return Error(Code::kUnavailable,
                 fmt::format("no usable GPU: {}", error == cudaErrorInsufficientDriver
                                                      ? "no NVIDIA driver, or one that is older than CUDA 13's"
                                                      : cudaGetErrorString(error)),
                 "device");
  if (index < 0 || index >= std::min(count, kMostDevices))
    return Error(Code::kUnavailable, fmt::format("GPU {} of {} does not exist", index, count), "device");
  if (const cudaError_t error = cudaSetDevice(index); error != cudaSuccess)
    return Error(Code::kUnavailable, fmt::format("GPU {}: {}", index, cudaGetErrorString(error)), "device");
  selected = index;
  return {};
}

std::vector<Gpu> list_gpus() {
  int count = 0;
  std::vector<Gpu> gpus;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return gpus;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) break;
    gpus.push_back({.name = properties.name,
                    .bytes = static_cast<int64_t>(properties.totalGlobalMem),
                    .compute_capability = 10 * properties.major + properties.minor});
  }
  return gpus;
}

Buffer device_buffer(size_t bytes) {
  void* p = nullptr;
  if (has_failed()) return {};
  if (const cudaError_t error = cudaMalloc(&p, bytes); error != cudaSuccess) {
    const DeviceMemory memory = device_memory();
    cuda_ok(error, fmt::format("reserving {} where {} of {} are free", memory_text(static_cast<int64_t>(bytes)),
                               memory_text(memory.free), memory_text(memory.total))
                       .c_str());
    return {};
  }
  ++allocations;
  return {static_cast<uint8_t*>(p), bytes, [](uint8_t* memory) { cudaFree(memory); }};
}

Buffer pinned_buffer(size_t bytes) {
  void* p = nullptr;
  if (has_failed() || !cuda_ok(cudaMallocHost(&p, bytes), "reserving pinned memory")) return {};
  ++allocations;
  std::memset(p, 0, bytes);
  return {static_cast<uint8_t*>(p), bytes, [](uint8_t* memory) { cudaFreeHost(memory); }};
}

int64_t num_device_allocations() {
  return allocations;
}

DeviceMemory device_memory() {
  size_t free = 0, total = 0;
  cuda_ok(cudaMemGetInfo(&free, &total), "asking for free memory");
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

void device_copy(void* to, const void* from, size_t bytes) {
  if (has_failed()) return;
  // The streams of this process do not wait for the default stream, nor it for them.
  if (!cuda_ok(cudaDeviceSynchronize(), "waiting before a copy")) return;
  if (!cuda_ok(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copying")) return;
  cuda_ok(cudaStreamSynchronize(nullptr), "waiting for a copy");
}

Stream::Stream() {
  cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}
Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Event::Event(bool timing) {
  cuda_ok(cudaEventCreateWithFlags(&event_, timing ? cudaEventDefault : cudaEventDisableTiming), "making an event");
}
Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

}  // namespace perigee
