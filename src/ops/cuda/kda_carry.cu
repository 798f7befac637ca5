// The state of one head through the chunks of a prefill, one after the other; kKdaSlices blocks share its values. With
// S the state before a chunk and the matrices of KdaChunkData:
//   corrections = solve (v - k S),   out = q S + qk corrections,   S = decay S + end^T corrections.
// S is kept in f32, in registers; products read it as two bf16.
#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kTail = kKdaTaps - 1;
constexpr int kManyStages = 2;  // chunks under way and in use, where shared memory has room for them; else one
constexpr int kStageBytes = kKdaSharedBytes + kKdaSliceBytes;
static_assert(kStageBytes % 16 == 0 && kKdaSharedBytes % 16 == 0 && kKdaSlice == 32 && kKdaChunk == 32);

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

struct Lanes {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int row = lane / 4, column = lane % 4 * 2;  // of a fragment of sums
};

__device__ void store_sums(uint16_t* high, uint16_t* low, int row, int column, const float (&sum)[4]) {
  store_split(high, low, kda_at32(row, column), sum[0], sum[1]);
  store_split(high, low, kda_at32(row + 8, column), sum[2], sum[3]);
}

// Two fragments of B, rows row ... row + 15 and columns column ... column + 15 of a matrix of 32 columns.
__device__ void load_b(uint32_t (&b)[4], const uint16_t* matrix, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrix_x4_transposed(b, shared_address(matrix + kda_at32(row + lane % 16, column + lane / 16 * 8)));
}
__device__ void load_a32(uint32_t (&a)[4], const uint16_t* matrix, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrix_x4(a, shared_address(matrix + kda_at32(row + lane % 16, column + lane / 16 * 8)));
}
__device__ void load_a128(uint32_t (&a)[4], const uint16_t* matrix, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrix_x4(a, shared_address(matrix + kda_at128(row + lane % 16, column + lane / 16 * 8)));
}
// Rows row ... row + 15 of the transpose of a matrix of 128 columns.
__device__ void load_a_transposed(uint32_t (&a)[4], const uint16_t* matrix, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrix_x4_transposed(
      a, shared_address(matrix + kda_at128(column + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8)));
}

struct Chunks {
  const KdaCall& call;
  const KdaPieces& pieces;
  const KdaPiece& piece;
  KdaRun run;
  int head, slice;

  __device__ const uint8_t* data(int index) const {
    const int64_t slot = piece.first_slot + index;
    return reinterpret_cast<const uint8_t*>(static_cast<const KdaChunkData*>(pieces.scratch) + slot * call.heads +
                                            head);
  }
  __device__ KdaRange range(int index) const { return kda_chunk(run, piece.first_chunk + index); }
  // The piece's next chunk from `index` on that has tokens; num_chunks: none.
  __device__ int next(int index) const {
    for (; index < piece.num_chunks; ++index) {
      const KdaRange r = range(index);
      if (r.begin < r.end) break;
    }
    return index;
  }
  __device__ void fetch(int index, uint8_t* stage) const {
    if (index < piece.num_chunks) {
      const uint8_t* from = data(index);
      for (int at = threadIdx.x * 16; at < kKdaSharedBytes; at += kThreads * 16)
        copy_async16(shared_address(stage + at), from + at);
      from += kKdaSharedBytes + slice * kKdaSliceBytes;
      for (int at = threadIdx.x * 16; at < kKdaSliceBytes; at += kThreads * 16)
        copy_async16(shared_address(stage + kKdaSharedBytes + at), from + at);
    }
    copy_async_commit();
  }
};

// A warp's sixteen keys of S by the slice's values, as fragments of sums.
struct State {
  float at[4][4];

