#include <algorithm>
#include <cfloat>

#include "base/rng.h"
#include "exec/cuda/sampling_kernels.h"
#include "exec/cuda/sampling_order.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kThreads = kSamplingThreads;
constexpr int kMaxSlices = 16;            // blocks of a row
constexpr int kBlocks = 256;              // about two for each multiprocessor
constexpr float kMinTemperature = 1e-5f;  // as exec/sampler.cc: below, the distribution has collapsed
constexpr float kMaxTemperature = 1e30f;

struct RowMax {
  uint64_t key;  // of the lowest of the ids with the largest value
  bool good;     // no NaN, no +inf
  __device__ int id() const { return static_cast<int>(key & 0xFFFFFFFFu); }
};

// What the kernels tell one another of a row.
struct RowScratch {
  RowMax slices[kMaxSlices];
  RowBins bins;
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

// Of ids first ... end - 1; first is a multiple of 4.
__device__ RowMax row_max(const float* x, int first, int end) {
  Best best;
  const int fours = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? end / 4 : first / 4;
#pragma unroll 8
  for (int i = first / 4 + threadIdx.x; i < fours; i += kThreads) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    best.take(v.x, 4 * i);
    best.take(v.y, 4 * i + 1);
    best.take(v.z, 4 * i + 2);
    best.take(v.w, 4 * i + 3);
  }
  for (int i = 4 * fours + threadIdx.x; i < end; i += kThreads) best.take(x[i], i);
  const Mass key = block_reduce<Mass>(order_key(best.value, best.id), [](Mass a, Mass b) { return a < b ? a : b; });
  return {key, __syncthreads_and(best.good) != 0};
}

// The part of a row that a block prepares or counts.
struct Slice {
  int first, end;
};

__device__ Slice my_slice(int vocab) {
  const int size = (vocab + 4 * static_cast<int>(gridDim.x) - 1) / (4 * static_cast<int>(gridDim.x)) * 4;
  const int first = min(static_cast<int>(blockIdx.x) * size, vocab);
  return {first, min(first + size, vocab)};
}

// logit_bias, mask, min_tokens and penalties, in that order, on a copy of the slice.
__device__ void adjust(const float* logits, const uint32_t* mask, const SlotArrays& slots, int slot, const Slice& slice,
                       float* work) {
  const SlotParams& p = slots.params[slot];
  const int32_t* ids = slots.listed_ids + static_cast<int64_t>(slot) * kMaxListed;
  const float* bias = slots.listed_bias + static_cast<int64_t>(slot) * kMaxListed;
  const auto is_mine = [&](int id) { return id >= slice.first && id < slice.end; };
  for (int i = slice.first + threadIdx.x; i < slice.end; i += kThreads) work[i] = logits[i];
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_bias; i += kThreads)
    if (is_mine(ids[i])) atomicAdd(&work[ids[i]], bias[i]);
  __syncthreads();
  if (mask != nullptr)
    for (int i = slice.first + threadIdx.x; i < slice.end; i += kThreads)
      if ((mask[i / 32] >> (i % 32) & 1u) == 0) work[i] = -INFINITY;
  __syncthreads();
  if (slots.num_outputs[slot] < p.min_tokens)
    for (int i = threadIdx.x; i < p.num_stops; i += kThreads)
      if (const int id = ids[p.num_bias + i]; is_mine(id)) work[id] = -INFINITY;
  __syncthreads();
  if (p.penalties == 0) return;
  const uint32_t* seen = slots.seen + slots.kept(slot) * slots.bit_words();
  const uint32_t* counts = slots.counts + slots.kept(slot) * slots.count_words();
  for (int i = slice.first + threadIdx.x; i < slice.end; i += kThreads) {
    float x = work[i];
    if ((seen[i / 32] >> (i % 32) & 1u) != 0) x *= x > 0 ? 1.0f / p.repetition : p.repetition;
    const auto count = static_cast<float>(counts[i / 2] >> (i % 2 * 16) & 0xFFFFu);
    work[i] = x - (p.frequency * count + (count > 0 ? p.presence : 0.0f));
  }
  __syncthreads();
}

