#include <cfloat>

#include "exec/cuda/draft_kernels.h"
#include "exec/cuda/row_max.cuh"
#include "exec/cuda/slot_blocks.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kLookupThreads = 1024;

// How many tokens before `end` are the last ones of all.
__device__ int match_before(const int32_t* tokens, int count, int end, int most) {
  int length = 0;
  while (length < most && length < end && tokens[end - 1 - length] == tokens[count - 1 - length]) ++length;
  return length;
}

// One block a sequence.
__global__ __launch_bounds__(kLookupThreads) void lookup_kernel(SlotArrays slots, BatchArrays batch, NgramMatch match) {
  __shared__ unsigned long long best;  // the longest match; of equal ones the one that ends last
  if (threadIdx.x == 0) best = 0;
  dependency_wait();
  dependency_trigger();
  __syncthreads();
  const int slot = batch.samples[blockIdx.x * batch.places].slot;
  if (slot < 0) return;
  const int32_t* tokens = slots.history + static_cast<int64_t>(slot) * slots.max_history;
  const int count = slots.num_known[slot];
  unsigned long long found = 0;
  for (int end = count - 1 - static_cast<int>(threadIdx.x); end > 0; end -= kLookupThreads) {
    const int length = match_before(tokens, count, end, match.most);
    const auto key = static_cast<unsigned long long>(length) << 32 | static_cast<unsigned>(end);
    if (length >= match.least && key > found) found = key;
  }
  if (found > 0) atomicMax(&best, found);
  __syncthreads();
  const int end = static_cast<int>(best & 0xFFFFFFFFu), draft = static_cast<int>(threadIdx.x);
  if (draft + 1 >= batch.places) return;
  // A match that reaches the end goes on in the draft.
  slots.drafts[slot * kMaxDrafts + draft] = end == 0 ? -1 : tokens[end + draft % (count - end)];
}

// Row i of the step is followed by row i + 1, the last certain one by `next`. -> how many rows are certain.
__device__ int first_pass(const SlotArrays& slots, const BatchArrays& batch, const DraftPasses& passes, int s) {
  const int slot = batch.samples[s * batch.places].slot, chunk = batch.chunk_tokens[s];
  const int first = batch.first_row[s], count = batch.first_row[s + 1] - first;
  const int kept = chunk > 0 ? chunk : slots.length[slot] - (batch.lengths[s] - count);
  const int next = slot >= 0 ? slots.newest[slot] : batch.next_token[s];
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    passes.first_tokens[first + i] = i + 1 < kept ? batch.tokens[first + i + 1] : next;
  if (threadIdx.x == 0) passes.last_rows[s] = first + kept - 1;
  return kept;
}

constexpr int kPassThreads = 128;

// One block a sequence.
__global__ __launch_bounds__(kPassThreads) void begin_kernel(SlotArrays slots, BatchArrays batch, DraftPasses passes) {
  dependency_wait();
  dependency_trigger();
  const int s = blockIdx.x, first = batch.first_row[s], count = batch.first_row[s + 1] - first;
  const bool padding = batch.lengths[s] == 0, drafts = batch.samples[s * batch.places].slot >= 0;
  if (threadIdx.x == 0) passes.largest[s] = ~0ull;
  int length = 0;  // of what is certain
  if (padding) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) passes.first_tokens[first + i] = -1;
    if (threadIdx.x == 0) passes.last_rows[s] = first;
  } else {
    length = batch.lengths[s] - count + first_pass(slots, batch, passes, s);
  }
  const int pass = 1 + static_cast<int>(threadIdx.x);
  if (pass >= passes.num_drafts) return;
  const int64_t table = static_cast<int64_t>(s) * slots.max_blocks;
  const bool own = batch.draft_tables != nullptr, shared = batch.block_index != nullptr && !own;
  const BlocksHere blocks{own ? batch.draft_tables + table : batch.block_tables + table,
                          shared ? batch.block_index + table : nullptr, batch.blocks_here[s]};
  const int position = length + pass - 1, at = pass * passes.slots + s;
  const bool runs = drafts && position < batch.num_blocks[s] * 64;
  passes.tokens[at] = -1;
  passes.positions[at] = runs ? position : -1;
  passes.lengths[at] = runs ? position + 1 : 0;
  passes.row_page[at] = runs ? blocks.page(position / 64) : -1;
  if (shared) passes.local_blocks[at] = runs ? blocks.before((position + 64) / 64) : 0;
}

