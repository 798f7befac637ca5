// The state of one head through the chunks of a prefill, one after the other; kKdaSlices blocks share its values. With
// S the state before a chunk and the matrices of KdaChunkData:
//   corrections = solve (v - k S),   out = q S + qk corrections,   S = decay S + end^T corrections.
// S is kept in f32, in registers; products read it as two bf16.
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 512;
constexpr int kTail = kKdaTaps - 1;
constexpr int kManyStages = 2;  // chunks under way and in use, where shared memory has room for them; else one
constexpr int kStageBytes = kKdaSharedBytes + kKdaSliceBytes;
constexpr int kRow128 = 256, kRow32 = 64;  // bytes of a row
static_assert(kStageBytes % 256 == 0 && kKdaSharedBytes % 256 == 0 && kKdaSlice == 32 && kKdaChunk == 32);

struct Split {
  uint16_t high[kKdaDim * kKdaSlice], low[kKdaDim * kKdaSlice];
};
struct SplitTokens {
  uint16_t high[kKdaChunk * kKdaSlice], low[kKdaChunk * kKdaSlice];
};
template <int kStages>
struct Shared {
  uint8_t stages[kStages][kStageBytes];
  Split state;
  SplitTokens errors, corrections;
};
constexpr uint32_t kLowOfState = sizeof(Split) / 2, kLowOfTokens = sizeof(SplitTokens) / 2;  // bytes from high to low
constexpr uint32_t kLowOf128 = kKdaChunk * kRow128, kLowOf32 = kKdaChunk * kRow32;

// Where a lane reads fragments, in bytes from the begin of a matrix that begins at a multiple of 256. Sixteen rows on,
// an address is larger by 16 rows; 8 n columns on, n even or a matrix of 32 columns, it differs by XOR with 16 n.
struct Lanes {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int row = lane / 4, column = lane % 4 * 2;  // of a fragment of sums

  __device__ uint32_t a128() const { return 2 * kda_at128(lane % 16, lane / 16 * 8); }
  __device__ uint32_t a128_transposed() const { return 2 * kda_at128(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8); }
  __device__ uint32_t a32() const { return 2 * kda_at32(lane % 16, lane / 16 * 8); }
  __device__ uint32_t b32() const { return 2 * kda_at32(lane % 16, lane / 16 * 8); }  // transposed: 16 x 16
};

__device__ void store_sums(uint16_t* high, uint16_t* low, int row, int column, const float (&sum)[4]) {
  store_split(high, low, kda_at32(row, column), sum[0], sum[1]);
  store_split(high, low, kda_at32(row + 8, column), sum[2], sum[3]);
}

struct Chunks {
  const KdaCall& call;
  const KdaPieces& pieces;
  const KdaPiece& piece;
  KdaRun run;
  int head, slice;

  __device__ KdaRange range(int index) const { return kda_chunk(run, piece.first_chunk + index); }
  // The piece's chunks that have tokens; they come first.
  __device__ int count() const { return min(piece.num_chunks, kda_num_chunks(run) - piece.first_chunk); }
  // By the upper half of the block's threads.
  __device__ void fetch(int index, uint8_t* stage) const {
    constexpr int kStep = kThreads / 2 * 16;
    const int at = threadIdx.x % (kThreads / 2) * 16;
    const auto* from =
        reinterpret_cast<const uint8_t*>(static_cast<const KdaChunkData*>(pieces.scratch) +
                                         static_cast<int64_t>(piece.first_slot + index) * call.heads + head);
    const uint32_t to = shared_address(stage) + at;
    const uint8_t* values = from + kKdaSharedBytes + slice * kKdaSliceBytes + at;
    from += at;
#pragma unroll
    for (int i = 0; i < kKdaSharedBytes; i += kStep)
      if (i + kStep <= kKdaSharedBytes || at < kKdaSharedBytes - i) copy_async16(to + i, from + i);
#pragma unroll
    for (int i = 0; i < kKdaSliceBytes; i += kStep) copy_async16(to + kKdaSharedBytes + i, values + i);
  }
};

