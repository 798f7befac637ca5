#include "exec/cuda/slot_blocks.cuh"
#include "exec/cuda/step_kernels.h"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kCopyBytes = 16384;  // of a page, by one block

__global__ void apply_kernel(PlanArrays plan, SlotArrays slots) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  for (int i = first; i < plan.num_starts; i += stride) {
    const StartRecord& start = plan.starts[i];
    slots.newest[start.slot] = start.newest;
    if (slots.drafts != nullptr) slots.drafts[start.slot * kMaxDrafts] = -1;
    if (slots.num_known != nullptr) slots.num_known[start.slot] = start.num_tokens;
    slots.length[start.slot] = start.length;
    slots.num_outputs[start.slot] = start.num_outputs;
    slots.committed[start.slot] = start.length;
    slots.params[start.slot] = start.params;
  }
  for (int i = first; i < plan.num_appends; i += stride) {
    const AppendRecord append = plan.appends[i];
    const int64_t first_block = static_cast<int64_t>(append.slot) * slots.max_blocks;
    if (slots.draft_tables != nullptr) slots.draft_tables[first_block + append.block] = append.draft_block;
    if (append.index < 0) continue;
    slots.block_tables[first_block + append.index] = append.page;
    if (slots.block_index != nullptr) slots.block_index[first_block + append.index] = append.block;
  }
}

// Block (x, y): piece y of page x % width of start x / width.
__global__ void start_state_kernel(PlanArrays plan, SlotArrays slots, RawPages pool) {
  const int width = slots.state_width, start = blockIdx.x / width, i = blockIdx.x % width;
  const int32_t* pages = plan.start_pages + static_cast<int64_t>(start) * 2 * width;
  const int to = pages[i], from = pages[width + i];
  if (blockIdx.y == 0 && threadIdx.x == 0)
    slots.state_tables[static_cast<int64_t>(plan.starts[start].slot) * width + i] = to;
  auto* out = reinterpret_cast<uint4*>(pool.base + to * pool.page_bytes);
  const auto* in = reinterpret_cast<const uint4*>(pool.base + from * pool.page_bytes);
  const int64_t begin = blockIdx.y * kCopyBytes, end = min(begin + kCopyBytes, pool.page_bytes);
  for (int64_t k = begin / 16 + threadIdx.x; k < end / 16; k += kThreads) out[k] = from < 0 ? uint4() : in[k];
}

// What a recurrent model needs of sequence s, whose new rows take it from `position` to `length`.
__device__ void build_state(const PlanArrays& plan, const SlotArrays& slots, const BatchArrays& batch, int s,
                            int position, int length) {
  const RowRecord row = plan.rows[s];
  const int width = slots.state_width;
  const int32_t* state = slots.state_tables + static_cast<int64_t>(row.slot) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    batch.state_pages[static_cast<int64_t>(s) * width + i] = state[i];
  const int64_t first_page = static_cast<int64_t>(row.first_checkpoint) * width;
  for (int i = threadIdx.x; i < row.num_checkpoints * width; i += blockDim.x)
    batch.checkpoint_pages[first_page + i] = plan.checkpoint_pages[first_page + i];
  for (int i = threadIdx.x; i < row.num_checkpoints; i += blockDim.x)
    batch.checkpoint_position[row.first_checkpoint + i] = plan.checkpoint_positions[row.first_checkpoint + i];
  if (threadIdx.x != 0) return;
  const int commit = row.commit_all != 0 ? length : position;
  batch.slots[s] = row.slot;
  batch.committed[s] = slots.committed[row.slot];
  batch.commit[s] = commit;
  batch.first_checkpoint[s] = row.first_checkpoint;
  batch.first_checkpoint[s + 1] = row.first_checkpoint + row.num_checkpoints;  // the next one's, if there is a next
  slots.committed[row.slot] = commit;
}