// Draft `pass` of sequence s, and with it the token of the next pass.
__device__ void set_draft(const SlotArrays& slots, const BatchArrays& batch, int pass, const DraftPasses& passes, int s,
                          int id) {
  passes.largest[s] = ~0ull;
  if (passes.target_ids != nullptr) id = passes.target_ids[id];
  const int slot = batch.samples[s * batch.places].slot;
  if (slot < 0) return;
  const bool ran = pass == 0 || passes.lengths[pass * passes.slots + s] > 0;
  slots.drafts[slot * kMaxDrafts + pass] = ran ? id : -1;
  if (pass + 1 == passes.num_drafts) return;
  const int next = (pass + 1) * passes.slots + s;
  if (passes.lengths[next] > 0) passes.tokens[next] = id;
}

// Several blocks a row.
__global__ __launch_bounds__(kSamplingThreads) void largest_kernel(Tensor logits, DraftPasses passes) {
  dependency_wait();
  dependency_trigger();
  const Slice slice = my_slice(static_cast<int>(logits.cols));
  const RowMax max = row_max(logits.row<const float>(blockIdx.y), slice.first, slice.end);
  if (threadIdx.x == 0) atomicMin(&passes.largest[blockIdx.y], static_cast<unsigned long long>(max.key));
}

// A thread has one sequence.
__global__ void take_kernel(Tensor logits, SlotArrays slots, BatchArrays batch, int pass, DraftPasses passes) {
  dependency_wait();
  dependency_trigger();
  const int s = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (s >= logits.rows) return;
  const int id = static_cast<int>(passes.largest[s] & 0xFFFFFFFFu);
  if (slots.ranks == 1) return set_draft(slots, batch, pass, passes, s, id);
  passes.picks[s] = {
      .logit = logits.row<const float>(s)[id], .id = slots.rank * static_cast<int>(logits.cols) + id, .finite = 1};
}

__global__ void agree_kernel(SlotArrays slots, BatchArrays batch, int rows, int pass, DraftPasses passes) {
  dependency_wait();
  dependency_trigger();
  const int s = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (s >= rows) return;
  Pick best = passes.all_picks[s];
  for (int rank = 1; rank < slots.ranks; ++rank)
    if (const Pick other = passes.all_picks[rank * rows + s]; other.logit > best.logit) best = other;
  set_draft(slots, batch, pass, passes, s, best.id);
}

LaunchShape one_each(int32_t rows, cudaStream_t stream) {
  constexpr int kThreads = 64;
  return {
      .grid = dim3(static_cast<unsigned>((rows + kThreads - 1) / kThreads)), .block = dim3(kThreads), .stream = stream};
}

}  // namespace

cudaError_t begin_passes(const SlotArrays& slots, const BatchArrays& batch, int32_t rows, const DraftPasses& passes,
                         cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kPassThreads), .stream = stream};
  return launch(begin_kernel, shape, slots, batch, passes);
}

cudaError_t guess_drafts(const Tensor& logits, const SlotArrays& slots, const BatchArrays& batch, int32_t pass,
                         const DraftPasses& passes, cudaStream_t stream) {
  const auto rows = static_cast<int32_t>(logits.rows);
  const LaunchShape sliced{.grid = dim3(static_cast<unsigned>(num_slices(rows)), static_cast<unsigned>(rows)),
                           .block = dim3(kSamplingThreads),
                           .stream = stream};
  if (const cudaError_t error = launch(largest_kernel, sliced, logits, passes); error != cudaSuccess) return error;
  return launch(take_kernel, one_each(rows, stream), logits, slots, batch, pass, passes);
}

cudaError_t agree_on_drafts(const SlotArrays& slots, const BatchArrays& batch, int32_t rows, int32_t pass,
                            const DraftPasses& passes, cudaStream_t stream) {
  return launch(agree_kernel, one_each(rows, stream), slots, batch, rows, pass, passes);
}

cudaError_t look_up_drafts(const SlotArrays& slots, const BatchArrays& batch, int32_t rows, NgramMatch match,
                           cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kLookupThreads), .stream = stream};
  return launch(lookup_kernel, shape, slots, batch, match);
}

cudaError_t load_draft_kernels() {
  for (const void* kernel : {reinterpret_cast<const void*>(lookup_kernel), reinterpret_cast<const void*>(begin_kernel),
                             reinterpret_cast<const void*>(largest_kernel), reinterpret_cast<const void*>(take_kernel),
                             reinterpret_cast<const void*>(agree_kernel)}) {
    cudaFuncAttributes unused;
    if (const cudaError_t error = cudaFuncGetAttributes(&unused, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace perigee
