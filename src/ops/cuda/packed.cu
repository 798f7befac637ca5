#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>

#include "base/rng.h"
#include "ops/cuda/gemm/dequant.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/packed.h"

namespace perigee {
namespace {

// The source as the kernels see it; indices are those of RawMatrix. `gain` and `scale_gain` are the factors of the
// formula in model/dummy.h.
struct Source {
  RawMatrix raw;
  float gain = 0, scale_gain = 0;
};

Source make_source(const RawMatrix& raw) {
  const double in = static_cast<double>(raw.stride());  // the formula's fan-in is that of the stored matrix
  Source s{.raw = raw, .gain = static_cast<float>(std::sqrt(3.0 / in))};
  s.scale_gain = raw.format == WeightFormat::kInt4Group32 ? static_cast<float>(1.0 / (4.6097722 * std::sqrt(in)))
                                                          : static_cast<float>(std::sqrt(3.0 / in) / 448.0);
  return s;
}

__device__ float uniform(uint64_t key, int64_t i) {
  const int64_t odd = 2 * static_cast<int64_t>(random_u64(key, static_cast<uint64_t>(i)) >> 41) + 1;
  return static_cast<float>(odd - (1 << 23)) * 0x1p-23f;
}

__device__ float fp8_value(uint8_t bits) {
  __nv_fp8_e4m3 value;
  value.__x = bits;
  return static_cast<float>(value);
}

__device__ uint8_t fp8_bits(const Source& s, int64_t i) {
  if (s.raw.data != nullptr) return static_cast<const uint8_t*>(s.raw.data)[i];
  return __nv_cvt_float_to_fp8(448.0f * uniform(s.raw.data_key, s.raw.origin() + i), __NV_SATFINITE, __NV_E4M3);
}

__device__ float fp8_scale(const Source& s, int64_t i) {
  if (s.raw.scale != nullptr) return static_cast<const float*>(s.raw.scale)[i];
  return s.scale_gain * (1.0f + 0.25f * uniform(s.raw.scale_key, s.raw.scale_origin() + i));
}

// The word of element i.
__device__ uint32_t int4_word(const Source& s, int64_t i) {
  if (s.raw.data != nullptr) return static_cast<const uint32_t*>(s.raw.data)[i / 8];
  return static_cast<uint32_t>(random_u64(s.raw.data_key, static_cast<uint64_t>((s.raw.origin() + i) / 8)));
}

__device__ __nv_bfloat16 int4_scale(const Source& s, int64_t i) {
  if (s.raw.scale != nullptr) return static_cast<const __nv_bfloat16*>(s.raw.scale)[i];
  return __float2bfloat16_rn(s.scale_gain * (1.0f + 0.25f * uniform(s.raw.scale_key, s.raw.scale_origin() + i)));
}

// Element (r, c) as raw_element() of ops/weights.h defines it.
__device__ float element(const Source& s, int64_t r, int64_t c) {
  const int64_t i = s.raw.index(r, c);
  switch (s.raw.format) {
    case WeightFormat::kF32: return static_cast<const float*>(s.raw.data)[i];
    case WeightFormat::kF16: return __half2float(static_cast<const __half*>(s.raw.data)[i]);
    case WeightFormat::kBF16:
      if (s.raw.data != nullptr) return __bfloat162float(static_cast<const __nv_bfloat16*>(s.raw.data)[i]);
      return __bfloat162float(__float2bfloat16_rn(uniform(s.raw.data_key, s.raw.origin() + i) * s.gain));
    case WeightFormat::kF8Block128: return fp8_value(fp8_bits(s, i)) * fp8_scale(s, s.raw.scale_index(r, c));
    case WeightFormat::kInt4Group32: {
      const int nibble = static_cast<int>(int4_word(s, i) >> (4 * (c % 8)) & 15u) - 8;
      return static_cast<float>(nibble) * __bfloat162float(int4_scale(s, s.raw.scale_index(r, c)));
    }
  }
  return 0;
}

__device__ int64_t target_row(const PackTarget& t, int64_t r) {
  return t.interleave < 0 ? t.first_row + r : t.first_row + r / 8 * 16 + r % 8 + 8 * t.interleave;
}

// A thread makes 8 columns of one row; grid.y is the row's index in steps of gridDim.y.
__global__ void pack_bf16(Source s, PackTarget t) {
  const int64_t c = 8 * (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x);
  if (c >= t.padded_in) return;
  for (int64_t r = blockIdx.y; r < s.raw.out; r += gridDim.y) {
    __nv_bfloat16 values[8];
    for (int i = 0; i < 8; ++i) values[i] = __float2bfloat16_rn(c + i < s.raw.in ? element(s, r, c + i) : 0.0f);
    auto* row = reinterpret_cast<__nv_bfloat16*>(t.data) + target_row(t, r) * t.padded_in;
    *reinterpret_cast<uint4*>(row + c) = *reinterpret_cast<const uint4*>(values);
  }
}

__global__ void pack_int4(Source s, PackTarget t) {
  const int64_t word = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (word >= t.padded_in / 8) return;
  const bool inside = word * 8 < s.raw.in;
  for (int64_t r = blockIdx.y; r < s.raw.out; r += gridDim.y) {
    const int64_t row = target_row(t, r);
    const uint32_t from = inside ? int4_word(s, s.raw.index(r, word * 8)) : 0x88888888u;
    uint32_t to = 0;
    for (int i = 0; i < 4; ++i) {
      to |= (from >> (8 * i) & 15u) << (4 * i);
      to |= (from >> (8 * i + 4) & 15u) << (16 + 4 * i);
    }
    const int64_t place = word / 8 * 8 + word % 4 * 2 + word / 4 % 2;
    reinterpret_cast<uint32_t*>(t.data)[row * (t.padded_in / 8) + place] = to;
    if (word % 4 != 0) continue;
    static_cast<__nv_bfloat16*>(t.scale)[row * (t.padded_in / 32) + word / 4] =
        inside ? int4_scale(s, s.raw.scale_index(r, word * 8)) : __float2bfloat16_rn(0.0f);
  }
}

__global__ void pack_fp8(Source s, PackTarget t) {
  const int64_t c = 4 * (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x);
  if (c >= t.padded_in) return;
  for (int64_t r = blockIdx.y; r < s.raw.out; r += gridDim.y) {
    const int64_t row = target_row(t, r);
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i)
      if (c + i < s.raw.in) word |= static_cast<uint32_t>(fp8_bits(s, s.raw.index(r, c + i))) << (8 * i);
    reinterpret_cast<uint32_t*>(t.data)[(row * t.padded_in + c) / 4] = word;
    if (c % 128 != 0 || r % 8 != 0) continue;
    static_cast<float*>(t.scale)[row / 8 * (t.padded_in / 128) + c / 128] = fp8_scale(s, s.raw.scale_index(r, c));
  }
}

__global__ void transpose_keys(const __nv_bfloat16* kv_b, __nv_bfloat16* keys, MlaShape shape, int64_t padded) {
  const int64_t g = blockIdx.z, l = blockIdx.y;
  for (int64_t d = threadIdx.x; d < padded; d += blockDim.x) {
    const int64_t from = (g * (shape.nope + shape.value) + d) * shape.latent + l;
    keys[(g * shape.latent + l) * padded + d] = d < shape.nope ? kv_b[from] : __float2bfloat16_rn(0.0f);
  }
}

// A thread widens 8 columns.
__global__ void widen_kernel(const uint8_t* from, const float* scale, int64_t padded_in, int64_t count,
                             __nv_bfloat16* to) {
  dependency_wait();
  dependency_trigger();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i * 8 / padded_in, column = i * 8 % padded_in;
  const float factor = scale[row / 8 * (padded_in / 128) + column / 128];
  const uint2 bytes = reinterpret_cast<const uint2*>(from)[i];
  __nv_bfloat162 pairs[4];
  for (int k = 0; k < 4; ++k) {
    const float2 v = __bfloat1622float2(as_bf16x2(fp8_pair(k < 2 ? bytes.x : bytes.y, k % 2 * 2)));
    pairs[k] = __floats2bfloat162_rn(v.x * factor, v.y * factor);
  }
  reinterpret_cast<uint4*>(to)[i] = *reinterpret_cast<const uint4*>(pairs);
}

constexpr int kThreads = 128;

dim3 pack_grid(int64_t groups, int64_t rows) {
  return {static_cast<unsigned>((groups + kThreads - 1) / kThreads),
          static_cast<unsigned>(std::min<int64_t>(rows, 65535))};
}

}  // namespace

