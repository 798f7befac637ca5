// Kernels with one fault each, as they happen: faulty_kernels NAME runs one. A checker that does not report its fault
// would not report ours (tools/gpu_checks.py sanitize).
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

namespace {

constexpr int kThreads = 128;

// The last thread reads the element past the end.
__global__ void out_of_bounds(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x + 1];
}

// Half of `in` was never written.
__global__ void uninitialised(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
}

// The other half of the block may not have stored yet.
__global__ void missing_barrier(const float* in, float* out) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

// Only some threads of a warp reach the barrier.
__global__ void divided_barrier(const float* in, float* out) {
  if (threadIdx.x % 32 < 7) __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

using Kernel = void (*)(const float*, float*);

Kernel kernel_of(const char* name) {
  if (std::strcmp(name, "out_of_bounds") == 0) return out_of_bounds;
  if (std::strcmp(name, "uninitialised") == 0) return uninitialised;
  if (std::strcmp(name, "missing_barrier") == 0) return missing_barrier;
  if (std::strcmp(name, "divided_barrier") == 0) return divided_barrier;
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const Kernel kernel = argc == 2 ? kernel_of(argv[1]) : nullptr;
  if (kernel == nullptr) {
    std::fprintf(stderr, "usage: faulty_kernels out_of_bounds|uninitialised|missing_barrier|divided_barrier\n");
    return 2;
  }
  float *in = nullptr, *out = nullptr;
  const size_t bytes = kThreads * sizeof(float), written = kernel == uninitialised ? bytes / 2 : bytes;
  if (cudaMalloc(&in, bytes) != cudaSuccess || cudaMalloc(&out, bytes) != cudaSuccess) return 3;
  cudaMemset(in, 0, written);
  kernel<<<1, kThreads>>>(in, out);
  cudaDeviceSynchronize();  // what it says is the checker's business
  return 0;
}