  __device__ float2* pair(float* unit, const Lanes& l, int slice, int n, int half) const {
    const int key = 16 * l.warp + l.row + 8 * half;
    return reinterpret_cast<float2*>(unit + key * kKdaDim + slice * kKdaSlice + 8 * n + l.column);
  }
  __device__ void load(float* unit, const Lanes& l, int slice) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = *pair(unit, l, slice, n, half);
        at[n][2 * half] = x.x;
        at[n][2 * half + 1] = x.y;
      }
  }
  __device__ void store(float* unit, const Lanes& l, int slice) const {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) *pair(unit, l, slice, n, half) = {at[n][2 * half], at[n][2 * half + 1]};
  }
  __device__ void split(Split& to, const Lanes& l) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) store_sums(to.high, to.low, 16 * l.warp + l.row, 8 * n + l.column, at[n]);
  }
  // S = decay S + end^T corrections
  __device__ void move(const KdaChunkData& data, const SplitTokens& corrections, const Lanes& l) {
    const float first = data.decay[16 * l.warp + l.row], second = data.decay[16 * l.warp + l.row + 8];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      at[n][0] *= first, at[n][1] *= first;
      at[n][2] *= second, at[n][3] *= second;
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t high[4], low[4];
      load_a_transposed(high, data.end_high, 16 * l.warp, 16 * step);
      load_a_transposed(low, data.end_low, 16 * l.warp, 16 * step);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        uint32_t b_high[4], b_low[4];
        load_b(b_high, corrections.high, 16 * step, 8 * n);
        load_b(b_low, corrections.low, 16 * step, 8 * n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_16x8x16(Bf16(), at[n + i], low, b_high[2 * i], b_high[2 * i + 1]);
          mma_16x8x16(Bf16(), at[n + i], high, b_low[2 * i], b_low[2 * i + 1]);
          mma_16x8x16(Bf16(), at[n + i], high, b_high[2 * i], b_high[2 * i + 1]);
        }
      }
    }
  }
};