// Gives ids in their order, one a call of the whole block. A thread knows the next of its own ids, those that equal its
// number modulo the block's size; when it is taken, the thread's warp looks for the next one.
class InOrder {
 public:
  __device__ InOrder(const float* x, int n) : x_(x), n_(n) {
#pragma unroll 8
    for (int i = threadIdx.x; i < n; i += kThreads) next_ = earlier(next_, order_key(x[i], i));
  }
  // Requires that an id is left.
  __device__ int take() {
    const uint64_t taken = block_reduce<unsigned long long>(next_, earlier);
    if (const unsigned mine = __ballot_sync(~0u, next_ == taken); mine != 0) advance(taken, __ffs(mine) - 1);
    return static_cast<int>(taken & 0xFFFFFFFFu);
  }

 private:
  __device__ static unsigned long long earlier(unsigned long long a, unsigned long long b) {
    return a < b ? a : b;
  }
  __device__ void advance(uint64_t taken, int owner) {
    const int lane = threadIdx.x % 32, first = threadIdx.x - lane + owner;
    unsigned long long best = ~0ull;
    for (int i = first + lane * kThreads; i < n_; i += 32 * kThreads)
      if (const uint64_t key = order_key(x_[i], i); key > taken) best = earlier(best, key);
    for (int offset = 16; offset > 0; offset /= 2) best = earlier(best, __shfl_xor_sync(~0u, best, offset));
    if (lane == owner) next_ = best;
  }

  const float* x_;
  int n_;
  unsigned long long next_ = ~0ull;
};

__device__ void score(const float* x, int n, int id, int top, TokenScore& out) {
  const float max = x[row_max(x, 0, n).id()];
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
  if (top == 0) return;
  InOrder order(x, n);
  for (int k = 0; k < min(top, min(n, kMaxTopLogprobs)); ++k) {
    const int at = order.take();
    if (threadIdx.x != 0) continue;
    out.top_ids[k] = at;
    out.top_logprobs[k] = logprob(x[at]);
  }
}

__device__ void accept(const SlotArrays& slots, int slot, int id) {
  slots.newest[slot] = id;
  ++slots.num_outputs[slot];
  if (slots.params[slot].penalties == 0 || !slots.is_mine(slot)) return;
  slots.seen[slots.kept(slot) * slots.bit_words() + id / 32] |= 1u << (id % 32);
  uint32_t& word = slots.counts[slots.kept(slot) * slots.count_words() + id / 2];
  const int shift = id % 2 * 16;
  if ((word >> shift & 0xFFFFu) != 0xFFFFu) word += 1u << shift;
}

// One row that is sampled here, whole or this rank's share of it.
struct Sample {
  int slot;
  const SlotParams& params;
  const float* logits;
  const uint32_t* mask;
  bool adjusted;   // whether x is a copy that adjust() made
  const float* x;  // what is chosen from
  RowScratch& scratch;
  int vocab;
};

__device__ bool is_sampled_here(const SampleRecord& record, const SlotArrays& slots) {
  return record.slot >= 0 && (record.rank == kEveryRank || record.rank == slots.rank);
}

__device__ Sample sample_of(const SampleCall& call, const SlotArrays& slots, int index) {
  const SampleRecord record = call.samples[index];
  const SlotParams& p = slots.params[record.slot];
  const bool share = record.rank == kEveryRank;
  const int vocab = share ? slots.vocab / slots.ranks : slots.vocab;
  const float* logits = (share ? call.shares : call.logits) + static_cast<int64_t>(record.logit_row) * vocab;
  const uint32_t* mask = record.mask_row < 0 ? nullptr : call.masks + record.mask_row * slots.bit_words();
  const bool adjusted = !share && (p.num_bias > 0 || mask != nullptr || p.penalties != 0 ||
                                   slots.num_outputs[record.slot] < p.min_tokens);
  return {record.slot,
          p,
          logits,
          mask,
          adjusted,
          adjusted ? call.work + slots.kept(record.slot) * slots.vocab : logits,
          static_cast<RowScratch*>(call.scratch)[index],
          vocab};
}

// Of all slices. Every block of the grid has written its own.
__device__ RowMax joined_max(const Sample& sample, int slices) {
  RowMax max = sample.scratch.slices[0];
  for (int i = 1; i < slices; ++i) {
    const RowMax other = sample.scratch.slices[i];
    max = {other.key < max.key ? other.key : max.key, max.good && other.good};
  }
  return max;
}

// Whether there is anything to choose from a whole row.
__device__ bool has_choice(const Sample& sample, const RowMax& max) {
  return max.good && sample.x[max.id()] >= -FLT_MAX;
}

