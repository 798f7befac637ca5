#include <cfloat>

#include "base/rng.h"
#include "exec/cuda/sampling_kernels.h"

namespace perigee {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = 2048;
constexpr float kMinTemperature = 1e-5f;  // as exec/sampler.cc: below, the distribution has collapsed
constexpr float kMaxTemperature = 1e30f;
constexpr float kBinsPerNat = 64.0f;
constexpr double kMassUnit = 1099511627776.0;  // 2^40: what a probability of 1 counts

using Mass = unsigned long long;

// Of values x[0 ... n) the place in the order "larger value first, lower id first", as one number that grows along it.
__device__ uint64_t order_key(float value, int id) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

template <typename T, typename F>
__device__ T block_reduce(T value, F&& join) {
  __shared__ T parts[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value = join(value, __shfl_xor_sync(~0u, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  T total = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) total = join(total, parts[i]);
  return total;
}

__device__ Mass block_sum(Mass value) {
  return block_reduce(value, [](Mass a, Mass b) { return a + b; });
}

// The smallest order_key above `after`, ~0 if there is none.
__device__ uint64_t next_in_order(const float* x, int n, uint64_t after, bool any) {
  uint64_t best = ~0ull;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const uint64_t key = order_key(x[i], i);
    if (any || key > after) best = key < best ? key : best;
  }
  return block_reduce<unsigned long long>(best, [](Mass a, Mass b) { return a < b ? a : b; });
}

// A row's distribution: weight of id i is exp((x[i] - max) * scale).
struct Row {
  const float* x;
  int n;
  float max, scale;
  __device__ float exponent(int i) const { return (x[i] - max) * scale; }
  __device__ Mass mass(int i) const { return static_cast<Mass>(static_cast<double>(__expf(exponent(i))) * kMassUnit); }
  __device__ bool open(int i) const { return x[i] > -INFINITY; }
  // A coarse place in the order: few ids share one.
  __device__ int bin(int i) const { return static_cast<int>(fminf(-exponent(i) * kBinsPerNat, kBins - 1.0f)); }
};

struct Bins {
  Mass mass[kBins];
  unsigned count[kBins];
};

struct Found {
  Mass mass_before;
  unsigned count_before;
  int bin;  // -1: the limits lie beyond the last
};

// The first bin at whose end `mass` or `count` is reached, given what was walked before.
__device__ Found find_bin(const Bins& bins, Found before, Mass mass, unsigned count) {
  __shared__ Mass warp_mass[kThreads / 32];
  __shared__ unsigned warp_count[kThreads / 32];
  __shared__ Found found;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = 2 * threadIdx.x;
  Mass m = bins.mass[first] + bins.mass[first + 1];
  unsigned c = bins.count[first] + bins.count[first + 1];
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass other_mass = __shfl_up_sync(~0u, m, offset);
    const unsigned other_count = __shfl_up_sync(~0u, c, offset);
    if (lane >= offset) {
      m += other_mass;
      c += other_count;
    }
  }
  if (lane == 31) {
    warp_mass[warp] = m;
    warp_count[warp] = c;
  }
  if (threadIdx.x == 0) found = {0, 0, -1};
  __syncthreads();
  m += before.mass_before;
  c += before.count_before;
  for (int w = 0; w < warp; ++w) {
    m += warp_mass[w];
    c += warp_count[w];
  }
  // [m, c] are sums up to the end of my two bins.
  const Mass m1 = m - bins.mass[first + 1], m0 = m1 - bins.mass[first];
  const unsigned c1 = c - bins.count[first + 1], c0 = c1 - bins.count[first];
  const auto reached = [&](Mass at, unsigned n) { return at >= mass || n >= count; };
  if (!reached(m0, c0) && reached(m, c)) {
    if (reached(m1, c1))
      found = {m0, c0, first};
    else
      found = {m1, c1, first + 1};
  }
  __syncthreads();
  const Found out = found;
  __syncthreads();
  return out;
}

struct Walked {
  Mass mass;
  int id;  // the last id; -1: everything was walked
};

// Walks ids in their order until `mass` or `count` is reached (that id included). Bins first by coarse place, then by
// the bits of the order's key; a level only counts ids of the bin found before.
__device__ Walked walk(const Row& row, Bins& bins, Mass mass, unsigned count) {
  Found before{0, 0, -1};
  int coarse = -1;
  uint64_t prefix = 0;
  constexpr int kShift[] = {53, 42, 32, 21, 10, 0};  // of the key: 11 bits, 11, 10 of the value, then the id's
  for (int level = 0; level <= 6; ++level) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      bins.mass[i] = 0;
      bins.count[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < row.n; i += kThreads) {
      if (!row.open(i)) continue;
      int bin = row.bin(i);
      if (level > 0) {
        if (bin != coarse) continue;
        const uint64_t key = order_key(row.x[i], i);
        const int shift = kShift[level - 1];
        const int above = level == 1 ? 64 : kShift[level - 2];
        if (above < 64 && key >> above != prefix) continue;
        bin = static_cast<int>(key >> shift & ((1u << (above - shift)) - 1));
      }
      atomicAdd(&bins.mass[bin], row.mass(i));
      atomicAdd(&bins.count[bin], 1u);
    }
    __syncthreads();
    const Found found = find_bin(bins, before, mass, count);
    if (found.bin < 0) return {~0ull, -1};
    if (level == 0)
      coarse = found.bin;
    else
      prefix = prefix << ((level == 1 ? 64 : kShift[level - 2]) - kShift[level - 1]) | static_cast<unsigned>(found.bin);
    before = found;
  }
  const int id = static_cast<int>(prefix & 0xFFFFFFFFu);
  return {before.mass_before + row.mass(id), id};
}