// What sixteen rows of k (kLow) or q read of the state, by sixteen values.
template <bool kLow>
__device__ void read_state(const uint16_t* high, const uint16_t* low, const Split& state, int row, int column,
                           float (&sum)[2][4]) {
  float rest[2][4] = {};
#pragma unroll
  for (int key = 0; key < kKdaDim; key += 16) {
    uint32_t a[4], b_high[4], b_low[4];
    load_a128(a, high, row, key);
    load_b(b_high, state.high, key, column);
    load_b(b_low, state.low, key, column);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_16x8x16(Bf16(), sum[n], a, b_high[2 * n], b_high[2 * n + 1]);
      mma_16x8x16(Bf16(), rest[n], a, b_low[2 * n], b_low[2 * n + 1]);
    }
    if constexpr (kLow) {
      load_a128(a, low, row, key);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_16x8x16(Bf16(), rest[n], a, b_high[2 * n], b_high[2 * n + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] += rest[n][i];
}

// errors = v - k S of a warp's tile
__device__ void write_errors(const float* v, const float (&held)[2][4], int row, int column, SplitTokens& errors) {
  const Lanes l;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int c = column + 8 * n + l.column;
    const float2 first = *reinterpret_cast<const float2*>(v + kda_value_at(row + l.row, c));
    const float2 second = *reinterpret_cast<const float2*>(v + kda_value_at(row + l.row + 8, c));
    const float error[4] = {first.x - held[n][0], first.y - held[n][1], second.x - held[n][2], second.y - held[n][3]};
    store_sums(errors.high, errors.low, row + l.row, c, error);
  }
}

// corrections = solve errors, a tile of 16 x 8 a warp
__device__ void solve(const KdaChunkData& data, const SplitTokens& errors, SplitTokens& corrections, const Lanes& l) {
  const int row = l.warp / 4 * 16, column = l.warp % 4 * 8;
  float sum[4] = {}, rest[4] = {};
  uint32_t b_high[4], b_low[4];
  load_matrix_x4_transposed(b_high, shared_address(errors.high + kda_at32(l.lane, column)));
  load_matrix_x4_transposed(b_low, shared_address(errors.low + kda_at32(l.lane, column)));
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t high[4], low[4];
    load_a32(high, data.solve_high, row, 16 * step);
    load_a32(low, data.solve_low, row, 16 * step);
    mma_16x8x16(Bf16(), sum, high, b_high[2 * step], b_high[2 * step + 1]);
    mma_16x8x16(Bf16(), rest, high, b_low[2 * step], b_low[2 * step + 1]);
    mma_16x8x16(Bf16(), rest, low, b_high[2 * step], b_high[2 * step + 1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += rest[i];
  store_sums(corrections.high, corrections.low, row + l.row, column + l.column, sum);
}

// out = q S (in `sum`) + qk corrections, a tile of 16 x 16 a warp, into the rows of the chunk's tokens.
__device__ void write_out(const Chunks& c, KdaRange range, const KdaChunkData& data, const SplitTokens& corrections,
                          int row, int column, float (&sum)[2][4]) {
  const Lanes l;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t a[4], b_high[4], b_low[4];
    load_a32(a, data.qk, row, 16 * step);
    load_b(b_high, corrections.high, 16 * step, column);
    load_b(b_low, corrections.low, 16 * step, column);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_16x8x16(Bf16(), sum[n], a, b_low[2 * n], b_low[2 * n + 1]);
      mma_16x8x16(Bf16(), sum[n], a, b_high[2 * n], b_high[2 * n + 1]);
    }
  }
  const int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = range.begin + row + l.row + 8 * half;
    if (position >= range.end) continue;
    float* to = c.pieces.out + (c.run.first_row + position - c.run.position) * width + c.head * kKdaDim +
                c.slice * kKdaSlice + column + l.column;
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

template <int kStages>
__global__ __launch_bounds__(kThreads, 2) void carry_kernel(const __grid_constant__ KdaCall call,
                                                            const __grid_constant__ KdaPieces pieces) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kStages>*>(memory);
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
  int index = c.next(0), fetched = index;
  if (index == piece.num_chunks) return;
  const Lanes l;
  constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  for (int i = 0; i < kAhead; ++i, fetched = c.next(fetched + 1)) c.fetch(fetched, shared.stages[i]);
  float* unit = kda_unit(call.state, call.sequences, piece.sequence, c.head);
  constexpr int kState = kKdaDim * kKdaDim;
  State state;
  state.load(unit, l, c.slice);
  state.split(shared.state, l);
  const bool reads_keys = l.warp < 4;
  const int row = l.warp / 2 % 2 * 16, column = l.warp % 2 * 16;  // of the warp's tile of k S or q S
  for (int stage = 0; index < piece.num_chunks; index = c.next(index + 1), stage = (stage + 1) % kStages) {
    copy_async_wait<kAhead - 1>();
    __syncthreads();
    if constexpr (kStages > 1) {
      c.fetch(fetched, shared.stages[(stage + kAhead) % kStages]);
      fetched = c.next(fetched + 1);
    }
    const auto& data = *reinterpret_cast<const KdaChunkData*>(shared.stages[stage]);
    const KdaRange range = c.range(index);
    float sum[2][4] = {};
    if (reads_keys) {
      read_state<true>(data.k_high, data.k_low, shared.state, row, column, sum);
      write_errors(data.v[0], sum, row, column, shared.errors);
    } else {
      read_state<false>(data.q_high, nullptr, shared.state, row, column, sum);
    }
    __syncthreads();
    solve(data, shared.errors, shared.corrections, l);
    __syncthreads();
    if (!reads_keys) write_out(c, range, data, shared.corrections, row, column, sum);
    state.move(data, shared.corrections, l);
    state.split(shared.state, l);
    if (range.end == c.run.checkpoint) {
      float* checkpoint = kda_checkpoint_unit(call.state, call.sequences, piece.sequence, c.head);
      state.store(checkpoint, l, c.slice);
      if (c.slice == 0) write_tail(c, range.end, unit + kState, checkpoint + kState);
    }
    if (range.end == c.run.length && c.slice == 0) write_tail(c, range.end, unit + kState, unit + kState);
    if constexpr (kStages == 1) {
      __syncthreads();
      c.fetch(fetched, shared.stages[0]);
      fetched = c.next(fetched + 1);
    }
  }
  state.store(unit, l, c.slice);
}

// A warp a (row, head) of a prefill.
__global__ __launch_bounds__(kThreads) void finish_kernel(const __grid_constant__ KdaCall call, const float* out) {
  dependency_wait();
  dependency_trigger();
  const int lane = threadIdx.x % 32, head = blockIdx.y * (kThreads / 32) + threadIdx.x / 32;
  const int64_t row = blockIdx.x;
  if (head >= call.heads) return;
  const int sequence = call.sequences.row_sequence[row], length = call.sequences.lengths[sequence];
  if (length == 0 || call.sequences.commit[sequence] != length) return;
  const float4 o = reinterpret_cast<const float4*>(out + (row * call.heads + head) * kKdaDim)[lane];
  const float4 z = reinterpret_cast<const float4*>(call.z.row<float>(row) + head * kKdaDim)[lane];
  kda_gated_norm(call, o, z, call.y.row<uint16_t>(row) + head * kKdaDim);
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
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, finish_kernel);
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

cudaError_t kda_finish(const KdaCall& call, const float* out, cudaStream_t stream) {
  constexpr int kHeads = kThreads / 32;
  const dim3 grid(static_cast<unsigned>(call.y.rows), static_cast<unsigned>((call.heads + kHeads - 1) / kHeads));
  return launch(finish_kernel, {grid, dim3(kThreads), 0, stream}, call, out);
}

}  // namespace perigee