__device__ Row row_of(const Sample& sample, const RowMax& max) {
  return {sample.x, sample.vocab, sample.x[max.id()], 1.0f / fminf(sample.params.temperature, kMaxTemperature)};
}

// The values that are chosen from, and their maximum; the bins empty.
__global__ __launch_bounds__(kThreads) void prepare_kernel(SampleCall call, SlotArrays slots) {
  dependency_wait();
  dependency_trigger();
  if (!is_sampled_here(call.samples[blockIdx.y], slots)) return;
  const Sample sample = sample_of(call, slots, blockIdx.y);
  const Slice slice = my_slice(sample.vocab);
  RowMax max = row_max(sample.logits, slice.first, slice.end);
  if (sample.adjusted) {
    adjust(sample.logits, sample.mask, slots, sample.slot, slice, call.work + slots.kept(sample.slot) * slots.vocab);
    const RowMax adjusted = row_max(sample.x, slice.first, slice.end);
    max = {adjusted.key, max.good && adjusted.good};
  }
  RowBins& bins = sample.scratch.bins;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < kBins; i += gridDim.x * kThreads) {
    bins.mass[i] = 0;
    bins.count[i] = 0;
  }
  if (threadIdx.x == 0) sample.scratch.slices[blockIdx.x] = max;
}

// Coarse bins of the rows that are not greedy.
__global__ __launch_bounds__(kThreads) void count_bins_kernel(SampleCall call, SlotArrays slots) {
  __shared__ OrderScratch bins;
  dependency_wait();
  dependency_trigger();
  if (!is_sampled_here(call.samples[blockIdx.y], slots)) return;
  const Sample sample = sample_of(call, slots, blockIdx.y);
  if (sample.params.temperature < kMinTemperature) return;
  const RowMax max = joined_max(sample, gridDim.x);
  if (!has_choice(sample, max)) return;
  const Row row = row_of(sample, max);
  const Slice slice = my_slice(sample.vocab);
  bins.clear();
  __syncthreads();
#pragma unroll 4
  for (int i = slice.first + threadIdx.x; i < slice.end; i += kThreads)
    if (row.open(i)) bins.add(row.coarse_bin(i), row.mass(i));
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (bins.count[i] == 0) continue;
    atomicAdd(&sample.scratch.bins.mass[i], bins.mass(i));
    atomicAdd(&sample.scratch.bins.count[i], bins.count[i]);
  }
}