__device__ int draw(const Row& row, Bins& bins, const SlotParams& p, float uniform) {
  Mass total = 0;
  for (int i = threadIdx.x; i < row.n; i += kThreads) total += row.open(i) ? row.mass(i) : 0;
  Mass kept = block_sum(total);
  const unsigned all = ~0u;
  const unsigned top_k = p.top_k > 0 ? static_cast<unsigned>(p.top_k) : all;
  if (top_k != all && p.top_k < row.n) {
    const Walked walked = walk(row, bins, ~0ull, top_k);
    if (walked.id >= 0) kept = walked.mass;
  }
  if (p.top_p < 1.0f) {
    const Mass wanted = static_cast<Mass>(static_cast<double>(kept) * p.top_p);
    const Walked walked = walk(row, bins, wanted > 0 ? wanted : 1, top_k);
    if (walked.id >= 0 && walked.mass < kept) kept = walked.mass;
  }
  if (p.min_p > 0.0f) {
    const float floor = __logf(p.min_p);
    Mass above = 0;
    for (int i = threadIdx.x; i < row.n; i += kThreads)
      above += row.open(i) && (row.exponent(i) >= floor || row.x[i] == row.max) ? row.mass(i) : 0;
    above = block_sum(above);
    kept = above < kept ? above : kept;
  }
  const Walked drawn = walk(row, bins, static_cast<Mass>(static_cast<double>(kept) * uniform) + 1, all);
  return drawn.id < 0 ? 0 : drawn.id;
}

struct RowMax {
  float max;
  int id;  // the lowest of those with the largest value
  bool finite;
};

struct Best {
  float value = -INFINITY;
  int id = 0, good = 1;
  __device__ void take(float x, int i) {
    good &= x <= FLT_MAX;  // false of NaN and +inf
    if (x > value) {
      value = x;
      id = i;
    }
  }
};

__device__ RowMax row_max(const float* x, int n) {
  Best best;
  const int fours = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? n / 4 : 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    best.take(v.x, 4 * i);
    best.take(v.y, 4 * i + 1);
    best.take(v.z, 4 * i + 2);
    best.take(v.w, 4 * i + 3);
  }
  for (int i = 4 * fours + threadIdx.x; i < n; i += kThreads) best.take(x[i], i);
  const Mass key = block_reduce<Mass>(order_key(best.value, best.id), [](Mass a, Mass b) { return a < b ? a : b; });
  const int good = __syncthreads_and(best.good);
  const int id = static_cast<int>(key & 0xFFFFFFFFu);
  return {x[id], id, good != 0 && x[id] >= -FLT_MAX};
}

// logit_bias, mask, min_tokens and penalties, in that order, on a copy.
__device__ void adjust(const float* logits, const uint32_t* mask, const SlotArrays& slots, int slot, float* work) {
  const SlotParams& p = slots.params[slot];
  const int32_t* ids = slots.listed_ids + static_cast<int64_t>(slot) * kMaxListed;
  const float* bias = slots.listed_bias + static_cast<int64_t>(slot) * kMaxListed;
  for (int i = threadIdx.x; i < slots.vocab; i += kThreads) work[i] = logits[i];
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_bias; i += kThreads)
    if (ids[i] >= 0 && ids[i] < slots.vocab) atomicAdd(&work[ids[i]], bias[i]);
  __syncthreads();
  if (mask != nullptr)
    for (int i = threadIdx.x; i < slots.vocab; i += kThreads)
      if ((mask[i / 32] >> (i % 32) & 1u) == 0) work[i] = -INFINITY;
  __syncthreads();
  if (slots.num_outputs[slot] < p.min_tokens)
    for (int i = threadIdx.x; i < p.num_stops; i += kThreads)
      if (const int id = ids[p.num_bias + i]; id >= 0 && id < slots.vocab) work[id] = -INFINITY;
  __syncthreads();
  if (p.penalties == 0) return;
  const uint32_t* seen = slots.seen + slot * slots.bit_words();
  const uint32_t* counts = slots.counts + slot * slots.count_words();
  for (int i = threadIdx.x; i < slots.vocab; i += kThreads) {
    float x = work[i];
    if ((seen[i / 32] >> (i % 32) & 1u) != 0) x *= x > 0 ? 1.0f / p.repetition : p.repetition;
    const auto count = static_cast<float>(counts[i / 2] >> (i % 2 * 16) & 0xFFFFu);
    work[i] = x - (p.frequency * count + (count > 0 ? p.presence : 0.0f));
  }
  __syncthreads();
}

