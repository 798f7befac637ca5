#include "ops/cuda/launch.h"
#include "ops/cuda/mla/blocks_here.cuh"
#include "ops/cuda/mla/latent_attention.h"
#include "ops/cuda/mla/latent_rows.cuh"
#include "ops/cuda/mla/result_row.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kWarps = 8;  // heads of a block
constexpr int kKeys = 32;  // keys staged at once: one a lane
constexpr int kMaxLatent = 512, kMaxWidth = 576;
constexpr int kKeyStride = kMaxWidth + 2;  // in bf16: an odd number of words, so that a column of keys has no conflicts
constexpr size_t kSharedBytes = kKeys * kKeyStride * 2 + kWarps * kMaxWidth * 4;

struct Online {
  float largest = -INFINITY, sum = 0;
  float2 value[kMaxLatent / 64] = {};  // columns 2 * lane + 64 * i, + 1
};

// Score of this lane's key.
__device__ float score(const __nv_bfloat16* key, const float* q, int width) {
  float sum = 0;
  for (int c = 0; c < width; c += 2) {
    const float2 k = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(key + c));
    const float2 v = *reinterpret_cast<const float2*>(q + c);
    sum += k.x * v.x;
    sum += k.y * v.y;
  }
  return sum;
}

__device__ void take_keys(const __nv_bfloat16* keys, float s, int count, int latent, Online& o) {
  const int lane = threadIdx.x % 32;
  float largest = s;
  for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
  largest = fmaxf(largest, o.largest);
  const float shrink = __expf(o.largest - largest), p = __expf(s - largest);
  float sum = p;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  o.sum = o.sum * shrink + sum;
  o.largest = largest;
  for (float2& v : o.value) v = {v.x * shrink, v.y * shrink};
  for (int k = 0; k < count; ++k) {
    const float weight = __shfl_sync(~0u, p, k);
#pragma unroll
    for (int i = 0; i < kMaxLatent / 64; ++i) {
      const int c = 2 * lane + 64 * i;
      if (c >= latent) continue;
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(keys + k * kKeyStride + c));
      o.value[i].x += weight * v.x;
      o.value[i].y += weight * v.y;
    }
  }
}

// How many of the sequence's first `length` tokens lie here: as tokens_here().
__device__ int keys_here(const DeviceSequences& sequences, int sequence, int length) {
  if (sequences.block_index == nullptr) return length;
  const IndexHere here(sequences, sequence);
  const int before = here.before(length / 64);
  const bool has_last = before < here.count && here.index[before] == length / 64;
  return before * 64 + (has_last ? length % 64 : 0);
}

// parts: [row][head][split][latent + 2], the sum of p v, then the largest score and the sum of p.
__global__ __launch_bounds__(32 * kWarps) void attend_kernel(LatentAttention a, const int32_t* positions,
                                                             DeviceSequences sequences, LatentLayer cache) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto* keys = reinterpret_cast<__nv_bfloat16*>(shared);
  float* queries = reinterpret_cast<float*>(shared + kKeys * kKeyStride * 2);
  dependency_wait();
  dependency_trigger();
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y * kWarps + warp, width = a.latent + a.rope;
  const int sequence = sequences.row_sequence[row], visible = keys_here(sequences, sequence, positions[row] + 1);
  const int per_split = ((visible + a.splits - 1) / a.splits + kKeys - 1) / kKeys * kKeys;
  const int begin = blockIdx.z * per_split, end = min(visible, begin + per_split);
  const int32_t* table = sequences.block_tables + static_cast<int64_t>(sequence) * sequences.table_width;
  const bool is_fp8 = cache.format == LatentFormat::kF8E4M3;  // exact in bf16; the cache's scale joins the others
  const float value_scale = is_fp8 ? cache.scale : 1.0f, scale = a.softmax_scale * value_scale;
  float* q = queries + warp * kMaxWidth;
  const auto* from = reinterpret_cast<const __nv_bfloat16*>(a.q) + (static_cast<int64_t>(row) * a.heads + head) * width;
  if (head < a.heads)
    for (int c = lane; c < width; c += 32) q[c] = __bfloat162float(from[c]) * scale;
  Online o;
  for (int first = begin; first < end; first += kKeys) {
    const int count = min(kKeys, end - first);
    __syncthreads();
    for (int i = threadIdx.x; i < count * (width / 2); i += blockDim.x) {
      const int k = i / (width / 2), c = i % (width / 2) * 2, position = first + k;
      const uint8_t* p = cache.base + table[position / 64] * cache.page_bytes + position % 64 * cache.row_bytes;
      auto* key = reinterpret_cast<uint32_t*>(keys + k * kKeyStride + c);
      if (is_fp8) {
        const float2 x = fp8_values(*reinterpret_cast<const uint16_t*>(p + c));
        *key = pack_pair(Bf16(), x.x, x.y);
      } else {
        *key = latent_pair(cache, p, c, a.latent);
      }
    }
    __syncthreads();
    if (head >= a.heads) continue;
    const float s = lane < count ? score(keys + lane * kKeyStride, q, width) : -INFINITY;
    take_keys(keys, s, count, a.latent, o);
  }
  if (head >= a.heads) return;
  float* part = a.parts + ((static_cast<int64_t>(row) * a.heads + head) * a.splits + blockIdx.z) * (a.latent + 2);
  for (int i = 0; i < kMaxLatent / 64; ++i) {
    const int c = 2 * lane + 64 * i;
    if (c < a.latent)
      *reinterpret_cast<float2*>(part + c) = make_float2(o.value[i].x * value_scale, o.value[i].y * value_scale);
  }
  if (lane == 0) *reinterpret_cast<float2*>(part + a.latent) = {o.largest, o.sum};
}

