// Finding an id by its place in the order "larger value first, lower id first", for a block of threads, without a sort.
//
// A row's ids are counted in bins: by distance from the maximum, then finer within the bin that was found, then by the
// bits of the order's key. Probabilities are integers, so that sums do not depend on the order that threads add in.
#pragma once

#include <cstdint>

namespace perigee {

constexpr int kSamplingThreads = 1024;
constexpr int kBins = 2 * kSamplingThreads;
constexpr float kBinsPerNat = 64.0f;

// A share of probability in units of 2^-40: of the largest id's at 1.
using Mass = unsigned long long;
constexpr float kMassUnit = 1099511627776.0f;

// Of values x[0 ... n) the place in the order, as one number that grows along it.
__device__ inline uint64_t order_key(float value, int id) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

template <typename T, typename F>
__device__ T block_reduce(T value, F&& join) {
  __shared__ T parts[kSamplingThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value = join(value, __shfl_xor_sync(~0u, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  T total = parts[0];
  for (int i = 1; i < kSamplingThreads / 32; ++i) total = join(total, parts[i]);
  return total;
}

__device__ inline Mass block_sum(Mass value) {
  return block_reduce(value, [](Mass a, Mass b) { return a + b; });
}

// A row's distribution: weight of id i is exp((x[i] - max) * scale).
struct Row {
  const float* x;
  int n;
  float max, scale;
  __device__ float exponent(int i) const { return (x[i] - max) * scale; }
  __device__ Mass mass(int i) const { return static_cast<Mass>(__expf(exponent(i)) * kMassUnit); }
  __device__ bool open(int i) const { return x[i] > -INFINITY; }
  // Places along the order that few ids share, and places within one of those.
  __device__ int coarse_bin(int i) const { return bin_of(-exponent(i) * kBinsPerNat); }
  __device__ int fine_bin(int i, int coarse) const {
    return bin_of((-exponent(i) * kBinsPerNat - static_cast<float>(coarse)) * kBins);
  }
  __device__ static int bin_of(float place) { return static_cast<int>(fminf(fmaxf(place, 0.0f), kBins - 1.0f)); }
};

// Counts of a row's coarse bins in device memory.
struct RowBins {
  Mass mass[kBins];
  unsigned count[kBins];
};

constexpr int kListed = 3072;

struct OrderScratch {
  unsigned low[kBins], high[kBins];  // of a mass: shared memory adds 32 bits at a time
  unsigned count[kBins];
  int id[kBins];  // of a bin with one id
  int list[kListed];
  int listed;

  __device__ Mass mass(int bin) const { return static_cast<Mass>(high[bin]) << 32 | low[bin]; }
  __device__ void clear() {
    for (int i = threadIdx.x; i < kBins; i += kSamplingThreads) low[i] = high[i] = count[i] = 0;
  }
  __device__ void add(int bin, Mass m) {
    const auto part = static_cast<unsigned>(m);
    const unsigned before = atomicAdd(&low[bin], part);
    const unsigned carried = static_cast<unsigned>(m >> 32) + (before + part < before ? 1 : 0);
    if (carried != 0) atomicAdd(&high[bin], carried);
    atomicAdd(&count[bin], 1u);
  }
};

struct Found {
  Mass mass_before;
  unsigned count_before;
  int bin;  // -1: the limits lie beyond the last
};

// The first bin at whose end `mass` or `count` is reached, given what was walked before.
__device__ inline Found find_bin(const OrderScratch& bins, const Found& before, Mass mass, unsigned count) {
  __shared__ Mass warp_mass[kSamplingThreads / 32];
  __shared__ unsigned warp_count[kSamplingThreads / 32];
  __shared__ Found found;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = 2 * threadIdx.x;
  const Mass second_mass = bins.mass(first + 1), both_mass = bins.mass(first) + second_mass;
  const unsigned second_count = bins.count[first + 1], both_count = bins.count[first] + second_count;
  Mass m = both_mass;
  unsigned c = both_count;
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
  const Mass m1 = m - second_mass, m0 = m - both_mass;
  const unsigned c1 = c - second_count, c0 = c - both_count;
  const auto reached = [&](Mass at, unsigned n) { return at >= mass || n >= count; };
  if (!reached(m0, c0) && reached(m, c)) found = reached(m1, c1) ? Found{m0, c0, first} : Found{m1, c1, first + 1};
  __syncthreads();
  const Found out = found;
  __syncthreads();
  return out;
}

// The ids of a coarse bin: a list, or when they are too many for it all ids, to be looked at anew.
__device__ inline int list_bin(const Row& row, int coarse, OrderScratch& scratch) {
  if (threadIdx.x == 0) scratch.listed = 0;
  __syncthreads();
#pragma unroll 8
  for (int i = threadIdx.x; i < row.n; i += kSamplingThreads) {
    if (!row.open(i) || row.coarse_bin(i) != coarse) continue;
    if (const int at = atomicAdd(&scratch.listed, 1); at < kListed) scratch.list[at] = i;
  }
  __syncthreads();
  return scratch.listed;
}

struct Walked {
  Mass mass;
  int id;  // the last id; -1: everything was walked
};

// Walks ids in their order until `mass` or `count` is reached (that id included).
__device__ inline Walked walk(const Row& row, const RowBins& coarse_bins, OrderScratch& bins, Mass mass,
                              unsigned count) {
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kSamplingThreads) {
    bins.low[i] = static_cast<unsigned>(coarse_bins.mass[i]);
    bins.high[i] = static_cast<unsigned>(coarse_bins.mass[i] >> 32);
    bins.count[i] = coarse_bins.count[i];
  }
  __syncthreads();
  Found before = find_bin(bins, {0, 0, -1}, mass, count);
  if (before.bin < 0) return {~0ull, -1};
  const int coarse = before.bin, listed = list_bin(row, coarse, bins);
  const bool whole = listed <= kListed;
  int fine = -1;
  uint64_t prefix = 0;
  constexpr int kShift[] = {64, 53, 42, 32, 21, 10, 0};  // of the key: 11 bits, 11, 10 of the value, then the id's
  for (int level = 0; level <= 6; ++level) {
    bins.clear();
    __syncthreads();
    for (int at = threadIdx.x; at < (whole ? listed : row.n); at += kSamplingThreads) {
      const int i = whole ? bins.list[at] : at;
      if (!whole && (!row.open(i) || row.coarse_bin(i) != coarse)) continue;
      int bin = row.fine_bin(i, coarse);
      if (level > 0) {
        if (bin != fine) continue;
        const uint64_t key = order_key(row.x[i], i);
        if (level > 1 && key >> kShift[level - 1] != prefix) continue;
        bin = static_cast<int>(key >> kShift[level] & ((1u << (kShift[level - 1] - kShift[level])) - 1));
      }
      bins.add(bin, row.mass(i));
      atomicExch(&bins.id[bin], i);
    }
    __syncthreads();
    before = find_bin(bins, before, mass, count);
    if (bins.count[before.bin] == 1) break;  // on the last level at the latest: an id is a place of its own
    if (level == 0)
      fine = before.bin;
    else
      prefix = prefix << (kShift[level - 1] - kShift[level]) | static_cast<unsigned>(before.bin);
    __syncthreads();
  }
  const int id = bins.id[before.bin];
  return {before.mass_before + row.mass(id), id};
}

}  // namespace perigee