__device__ void score(const float* x, int n, int id, int top, TokenScore& out) {
  const float max = row_max(x, n).max;
  double sum = 0;
  int larger = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    sum += static_cast<double>(__expf(x[i] - max));
    larger += x[i] > x[id];
  }
  const double normaliser = log(block_reduce(sum, [](double a, double b) { return a + b; }));
  const int rank = 1 + block_reduce(larger, [](int a, int b) { return a + b; });
  const auto logprob = [&](float v) { return static_cast<float>(static_cast<double>(v) - max - normaliser); };
  if (threadIdx.x == 0) {
    out.logprob = logprob(x[id]);
    out.rank = rank;
    out.num_top = min(top, min(n, kMaxTopLogprobs));
  }
  uint64_t last = 0;
  for (int k = 0; k < min(top, min(n, kMaxTopLogprobs)); ++k) {
    last = next_in_order(x, n, last, k == 0);
    const int at = static_cast<int>(last & 0xFFFFFFFFu);
    if (threadIdx.x != 0) continue;
    out.top_ids[k] = at;
    out.top_logprobs[k] = logprob(x[at]);
  }
}

__device__ void accept(const SlotArrays& slots, int slot, int id) {
  slots.newest[slot] = id;
  ++slots.num_outputs[slot];
  if (slots.params[slot].penalties == 0) return;
  slots.seen[slot * slots.bit_words() + id / 32] |= 1u << (id % 32);
  uint32_t& word = slots.counts[slot * slots.count_words() + id / 2];
  const int shift = id % 2 * 16;
  if ((word >> shift & 0xFFFFu) != 0xFFFFu) word += 1u << shift;
}

__global__ __launch_bounds__(kThreads) void sample_kernel(SampleCall call, SlotArrays slots) {
  __shared__ Bins bins;
  const SampleRecord record = call.samples[blockIdx.x];
  const SlotParams p = slots.params[record.slot];
  SampleResult& result = call.results[blockIdx.x];
  const float* logits = call.logits + static_cast<int64_t>(record.logit_row) * slots.vocab;
  const uint32_t* mask = record.mask_row < 0 ? nullptr : call.masks + record.mask_row * slots.bit_words();
  RowMax top = row_max(logits, slots.vocab);
  const float* x = logits;
  const int outputs = slots.num_outputs[record.slot];
  if (top.finite && (p.num_bias > 0 || mask != nullptr || p.penalties != 0 || outputs < p.min_tokens)) {
    float* work = call.work + static_cast<int64_t>(blockIdx.x) * slots.vocab;
    adjust(logits, mask, slots, record.slot, work);
    x = work;
    top = row_max(x, slots.vocab);
  }
  int id = 0;
  if (top.finite) {
    if (p.temperature < kMinTemperature) {
      id = top.id;
    } else {
      const Row row{x, slots.vocab, top.max, 1.0f / fminf(p.temperature, kMaxTemperature)};
      id = draw(row, bins, p, random_unit(p.random_key, static_cast<uint64_t>(outputs)));
    }
    if (p.logprobs >= 0) score(logits, slots.vocab, id, p.logprobs, result.score);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  result.id = id;
  result.finite = top.finite;
  accept(slots, record.slot, id);
}

__global__ __launch_bounds__(kThreads) void score_kernel(const ScoreRecord* records, const float* logits, int vocab,
                                                         TokenScore* results) {
  const ScoreRecord record = records[blockIdx.x];
  score(logits + static_cast<int64_t>(record.logit_row) * vocab, vocab, record.id, record.top, results[blockIdx.x]);
}

}  // namespace

cudaError_t sample_rows(const SampleCall& call, const SlotArrays& slots, cudaStream_t stream) {
  if (call.count == 0) return cudaSuccess;
  sample_kernel<<<call.count, kThreads, 0, stream>>>(call, slots);
  return cudaGetLastError();
}

cudaError_t score_rows(const ScoreRecord* records, int32_t count, const float* logits, int32_t vocab,
                       TokenScore* results, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  score_kernel<<<count, kThreads, 0, stream>>>(records, logits, vocab, results);
  return cudaGetLastError();
}

cudaError_t load_sampling_kernels() {
  cudaFuncAttributes unused;
  const cudaError_t error = cudaFuncGetAttributes(&unused, sample_kernel);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&unused, score_kernel);
}

}  // namespace perigee