// Sixteen keys of S by sixteen of the slice's values, a warp's, as fragments of sums.
struct State {
  float at[2][4];
  int key, value;  // first of the lane's

  __device__ explicit State(const Lanes& l) : key(l.warp / 2 * 16 + l.row), value(l.warp % 2 * 16 + l.column) {}
  __device__ float2* pair(float* unit, int slice, int n, int half) const {
    return reinterpret_cast<float2*>(unit + (key + 8 * half) * kKdaDim + slice * kKdaSlice + value + 8 * n);
  }
  __device__ void load(float* unit, int slice) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = *pair(unit, slice, n, half);
        at[n][2 * half] = x.x;
        at[n][2 * half + 1] = x.y;
      }
  }
  __device__ void store(float* unit, int slice) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) *pair(unit, slice, n, half) = {at[n][2 * half], at[n][2 * half + 1]};
  }
  __device__ void split(Split& to) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) store_sums(to.high, to.low, key, value + 8 * n, at[n]);
  }
  // S = decay S + end^T corrections
  __device__ void move(const Lanes& l, const float* decay, uint32_t end, uint32_t corrections) {
    const uint32_t a = (end + l.a128_transposed()) ^ (l.warp / 2 * 32);
    const uint32_t b = (corrections + l.b32()) ^ (l.warp % 2 * 32);
    const float first = decay[key], second = decay[key + 8];
    float rest[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      at[n][0] *= first, at[n][1] *= first;
      at[n][2] *= second, at[n][3] *= second;
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t high[4], low[4], b_high[4], b_low[4];
      load_matrix_x4_transposed(high, a + step * 16 * kRow128);
      load_matrix_x4_transposed(b_high, b + step * 16 * kRow32);
      load_matrix_x4_transposed(low, a + step * 16 * kRow128 + kLowOf128);
      load_matrix_x4_transposed(b_low, b + step * 16 * kRow32 + kLowOfTokens);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_16x8x16(Bf16(), at[n], high, b_high[2 * n], b_high[2 * n + 1]);
        mma_16x8x16(Bf16(), rest[n], high, b_low[2 * n], b_low[2 * n + 1]);
        mma_16x8x16(Bf16(), rest[n], low, b_high[2 * n], b_high[2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) at[n][i] += rest[n][i];
  }
};

// What sixteen rows of k (kLow) or q read of the state, by sixteen values; a and b are the lane's addresses.
template <bool kLow>
__device__ void read_state(uint32_t a, uint32_t b, float (&sum)[2][4]) {
  float rest[2][4] = {}, last[2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t high[4], b_high[4], b_low[4];
    load_matrix_x4(high, a ^ (32 * step));
    load_matrix_x4_transposed(b_high, b + step * 16 * kRow32);
    load_matrix_x4_transposed(b_low, b + step * 16 * kRow32 + kLowOfState);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_16x8x16(Bf16(), sum[n], high, b_high[2 * n], b_high[2 * n + 1]);
      mma_16x8x16(Bf16(), rest[n], high, b_low[2 * n], b_low[2 * n + 1]);
    }
    if constexpr (kLow) {
      uint32_t low[4];
      load_matrix_x4(low, (a ^ (32 * step)) + kLowOf128);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_16x8x16(Bf16(), last[n], low, b_high[2 * n], b_high[2 * n + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] += rest[n][i] + last[n][i];
}

// errors = v - k S of a warp's tile
__device__ void write_errors(const Lanes& l, const float* v, const float (&held)[2][4], int row, int column,
                             SplitTokens& out) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int c = column + 8 * n + l.column;
    const float2 first = *reinterpret_cast<const float2*>(v + kda_value_at(row + l.row, c));
    const float2 second = *reinterpret_cast<const float2*>(v + kda_value_at(row + l.row + 8, c));
    const float error[4] = {first.x - held[n][0], first.y - held[n][1], second.x - held[n][2], second.y - held[n][3]};
    store_sums(out.high, out.low, row + l.row, c, error);
  }
}

// corrections = solve errors, a tile of 16 x 16 a warp; a and b are the lane's addresses.
__device__ void correct(const Lanes& l, uint32_t a, uint32_t b, int row, int column, SplitTokens& out) {
  float sum[2][4] = {}, rest[2][4] = {}, last[2][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t high[4], low[4], b_high[4], b_low[4];
    load_matrix_x4(high, a ^ (32 * step));
    load_matrix_x4_transposed(b_high, b + step * 16 * kRow32);
    load_matrix_x4_transposed(b_low, b + step * 16 * kRow32 + kLowOfTokens);
    load_matrix_x4(low, (a ^ (32 * step)) + kLowOf32);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_16x8x16(Bf16(), sum[n], high, b_high[2 * n], b_high[2 * n + 1]);
      mma_16x8x16(Bf16(), rest[n], high, b_low[2 * n], b_low[2 * n + 1]);
      mma_16x8x16(Bf16(), last[n], low, b_high[2 * n], b_high[2 * n + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] += rest[n][i] + last[n][i];
    store_sums(out.high, out.low, row + l.row, column + 8 * n + l.column, sum[n]);
  }
}

// out = q S (in `sum`) + qk corrections, a tile of 16 x 16 a warp, into the rows of the chunk's tokens.
__device__ void write_out(const Chunks& c, KdaRange range, const Lanes& l, uint32_t a, uint32_t b, int row, int column,
                          float (&sum)[2][4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t high[4], b_high[4], b_low[4];
    load_matrix_x4(high, a ^ (32 * step));
    load_matrix_x4_transposed(b_high, b + step * 16 * kRow32);
    load_matrix_x4_transposed(b_low, b + step * 16 * kRow32 + kLowOfTokens);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_16x8x16(Bf16(), sum[n], high, b_low[2 * n], b_low[2 * n + 1]);
      mma_16x8x16(Bf16(), sum[n], high, b_high[2 * n], b_high[2 * n + 1]);
    }
  }
  const int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
  const int position = range.begin + row + l.row;
  float* to = c.pieces.out + (c.run.first_row + position - c.run.position) * width + c.head * kKdaDim +
              c.slice * kKdaSlice + column + l.column;
#pragma unroll
  for (int half = 0; half < 2; ++half, to += 8 * width) {
    if (position + 8 * half >= range.end) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) *reinterpret_cast<float2*>(to + 8 * n) = {sum[n][2 * half], sum[n][2 * half + 1]};
  }
}

