// The state of one head through the chunks of a prefill, one after the other; kKdaSlices blocks of four warps share its
// values. With S the state before a chunk and the matrices of KdaChunkData:
//   corrections = solve (v - k S),   out = q S + qk corrections,   S = decay S + end^T corrections.
// All of it is computed transposed, values as rows: what a product leaves is the left operand of the next, so that S
// (f32), errors and corrections never leave the registers; products read them as two bf16 each.
#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/kda_product.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 128;
constexpr int kTail = kKdaTaps - 1;
constexpr int kManyStages = 2;  // chunks under way and in use, where shared memory has room for them; else one
constexpr int kStageBytes = kKdaSharedBytes + kKdaSliceBytes;
constexpr int kTileBytes = kKdaChunk * 128;  // 64 columns of the chunk's tokens
static_assert(kStageBytes % 1024 == 0 && kKdaSharedBytes % 16 == 0 && kKdaSlice == 64 && kKdaChunk == 32);

template <int kSteps>
struct Fragments {
  uint32_t high[kSteps][4], low[kSteps][4];  // of 16 columns each

  // From sums of a product.
  __device__ void split(const float (&x)[8 * kSteps], int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitPair pair = split_pair(x[8 * step + 2 * i], x[8 * step + 2 * i + 1]);
      high[step][i] = pair.high;
      low[step][i] = pair.low;
    }
  }
};

struct Chunks {
  const KdaCall& call;
  const KdaPieces& pieces;
  const KdaPiece& piece;
  KdaRun run;
  int head, slice;

  __device__ KdaRange range(int index) const { return kda_chunk(run, piece.first_chunk + index); }
  // The piece's chunks that have tokens; they come first.
  __device__ int count() const { return min(piece.num_chunks, kda_num_chunks(run) - piece.first_chunk); }
  __device__ void fetch(int index, uint8_t* stage) const {
    constexpr int kStep = kThreads * 16;
    const auto* from =
        reinterpret_cast<const uint8_t*>(static_cast<const KdaChunkData*>(pieces.scratch) +
                                         static_cast<int64_t>(piece.first_slot + index) * call.heads + head);
    const uint8_t* values = from + kKdaSharedBytes + slice * kKdaSliceBytes;
    const uint32_t to = shared_address(stage);
    const int at = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kKdaSharedBytes; i += kStep)
      if (i + kStep <= kKdaSharedBytes || at < kKdaSharedBytes - i) copy_async16(to + i + at, from + i + at);
#pragma unroll
    for (int i = 0; i < kKdaSliceBytes; i += kStep)
      if (i + kStep <= kKdaSliceBytes || at < kKdaSliceBytes - i)
        copy_async16(to + kKdaSharedBytes + i + at, values + i + at);
    copy_async_commit();
  }
};

// A thread's place in sums: rows (values) `value` and 8 below, columns `column`, the next, and those every 8.
struct Lane {
  int value = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  int column = static_cast<int>(threadIdx.x) % 4 * 2;
};

// S^T of the slice, as sums: 64 values by 128 keys.
struct State {
  float at[64];

  __device__ static float& element(const Lane& l, float* unit, int slice, int i) {
    const int key = i / 4 * 8 + l.column + i % 2, value = slice * kKdaSlice + l.value + i / 2 % 2 * 8;
    return unit[key * kKdaDim + value];
  }
  __device__ void load(const Lane& l, float* unit, int slice) {
#pragma unroll
    for (int i = 0; i < 64; ++i) at[i] = element(l, unit, slice, i);
  }
  __device__ void store(const Lane& l, float* unit, int slice) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) element(l, unit, slice, i) = at[i];
  }
  __device__ void decay(const Lane& l, const float* by) {
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const float2 x = *reinterpret_cast<const float2*>(by + i * 2 + l.column);
      at[i] *= x.x, at[i + 1] *= x.y, at[i + 2] *= x.x, at[i + 3] *= x.y;
    }
  }
};

// What keys and queries read of the state: errors = v - k S, out = q S, the latter still under way. The state decays.
__device__ void read_state(const KdaChunkData& data, const Lane& l, State& state, float (&errors)[16],
                           float (&out)[16]) {
  const uint32_t stage = shared_address(&data);
  const float* const v = data.v[0];
  Fragments<8> s;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int token = i / 4 * 8 + l.column + i % 2;
    errors[i] = v[token * kKdaValueRow + l.value + i / 2 % 2 * 8];
    out[i] = 0;
  }
#pragma unroll
  for (int step = 0; step < 8; ++step) s.split(state.at, step);
  state.decay(l, data.decay);
  product_begin(errors, out);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t high = stage + offsetof(KdaChunkData, kq_high) + step / 4 * 2 * kTileBytes + step % 4 * 32;
    const uint32_t low = stage + offsetof(KdaChunkData, k_low) + step / 4 * kTileBytes + step % 4 * 32;
    add_product(errors, s.low[step], high);
    add_product(errors, s.high[step], low);
    add_product(errors, s.high[step], high);
  }
  product_end();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t q = stage + offsetof(KdaChunkData, kq_high) + step / 4 * 2 * kTileBytes + kTileBytes + step % 4 * 32;
    add_product(out, s.low[step], q);
    add_product(out, s.high[step], q);
  }
  product_end();
  product_wait<1>();
}