// One warp a (row, head): the splits in their order.
__global__ void join_kernel(LatentAttention a) {
  dependency_wait();
  dependency_trigger();
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x / 32) + threadIdx.x / 32;
  if (index >= static_cast<int64_t>(a.rows) * a.heads) return;
  const float* parts = a.parts + index * a.splits * (a.latent + 2);
  uint16_t* const result = a.results == nullptr ? nullptr : a.results + index * result_columns(a.latent);
  float largest = -INFINITY, sum = 0;
  for (int s = 0; s < a.splits; ++s) largest = fmaxf(largest, parts[s * (a.latent + 2) + a.latent]);
  for (int s = 0; s < a.splits; ++s) {
    const float* end = parts + s * (a.latent + 2) + a.latent;
    if (end[1] != 0) sum += end[1] * __expf(end[0] - largest);
  }
  for (int c = threadIdx.x % 32; c < a.latent; c += 32) {
    float value = 0;
    for (int s = 0; s < a.splits; ++s) {
      const float* part = parts + s * (a.latent + 2);
      if (part[a.latent + 1] != 0) value += part[c] * __expf(part[a.latent] - largest);
    }
    const float mean = sum == 0 ? 0 : value / sum;
    if (result != nullptr) {
      reinterpret_cast<__half*>(result)[c] = __float2half_rn(mean / kMeanUnit);
    } else {
      reinterpret_cast<__nv_bfloat16*>(a.out)[index * a.latent + c] = __float2bfloat16_rn(mean);
    }
  }
  if (result != nullptr && threadIdx.x % 32 == 0)
    *reinterpret_cast<float4*>(result + a.latent) = make_float4(sum == 0 ? -INFINITY : largest + __logf(sum), 0, 0, 0);
}

}  // namespace

constexpr int32_t kMaxSplits = 32;
constexpr int64_t kMaxSplitBlocks = 264;  // a context is cut no further than into so many blocks of all rows

int32_t latent_attention_splits(int64_t rows, int64_t heads) {
  const int64_t blocks = rows * ((heads + kWarps - 1) / kWarps);
  int32_t splits = 1;
  while (splits < kMaxSplits && blocks * splits * 2 <= kMaxSplitBlocks) splits *= 2;
  return splits;
}

int64_t latent_attention_most_floats(int64_t rows, int64_t heads, int64_t latent) {
  const int64_t split_rows = kMaxSplitBlocks / ((heads + kWarps - 1) / kWarps);  // rows times splits, at most
  return latent_attention_floats(std::min(rows * kMaxSplits, std::max(rows, split_rows)), heads, latent, 1);
}

int64_t latent_attention_floats(int64_t rows, int64_t heads, int64_t latent, int64_t splits) {
  return rows * heads * splits * (latent + 2);
}

cudaError_t latent_attention(const LatentAttention& call, const Batch& batch, const LatentLayer& cache,
                             cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_once<attend_kernel>(kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  const LaunchShape attend{
      .grid = dim3(static_cast<unsigned>(call.rows), static_cast<unsigned>((call.heads + kWarps - 1) / kWarps),
                   static_cast<unsigned>(call.splits)),
      .block = dim3(32 * kWarps),
      .shared_bytes = kSharedBytes,
      .stream = stream};
  const cudaError_t error = launch(attend_kernel, attend, call, batch.positions.data(), *batch.device, cache);
  if (error != cudaSuccess) return error;
  const int64_t warps = static_cast<int64_t>(call.rows) * call.heads;
  const LaunchShape join{.grid = dim3(static_cast<unsigned>((warps + 3) / 4)), .block = dim3(128), .stream = stream};
  return launch(join_kernel, join, call);
}

}  // namespace perigee