// The convolution's last inputs before `position`, into `to`; `tail` holds those before the new tokens.
__device__ void write_tail(const Chunks& c, int position, const float* tail, float* to) {
  const int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
  for (int i = threadIdx.x; i < 3 * kKdaDim; i += kThreads) {
    const int part = i / kKdaDim, channel = i % kKdaDim;
    float x[kTail];
#pragma unroll
    for (int j = 0; j < kTail; ++j) {
      const int before = position - kTail + j - c.run.position;
      x[j] = before < 0 ? tail[(part * kTail + kTail + before) * kKdaDim + channel]
                        : c.call.qkv.row<float>(c.run.first_row + before)[part * width + c.head * kKdaDim + channel];
    }
#pragma unroll
    for (int j = 0; j < kTail; ++j) to[(part * kTail + j) * kKdaDim + channel] = x[j];
  }
}

// Four warps read the state with keys and solve, four read it with queries and give the output, eight fetch what comes
// next; all move the state.
template <int kStages>
__device__ void carry(const Chunks& c, Shared<kStages>& shared) {
  const Lanes l;
  const int count = c.count();
  if (count <= 0) return;
  const bool fetches = l.warp >= 8, reads_keys = l.warp < 4;
  if (fetches) c.fetch(0, shared.stages[0]);
  float* unit = kda_unit(c.call.state, c.call.sequences, c.piece.sequence, c.head);
  constexpr int kState = kKdaDim * kKdaDim;
  State state(l);
  state.load(unit, c.slice);
  state.split(shared.state);
  const int row = l.warp / 2 % 2 * 16, column = l.warp % 2 * 16;  // of the warp's tile of k S or q S
  const uint32_t b = l.b32() ^ (2 * column), a32 = row * kRow32 + l.a32(), a128 = row * kRow128 + l.a128();
  const uint32_t errors = shared_address(&shared.errors), corrections = shared_address(&shared.corrections);
  for (int index = 0; index < count; ++index) {
    const auto& data = *reinterpret_cast<const KdaChunkData*>(shared.stages[index % kStages]);
    if (fetches) copy_async_commit(), copy_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && fetches && index + 1 < count) c.fetch(index + 1, shared.stages[(index + 1) % kStages]);
    float sum[2][4] = {};
    if (reads_keys) {
      read_state<true>(shared_address(data.k_high) + a128, shared_address(&shared.state) + b, sum);
      write_errors(l, data.v[0], sum, row, column, shared.errors);
      named_barrier(1, 128);
      correct(l, shared_address(data.solve_high) + a32, errors + b, row, column, shared.corrections);
    } else if (!fetches) {
      read_state<false>(shared_address(data.q_high) + a128, shared_address(&shared.state) + b, sum);
    }
    __syncthreads();
    state.move(l, data.decay, shared_address(data.end_high), corrections);
    state.split(shared.state);
    const KdaRange range = c.range(index);
    if (!fetches && !reads_keys)
      write_out(c, range, l, shared_address(data.qk) + a32, corrections + b, row, column, sum);
    if (range.end == c.run.checkpoint) {
      float* checkpoint = kda_checkpoint_unit(c.call.state, c.call.sequences, c.piece.sequence, c.head);
      state.store(checkpoint, c.slice);
      if (c.slice == 0) write_tail(c, range.end, unit + kState, checkpoint + kState);
    }
    if (range.end == c.run.length && c.slice == 0) write_tail(c, range.end, unit + kState, unit + kState);
    if constexpr (kStages == 1) {
      __syncthreads();
      if (fetches && index + 1 < count) c.fetch(index + 1, shared.stages[0]);
    }
  }
  state.store(unit, c.slice);
}