__device__ int draw(const Row& row, const RowBins& coarse, OrderScratch& scratch, const SlotParams& p, float uniform) {
  Mass kept = block_sum(coarse.mass[2 * threadIdx.x] + coarse.mass[2 * threadIdx.x + 1]);
  const unsigned all = ~0u;
  const unsigned top_k = p.top_k > 0 ? static_cast<unsigned>(p.top_k) : all;
  if (top_k != all && p.top_k < row.n) {
    const Walked walked = walk(row, coarse, scratch, ~0ull, top_k);
    if (walked.id >= 0) kept = walked.mass;
  }
  if (p.top_p < 1.0f) {
    const Mass wanted = static_cast<Mass>(static_cast<double>(kept) * p.top_p);
    const Walked walked = walk(row, coarse, scratch, wanted > 0 ? wanted : 1, top_k);
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
  const Walked drawn = walk(row, coarse, scratch, static_cast<Mass>(static_cast<double>(kept) * uniform) + 1, all);
  return drawn.id < 0 ? 0 : drawn.id;
}

__global__ __launch_bounds__(kThreads) void choose_kernel(SampleCall call, SlotArrays slots, int slices) {
  __shared__ OrderScratch scratch;
  dependency_wait();
  dependency_trigger();
  const SampleRecord record = call.samples[blockIdx.x];
  if (!is_sampled_here(record, slots)) return;
  const Sample sample = sample_of(call, slots, blockIdx.x);
  const SlotParams p = sample.params;
  const RowMax max = joined_max(sample, slices);
  if (record.rank == kEveryRank) {
    if (threadIdx.x == 0)
      call.picks[blockIdx.x] = {
          .logit = sample.x[max.id()], .id = slots.rank * sample.vocab + max.id(), .finite = max.good};
    return;
  }
  SampleResult& result = call.results[blockIdx.x];
  const bool finite = has_choice(sample, max);
  int id = 0;
  if (finite) {
    if (p.temperature < kMinTemperature) {
      id = max.id();
    } else {
      const auto outputs = static_cast<uint64_t>(slots.num_outputs[sample.slot]);
      id = draw(row_of(sample, max), sample.scratch.bins, scratch, p, random_unit(p.random_key, outputs));
    }
    if (p.logprobs >= 0) score(sample.logits, slots.vocab, id, p.logprobs, result.score);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (call.picks != nullptr) {
    call.picks[blockIdx.x] = {.logit = 0, .id = id, .finite = finite};
    return;
  }
  result.id = id;
  result.finite = finite;
  accept(slots, sample.slot, id);
}

constexpr int kAcceptThreads = 64;

// A thread has one row. Shares of the vocabulary ascend with the ranks, so a tie goes to the lower id.
__global__ __launch_bounds__(kAcceptThreads) void accept_kernel(SampleCall call, const Pick* all_picks,
                                                                SlotArrays slots) {
  dependency_wait();
  dependency_trigger();
  const int row = static_cast<int>(blockIdx.x) * kAcceptThreads + static_cast<int>(threadIdx.x);
  if (row >= call.count || call.samples[row].slot < 0) return;
  const SampleRecord record = call.samples[row];
  Pick pick = all_picks[max(record.rank, 0) * call.count + row];
  if (record.rank == kEveryRank) {
    for (int rank = 1; rank < slots.ranks; ++rank) {
      const Pick other = all_picks[rank * call.count + row];
      const int finite = pick.finite & other.finite;
      if (other.logit > pick.logit) pick = other;
      pick.finite = finite;
    }
    if (!(pick.logit >= -FLT_MAX)) pick.finite = 0;
    if (pick.finite == 0) pick.id = 0;
  }
  call.results[row].id = pick.id;
  call.results[row].finite = pick.finite;
  accept(slots, record.slot, pick.id);
}

__global__ __launch_bounds__(kThreads) void score_kernel(const ScoreRecord* records, const float* logits, int vocab,
                                                         TokenScore* results) {
  const ScoreRecord record = records[blockIdx.x];
  score(logits + static_cast<int64_t>(record.logit_row) * vocab, vocab, record.id, record.top, results[blockIdx.x]);
}

}  // namespace

int64_t sample_scratch_bytes(int64_t rows) {
  return rows * static_cast<int64_t>(sizeof(RowScratch));
}

cudaError_t sample_rows(const SampleCall& call, const SlotArrays& slots, cudaStream_t stream) {
  if (call.count == 0) return cudaSuccess;
  const int slices = std::clamp(kBlocks / call.count, 1, kMaxSlices);
  const LaunchShape sliced{.grid = dim3(static_cast<unsigned>(slices), static_cast<unsigned>(call.count)),
                           .block = dim3(kThreads),
                           .stream = stream};
  LaunchShape whole = sliced;
  whole.grid = dim3(static_cast<unsigned>(call.count));
  if (const cudaError_t error = launch(prepare_kernel, sliced, call, slots); error != cudaSuccess) return error;
  if (const cudaError_t error = launch(count_bins_kernel, sliced, call, slots); error != cudaSuccess) return error;
  return launch(choose_kernel, whole, call, slots, slices);
}

cudaError_t accept_picks(const SampleCall& call, const Pick* all_picks, const SlotArrays& slots, cudaStream_t stream) {
  if (call.count == 0) return cudaSuccess;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((call.count + kAcceptThreads - 1) / kAcceptThreads)),
                          .block = dim3(kAcceptThreads),
                          .stream = stream};
  return launch(accept_kernel, shape, call, all_picks, slots);
}

cudaError_t score_rows(const ScoreRecord* records, int32_t count, const float* logits, int32_t vocab,
                       TokenScore* results, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  score_kernel<<<count, kThreads, 0, stream>>>(records, logits, vocab, results);
  return cudaGetLastError();
}

cudaError_t load_sampling_kernels() {
  cudaFuncAttributes unused;
  cudaError_t error = cudaFuncGetAttributes(&unused, score_kernel);
  for (const auto kernel : {prepare_kernel, count_bins_kernel})
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&unused, kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&unused, accept_kernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&unused, choose_kernel) : error;
}

}  // namespace perigee
