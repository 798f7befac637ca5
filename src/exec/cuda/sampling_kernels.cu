#include <algorithm>
#include <cfloat>

#include "base/rng.h"
#include "exec/cuda/row_max.cuh"
#include "exec/cuda/sampling_kernels.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kThreads = kSamplingThreads;
constexpr float kMinTemperature = 1e-5f;  // as exec/sampler.cc: below, the distribution has collapsed
constexpr float kMaxTemperature = 1e30f;

// What the kernels tell one another of a row.
struct RowScratch {
  RowMax slices[kMaxSlices];
  RowBins bins;
};

// logit_bias, mask, min_tokens and penalties, in that order, on a copy of the slice. After `place` drafts, which count
// like sampled ids.
__device__ void adjust(const float* logits, const uint32_t* mask, const SlotArrays& slots, int slot, int place,
                       const Slice& slice, float* work) {
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
  if (slots.num_outputs[slot] + place < p.min_tokens)
    for (int i = threadIdx.x; i < p.num_stops; i += kThreads)
      if (const int id = ids[p.num_bias + i]; is_mine(id)) work[id] = -INFINITY;
  __syncthreads();
  if (p.penalties == 0) return;
  const uint32_t* seen = slots.seen + slots.kept(slot) * slots.bit_words();
  const uint32_t* counts = slots.counts + slots.kept(slot) * slots.count_words();
  const int32_t* drafts = place > 0 ? slots.drafts + static_cast<int64_t>(slot) * kMaxDrafts : nullptr;
  for (int i = slice.first + threadIdx.x; i < slice.end; i += kThreads) {
    float x = work[i];
    int drafted = 0;
    for (int k = 0; k < place; ++k) drafted += drafts[k] == i ? 1 : 0;
    if (drafted > 0 || (seen[i / 32] >> (i % 32) & 1u) != 0) x *= x > 0 ? 1.0f / p.repetition : p.repetition;
    const int counted = static_cast<int>(counts[i / 2] >> (i % 2 * 16) & 0xFFFFu);
    const auto count = static_cast<float>(min(counted + drafted, 0xFFFF));
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
  if (slots.history != nullptr && slots.num_known[slot] < slots.max_history)
    slots.history[static_cast<int64_t>(slot) * slots.max_history + slots.num_known[slot]++] = id;
  if (slots.params[slot].penalties == 0 || !slots.is_mine(slot)) return;
  slots.seen[slots.kept(slot) * slots.bit_words() + id / 32] |= 1u << (id % 32);
  uint32_t& word = slots.counts[slots.kept(slot) * slots.count_words() + id / 2];
  const int shift = id % 2 * 16;
  if ((word >> shift & 0xFFFFu) != 0xFFFFu) word += 1u << shift;
}

// One place of a row that is sampled here, whole or this rank's share of it.
struct Sample {
  int slot, place;
  const SlotParams& params;
  const float* logits;
  const uint32_t* mask;
  bool adjusted;   // whether x is a copy that adjust() made
  const float* x;  // what is chosen from
  RowScratch& scratch;
  int vocab;
};

// Nothing is sampled after a draft that there is not.
__device__ bool is_sampled_here(const SampleCall& call, const SlotArrays& slots, int index) {
  const SampleRecord record = call.samples[index];
  if (record.slot < 0 || (record.rank != kEveryRank && record.rank != slots.rank)) return false;
  const int32_t* drafts = slots.drafts + static_cast<int64_t>(record.slot) * kMaxDrafts;
  for (int k = 0; k < index % call.places; ++k)
    if (drafts[k] < 0) return false;
  return true;
}

__device__ float* work_of(const SampleCall& call, const SlotArrays& slots, int slot, int place) {
  return call.work + (slots.kept(slot) * call.places + place) * slots.vocab;
}

__device__ Sample sample_of(const SampleCall& call, const SlotArrays& slots, int index) {
  const SampleRecord record = call.samples[index];
  const SlotParams& p = slots.params[record.slot];
  const bool share = record.rank == kEveryRank;
  const int vocab = share ? slots.vocab / slots.ranks : slots.vocab;
  const float* logits = (share ? call.shares : call.logits) + static_cast<int64_t>(record.logit_row) * vocab;
  const uint32_t* mask = record.mask_row < 0 ? nullptr : call.masks + record.mask_row * slots.bit_words();
  const int place = index % call.places;
  const bool adjusted = !share && (p.num_bias > 0 || mask != nullptr || p.penalties != 0 ||
                                   slots.num_outputs[record.slot] + place < p.min_tokens);
  return {record.slot,
          place,
          p,
          logits,
          mask,
          adjusted,
          adjusted ? work_of(call, slots, record.slot, place) : logits,
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
  if (!is_sampled_here(call, slots, blockIdx.y)) return;
  const Sample sample = sample_of(call, slots, blockIdx.y);
  const Slice slice = my_slice(sample.vocab);
  RowMax max = row_max(sample.logits, slice.first, slice.end);
  if (sample.adjusted) {
    adjust(sample.logits, sample.mask, slots, sample.slot, sample.place, slice,
           work_of(call, slots, sample.slot, sample.place));
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
  if (!is_sampled_here(call, slots, blockIdx.y)) return;
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
  if (!is_sampled_here(call, slots, blockIdx.x)) return;
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
      const auto outputs = static_cast<uint64_t>(slots.num_outputs[sample.slot] + sample.place);
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

// What all ranks' picks of a place say. Shares of the vocabulary ascend with the ranks, so a tie goes to the lower id.
__device__ Pick agree(const SampleCall& call, const Pick* all_picks, int ranks, int index) {
  const SampleRecord record = call.samples[index];
  if (record.rank != kEveryRank) return all_picks[(ranks == 1 ? 0 : record.rank) * call.count + index];
  Pick pick = all_picks[index];
  for (int rank = 1; rank < ranks; ++rank) {
    const Pick other = all_picks[rank * call.count + index];
    const int finite = pick.finite & other.finite;
    if (other.logit > pick.logit) pick = other;
    pick.finite = finite;
  }
  if (!(pick.logit >= -FLT_MAX)) pick.finite = 0;
  if (pick.finite == 0) pick.id = 0;
  return pick;
}

// Whether the draft at this place is accepted where `id` is what is sampled; by chance where rates are given.
__device__ bool is_accepted(const SampleCall& call, const SlotParams& params, int num_outputs, int place, int draft,
                            int id) {
  if (call.synthetic.count == 0) return id == draft;
  constexpr uint64_t kDraws = 0x73796e7468657469;
  return random_unit(mix64(params.random_key ^ kDraws), static_cast<uint64_t>(num_outputs)) <
         call.synthetic.rates[place];
}

// A thread has one row, whose places it goes through up to the first id that is not its draft.
__global__ __launch_bounds__(kAcceptThreads) void accept_kernel(SampleCall call, const Pick* all_picks,
                                                                SlotArrays slots) {
  dependency_wait();
  dependency_trigger();
  const int row = static_cast<int>(blockIdx.x) * kAcceptThreads + static_cast<int>(threadIdx.x);
  const int first = row * call.places;
  if (first >= call.count || call.samples[first].slot < 0) return;
  const int slot = call.samples[first].slot;
  const int32_t* drafts = call.places > 1 ? slots.drafts + static_cast<int64_t>(slot) * kMaxDrafts : nullptr;
  int num_drafts = 0;
  while (num_drafts + 1 < call.places && call.samples[first + num_drafts + 1].slot >= 0 && drafts[num_drafts] >= 0)
    ++num_drafts;
  int place = 0;
  for (bool goes_on = true; goes_on; ++place) {
    Pick pick = agree(call, all_picks, slots.ranks, first + place);
    goes_on = pick.finite != 0 && place < num_drafts &&
              is_accepted(call, slots.params[slot], slots.num_outputs[slot], place, drafts[place], pick.id);
    if (goes_on) pick.id = drafts[place];
    call.results[first + place].id = pick.id;
    call.results[first + place].finite = pick.finite;
    accept(slots, slot, pick.id);
  }
  if (call.places == 1) return;
  slots.length[slot] += place - 1;
  call.outcomes[row] = {
      .num_ids = place, .num_drafts = num_drafts, .committed = call.committed[row], .position = call.commit[row]};
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
  const int slices = num_slices(call.count);
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
  const int rows = call.count / call.places;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((rows + kAcceptThreads - 1) / kAcceptThreads)),
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