// `width` rows of sequence s that is none.
__device__ void build_padding(const PlanArrays& plan, const BatchArrays& batch, int s, int width) {
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const int row = s * width + i;
    batch.tokens[row] = batch.positions[row] = batch.row_page[row] = -1;
    if (batch.draft_row_page != nullptr) batch.draft_row_page[row] = -1;
    batch.row_sequence[row] = s;
  }
  for (int i = threadIdx.x; i < batch.places; i += blockDim.x) {
    const int at = s * batch.places + i;
    batch.samples[at] = {.slot = -1, .logit_row = at, .mask_row = -1, .rank = 0};
    batch.sampled_by[at] = -1;
  }
  if (threadIdx.x != 0) return;
  batch.lengths[s] = 0;
  if (batch.local_blocks != nullptr) batch.local_blocks[s] = 0;
  batch.first_row[s] = s * width;
  batch.first_row[s + 1] = (s + 1) * width;
  batch.slots[s] = batch.committed[s] = batch.commit[s] = 0;
  batch.first_checkpoint[s] = batch.first_checkpoint[s + 1] = plan.num_checkpoints;
  if (batch.places == 1) return;
  batch.next_token[s] = -1;
  batch.chunk_tokens[s] = batch.num_blocks[s] = batch.blocks_here[s] = 0;
}

// Token i of a row, whose drafts the slot has. Padding repeats the newest token, which no new expert is needed for.
__device__ int token_of(const PlanArrays& plan, const SlotArrays& slots, const RowRecord& row, int i) {
  if (row.tokens_offset >= 0) return plan.tokens[row.tokens_offset + i];
  const int* drafts = slots.drafts + static_cast<int64_t>(row.slot) * kMaxDrafts;
  for (int k = 0; k < i; ++k)
    if (i >= row.num_tokens || drafts[k] < 0) return slots.newest[row.slot];
  return i == 0 ? slots.newest[row.slot] : drafts[i - 1];
}

__device__ void build_samples(const PlanArrays& plan, const BatchArrays& batch, int s) {
  for (int i = threadIdx.x; i < batch.places; i += blockDim.x) {
    const int at = s * batch.places + i;
    const SampleRecord sample = plan.samples[at];
    batch.samples[at] = sample;
    batch.sampled_by[at] = sample.slot < 0 ? -1 : sample.rank;
  }
}

// Where a draft with a cache of its own has the sequence's tokens, of its rows and of all; see build_kernel.
__device__ void build_draft_blocks(const SlotArrays& slots, const BatchArrays& batch, const RowRecord& row, int s,
                                   int position, int num_tokens) {
  const int32_t* blocks = slots.draft_tables + static_cast<int64_t>(row.slot) * slots.max_blocks;
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
    const int block = (position + i) / 64;
    batch.draft_row_page[row.first_row + i] = block < row.num_blocks ? blocks[block] : -1;
  }
  const int end = min(max((position + num_tokens + 63) / 64, row.num_blocks), slots.max_blocks);
  for (int i = threadIdx.x; i < end; i += blockDim.x)
    batch.draft_tables[static_cast<int64_t>(s) * slots.max_blocks + i] = blocks[i < row.num_blocks ? i : 0];
}

// One block a sequence.
__global__ void build_kernel(PlanArrays plan, SlotArrays slots, BatchArrays batch) {
  const int s = blockIdx.x;
  if (s >= plan.num_rows) return build_padding(plan, batch, s, plan.width > 0 ? plan.width : 1);
  const RowRecord row = plan.rows[s];
  const int position = slots.length[row.slot], num_tokens = plan.width > 0 ? plan.width : row.num_tokens;
  const int64_t of_slot = static_cast<int64_t>(row.slot) * slots.max_blocks;
  const BlocksHere blocks{slots.block_tables + of_slot, slots.block_index ? slots.block_index + of_slot : nullptr,
                          row.blocks_here};
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
    batch.tokens[row.first_row + i] = token_of(plan, slots, row, i);
    batch.positions[row.first_row + i] = position + i;
    batch.row_sequence[row.first_row + i] = s;
    const int block = (position + i) / 64;
    batch.row_page[row.first_row + i] = block < row.num_blocks ? blocks.page(block) : -1;
  }
  const int length = position + num_tokens;
  const int num_blocks = blocks.before((length + 63) / 64);
  // All that there are, as drafters go beyond the length. Attention may read whatever lies before the length, so
  // padding is stored like drafts that are wrong; where it goes beyond the sequence's blocks it reads one that is full.
  const int table_end = min(max(num_blocks, row.blocks_here), slots.max_blocks);
  for (int i = threadIdx.x; i < table_end; i += blockDim.x) {
    const int64_t at = static_cast<int64_t>(s) * slots.max_blocks + i;
    batch.block_tables[at] = blocks.pages[i < row.blocks_here ? i : 0];
    if (blocks.index != nullptr) batch.block_index[at] = blocks.index[i];
  }
  if (slots.draft_tables != nullptr) build_draft_blocks(slots, batch, row, s, position, num_tokens);
  build_samples(plan, batch, s);
  if (slots.state_width > 0) build_state(plan, slots, batch, s, position, length);
  __syncthreads();
  if (threadIdx.x != 0) return;
  batch.first_row[s] = row.first_row;
  if (s == plan.num_rows - 1) batch.first_row[s + 1] = row.first_row + num_tokens;
  batch.lengths[s] = length;
  if (batch.local_blocks != nullptr) batch.local_blocks[s] = num_blocks;
  const bool chunk = row.tokens_offset >= 0;
  slots.length[row.slot] = chunk ? length : position + 1;
  if (batch.places == 1) return;
  batch.next_token[s] = row.next_token;
  batch.chunk_tokens[s] = chunk ? num_tokens : 0;
  batch.num_blocks[s] = row.num_blocks;
  batch.blocks_here[s] = row.blocks_here;
}