cudaError_t pack_matrix(const RawMatrix& raw, const PackTarget& target, cudaStream_t stream) {
  const Source source = make_source(raw);
  switch (target.format) {
    case WeightFormat::kInt4Group32:
      pack_int4<<<pack_grid(target.padded_in / 8, raw.out), kThreads, 0, stream>>>(source, target);
      break;
    case WeightFormat::kF8Block128:
      pack_fp8<<<pack_grid(target.padded_in / 4, raw.out), kThreads, 0, stream>>>(source, target);
      break;
    default: pack_bf16<<<pack_grid(target.padded_in / 8, raw.out), kThreads, 0, stream>>>(source, target);
  }
  return cudaGetLastError();
}

cudaError_t pack_mla_keys(const CudaMatrix& kv_b, const MlaShape& shape, CudaMatrix& keys, cudaStream_t stream) {
  const dim3 grid(1, static_cast<unsigned>(shape.latent), static_cast<unsigned>(shape.heads));
  transpose_keys<<<grid, kThreads, 0, stream>>>(reinterpret_cast<const __nv_bfloat16*>(kv_b.data.data()),
                                                reinterpret_cast<__nv_bfloat16*>(keys.data.data()), shape,
                                                keys.padded_in);
  return cudaGetLastError();
}

cudaError_t widen_fp8(const CudaMatrix& from, uint16_t* to, cudaStream_t stream) {
  const int64_t count = from.out * from.padded_in / 8;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)),
                          .block = dim3(kThreads),
                          .stream = stream};
  return launch(widen_kernel, shape, static_cast<const uint8_t*>(from.data.data()),
                reinterpret_cast<const float*>(from.scale.data()), from.padded_in, count,
                reinterpret_cast<__nv_bfloat16*>(to));
}

}  // namespace perigee