// solve errors
__device__ void correct(uint32_t stage, const float (&errors)[16], Fragments<2>& corrections) {
  Fragments<2> e;
  float sum[16] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) e.split(errors, step);
  const uint32_t high = stage + offsetof(KdaChunkData, solve_high), low = stage + offsetof(KdaChunkData, solve_low);
  product_begin(sum);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    add_product_narrow(sum, e.low[step], high + step * 32);
    add_product_narrow(sum, e.high[step], low + step * 32);
    add_product_narrow(sum, e.high[step], high + step * 32);
  }
  product_end();
  product_wait<0>();
#pragma unroll
  for (int step = 0; step < 2; ++step) corrections.split(sum, step);
}

// out += qk corrections in one group, S += end^T corrections in the next.
__device__ void apply(uint32_t stage, const Fragments<2>& corrections, float (&own)[16], State& state) {
  const uint32_t qk = stage + offsetof(KdaChunkData, qk);
  const uint32_t high = stage + offsetof(KdaChunkData, end_high), low = stage + offsetof(KdaChunkData, end_low);
#pragma unroll
  for (int i = 0; i < 16; ++i) own[i] = 0;
  product_begin(own, state.at);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    add_product_narrow(own, corrections.low[step], qk + step * 32);
    add_product_narrow(own, corrections.high[step], qk + step * 32);
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int rows = step * 16 * 128;
    add_product_by_rows(state.at, corrections.low[step], high + rows, kTileBytes);
    add_product_by_rows(state.at, corrections.high[step], low + rows, kTileBytes);
    add_product_by_rows(state.at, corrections.high[step], high + rows, kTileBytes);
  }
  product_end();
}

__device__ void write_out(const Chunks& c, KdaRange range, const Lane& l, const float (&out)[16]) {
  int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
  float* to = c.pieces.out + (c.run.first_row + range.begin - c.run.position + l.column) * width + c.head * kKdaDim +
              c.slice * kKdaSlice + l.value;
  asm volatile("" : "+l"(to), "+l"(width));  // addresses take registers only from here on
  const int count = range.end - range.begin - l.column;
#pragma unroll
  for (int i = 0; i < 16; i += 4, to += 8 * width) {
    if (2 * i < count) to[0] = out[i], to[8] = out[i + 2];
    if (2 * i + 1 < count) to[width] = out[i + 1], to[width + 8] = out[i + 3];
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

// What the end of a chunk leaves: the checkpoint's state, the convolution's tails.
__device__ void finish_chunk(const Chunks& c, KdaRange range, const Lane& l, const State& state, float* unit) {
  constexpr int kState = kKdaDim * kKdaDim;
  if (range.end == c.run.checkpoint) {
    float* checkpoint = kda_checkpoint_unit(c.call.state, c.call.sequences, c.piece.sequence, c.head);
    state.store(l, checkpoint, c.slice);
    if (c.slice == 0) write_tail(c, range.end, unit + kState, checkpoint + kState);
  }
  if (range.end == c.run.length && c.slice == 0) write_tail(c, range.end, unit + kState, unit + kState);
}

template <int kStages>
__device__ void carry(const Chunks& c, uint8_t (*stages)[kStageBytes]) {
  const Lane l;
  const int count = c.count();
  if (count <= 0) return;
  c.fetch(0, stages[0]);
  float* unit = kda_unit(c.call.state, c.call.sequences, c.piece.sequence, c.head);
  State state;
  state.load(l, unit, c.slice);
  for (int index = 0; index < count; ++index) {
    const auto& data = *reinterpret_cast<const KdaChunkData*>(stages[index % kStages]);
    const uint32_t stage = shared_address(&data);
    copy_async_wait<0>();
    product_operands_written();
    __syncthreads();
    if (kStages > 1 && index + 1 < count) c.fetch(index + 1, stages[(index + 1) % kStages]);
    float errors[16], out[16], own[16];
    Fragments<2> corrections;
    read_state(data, l, state, errors, out);
    correct(stage, errors, corrections);
    apply(stage, corrections, own, state);
    product_wait<0>();
    const KdaRange range = c.range(index);
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] += own[i];
    write_out(c, range, l, out);
    finish_chunk(c, range, l, state, unit);
    if (kStages > 1 || index + 1 == count) continue;
    __syncthreads();
    c.fetch(index + 1, stages[0]);
  }
  state.store(l, unit, c.slice);
}

template <int kStages>
__global__ __launch_bounds__(kThreads, 1) void carry_kernel(const __grid_constant__ KdaCall call,
                                                            const __grid_constant__ KdaPieces pieces) {
  extern __shared__ __align__(1024) uint8_t memory[];
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
  carry<kStages>(c, reinterpret_cast<uint8_t(*)[kStageBytes]>(memory));
}

// Whether the device's blocks have shared memory for kManyStages.
cudaError_t has_room(bool& many) {
  int device = 0, bytes = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const cudaError_t error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  many = bytes >= kManyStages * kStageBytes;
  return error;
}

}  // namespace

cudaError_t kda_load_carry() {
  bool many = false;
  if (const cudaError_t error = has_room(many); error != cudaSuccess) return error;
  return many ? allow_shared(carry_kernel<kManyStages>, kManyStages * kStageBytes)
              : allow_shared(carry_kernel<1>, kStageBytes);
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
  return many ? launch(carry_kernel<kManyStages>, {grid, dim3(kThreads), kManyStages * kStageBytes, stream}, call,
                       pieces)
              : launch(carry_kernel<1>, {grid, dim3(kThreads), kStageBytes, stream}, call, pieces);
}

}  // namespace perigee