// Adds 1 to a half of the word, unless it is full; as accept() of sampling_kernels.cu.
__device__ void count_one(uint32_t* word, int shift) {
  for (uint32_t now = *word; (now >> shift & 0xFFFFu) != 0xFFFFu;) {
    const uint32_t found = atomicCAS(word, now, now + (1u << shift));
    if (found == now) return;
    now = found;
  }
}

__global__ void count_kernel(uint32_t* counts, uint32_t* seen, int64_t count_words, int64_t bit_words,
                             const int32_t* tokens, int32_t num_tokens, int32_t num_prompt) {
  for (int64_t i = threadIdx.x; i < count_words; i += blockDim.x) counts[i] = 0;
  for (int64_t i = threadIdx.x; i < bit_words; i += blockDim.x) seen[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
    const int id = tokens[i];
    atomicOr(&seen[id / 32], 1u << (id % 32));
    if (i >= num_prompt) count_one(&counts[id / 2], id % 2 * 16);
  }
}

__global__ void trap_kernel() {
  asm volatile("trap;");
}

}  // namespace

cudaError_t break_device(cudaStream_t stream) {
  trap_kernel<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

cudaError_t start_states(const PlanArrays& plan, const SlotArrays& slots, const RawPages& pool, cudaStream_t stream) {
  if (plan.num_starts == 0 || slots.state_width == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(plan.num_starts * slots.state_width),
                  static_cast<unsigned>((pool.page_bytes + kCopyBytes - 1) / kCopyBytes));
  start_state_kernel<<<grid, kThreads, 0, stream>>>(plan, slots, pool);
  return cudaGetLastError();
}

cudaError_t apply_deltas(const PlanArrays& plan, const SlotArrays& slots, cudaStream_t stream) {
  const int count = plan.num_starts > plan.num_appends ? plan.num_starts : plan.num_appends;
  if (count == 0) return cudaSuccess;
  apply_kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(plan, slots);
  return cudaGetLastError();
}

cudaError_t build_batch(const PlanArrays& plan, const SlotArrays& slots, const BatchArrays& batch, int32_t padded_rows,
                        cudaStream_t stream) {
  build_kernel<<<padded_rows, kThreads, 0, stream>>>(plan, slots, batch);
  return cudaGetLastError();
}

cudaError_t count_tokens(const SlotArrays& slots, int32_t slot, const int32_t* tokens, int32_t num_tokens,
                         int32_t num_prompt, cudaStream_t stream) {
  const int64_t kept = slots.kept(slot);
  count_kernel<<<1, 1024, 0, stream>>>(slots.counts + kept * slots.count_words(), slots.seen + kept * slots.bit_words(),
                                       slots.count_words(), slots.bit_words(), tokens, num_tokens, num_prompt);
  return cudaGetLastError();
}

cudaError_t load_step_kernels() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(apply_kernel), reinterpret_cast<const void*>(build_kernel),
        reinterpret_cast<const void*>(count_kernel), reinterpret_cast<const void*>(start_state_kernel)}) {
    cudaFuncAttributes unused;
    if (const cudaError_t error = cudaFuncGetAttributes(&unused, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace perigee