template <int kStages>
__global__ __launch_bounds__(kThreads, 2) void carry_kernel(const __grid_constant__ KdaCall call,
                                                            const __grid_constant__ KdaPieces pieces) {
  extern __shared__ __align__(256) uint8_t memory[];
  dependency_wait();
  dependency_trigger();
  const KdaPiece& piece = pieces.pieces[blockIdx.y];
  const Chunks c{call,
                 pieces,
                 piece,
                 KdaRun(call.sequences, piece.sequence),
                 static_cast<int>(blockIdx.x) / kKdaSlices,
                 static_cast<int>(blockIdx.x) % kKdaSlices};
  if (c.run.length == 0 || !c.run.prefill) return;
  carry(c, *reinterpret_cast<Shared<kStages>*>(memory));
}

// Whether the device's blocks have shared memory for kManyStages.
cudaError_t has_room(bool& many) {
  int device = 0, bytes = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const cudaError_t error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  many = bytes >= static_cast<int>(sizeof(Shared<kManyStages>));
  return error;
}

}  // namespace

cudaError_t kda_load_carry() {
  bool many = false;
  if (const cudaError_t error = has_room(many); error != cudaSuccess) return error;
  return many ? allow_shared(carry_kernel<kManyStages>, sizeof(Shared<kManyStages>))
              : allow_shared(carry_kernel<1>, sizeof(Shared<1>));
}

cudaError_t kda_load_kernels() {
  for (const auto load : {kda_load_step, kda_load_relate, kda_load_carry})
    if (const cudaError_t error = load(); error != cudaSuccess) return error;
  return cudaSuccess;
}

cudaError_t kda_carry(const KdaCall& call, const KdaPieces& pieces, cudaStream_t stream) {
  if (pieces.count == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(call.heads * kKdaSlices), static_cast<unsigned>(pieces.count));
  bool many = false;
  if (const cudaError_t error = has_room(many); error != cudaSuccess) return error;
  return many ? launch(carry_kernel<kManyStages>, {grid, dim3(kThreads), sizeof(Shared<kManyStages>), stream}, call,
                       pieces)
              : launch(carry_kernel<1>, {grid, dim3(kThreads), sizeof(Shared<1>), stream}, call, pieces);
}

}  // namespace perigee
