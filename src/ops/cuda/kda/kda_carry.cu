// The state of one head through the chunks of a prefill, one after the other; kKdaSlices blocks of four warps share its
// values. With S the state before a chunk and the matrices of KdaChunkData:
//   corrections = solve (v - k S),   out = q S + qk corrections,   S = decay S + end^T corrections.
// All of it is computed transposed, values as rows: what a product leaves is the left operand of the next, so that S
// (f32), errors and corrections never leave the registers; products read them as two bf16 each.
#include "ops/cuda/kda/kda_chunk.cuh"
#include "ops/cuda/kda/kda_product.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 128;
constexpr int kTail = kKdaTaps - 1;
constexpr int kManyStages = 2;       // chunks under way and in use, where shared memory has room for them; else one
constexpr unsigned kShareOfFew = 2;  // few blocks: at most every second multiprocessor has one
constexpr int kFetchedBytes = kKdaSharedBytes + kKdaSliceBytes;
constexpr int kStageBytes = (kFetchedBytes + 1023) / 1024 * 1024;
constexpr int kTileBytes = kKdaChunk * 128;  // 64 columns of the chunk's tokens
static_assert(kKdaSharedBytes % 16 == 0 && kKdaSlice == 64 && kKdaChunk == 32);

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
};

template <int kStages>
struct Shared {
  uint8_t stages[kStages][kStageBytes];
  uint64_t arrived[kStages];  // from 90 on

  __device__ const KdaChunkData& data(int index) const {
    return *reinterpret_cast<const KdaChunkData*>(stages[index % kStages]);
  }
  __device__ void init() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : arrived) barrier_init(&barrier, 1);
      barrier_init_fence();
    }
#endif
    __syncthreads();
  }
  // Asks for a chunk, in the place of one that all threads are through with.
  __device__ void fetch(const Chunks& c, int index) {
    const auto* from =
        reinterpret_cast<const uint8_t*>(static_cast<const KdaChunkData*>(c.pieces.scratch) +
                                         static_cast<int64_t>(c.piece.first_slot + index) * c.call.heads + c.head);
    const uint8_t* const values = from + kKdaSharedBytes + c.slice * kKdaSliceBytes;
    const uint32_t to = shared_address(stages[index % kStages]);
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0) return;
    uint64_t* const barrier = &arrived[index % kStages];
    barrier_expect(barrier, kFetchedBytes);
    bulk_copy(to, from, kKdaSharedBytes, barrier);
    bulk_copy(to + kKdaSharedBytes, values, kKdaSliceBytes, barrier);
#else
    for (int at = threadIdx.x * 16; at < kFetchedBytes; at += kThreads * 16)
      copy_async16(to + at, at < kKdaSharedBytes ? from + at : values + at - kKdaSharedBytes);
    copy_async_commit();
#endif
  }
  // Waits for a chunk, and for all threads.
  __device__ void await(int index) {
#if __CUDA_ARCH__ >= 900
    barrier_wait(&arrived[index % kStages], index / kStages % 2);
#else
    copy_async_wait<0>();
#endif
    __syncthreads();
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

// A chunk's matrices as operands.
struct Matrices {
  Operand keys, keys_low, queries, solve, solve_low, qk, end, end_low;

  __device__ explicit Matrices(uint32_t stage)
      : keys(operand_128(stage + offsetof(KdaChunkData, kq_high))),
        keys_low(operand_128(stage + offsetof(KdaChunkData, k_low))),
        queries(operand_128(stage + offsetof(KdaChunkData, kq_high) + kTileBytes)),
        solve(operand_64(stage + offsetof(KdaChunkData, solve_high))),
        solve_low(operand_64(stage + offsetof(KdaChunkData, solve_low))),
        qk(operand_64(stage + offsetof(KdaChunkData, qk))),
        end(operand_by_rows(stage + offsetof(KdaChunkData, end_high), kTileBytes)),
        end_low(operand_by_rows(stage + offsetof(KdaChunkData, end_low), kTileBytes)) {}
};

// errors = v - k S
__device__ void read_keys(const Matrices& m, const float* v, const Lane& l, const Fragments<8>& s,
                          float (&errors)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int token = i / 4 * 8 + l.column + i % 2;
    errors[i] = v[kda_value_at(token, l.value + i / 2 % 2 * 8)];
  }
  product_begin(errors);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const Operand high = m.keys.plus(step / 4 * 2 * kTileBytes + step % 4 * 32);
    add_product<128>(errors, s.low[step], high);
    add_product<128>(errors, s.high[step], m.keys_low.plus(step / 4 * kTileBytes + step % 4 * 32));
    add_product<128>(errors, s.high[step], high);
  }
  product_end();
}

// out += q S of half of the keys; outputs are bf16 in the end, so S is too.
__device__ void read_queries(const Matrices& m, int half, const Fragments<8>& s, float (&out)[16]) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    add_product<128>(out, s.high[4 * half + step], m.queries.plus(half * 2 * kTileBytes + step * 32));
  product_end();
}

// corrections = solve errors
__device__ void correct(const Matrices& m, const float (&errors)[16], float (&corrections)[16]) {
  Fragments<2> e;
#pragma unroll
  for (int step = 0; step < 2; ++step) e.split(errors, step);
#pragma unroll
  for (int i = 0; i < 16; ++i) corrections[i] = 0;
  product_begin(corrections);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    add_product<64>(corrections, e.low[step], m.solve.plus(step * 32));
    add_product<64>(corrections, e.high[step], m.solve_low.plus(step * 32));
    add_product<64>(corrections, e.high[step], m.solve.plus(step * 32));
  }
  product_end();
}

// out += qk corrections, S += end^T corrections
__device__ void apply(const Matrices& m, const float (&corrections)[16], float (&out)[16], State& state) {
  Fragments<2> c;
#pragma unroll
  for (int step = 0; step < 2; ++step) c.split(corrections, step);
  product_begin(state.at);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int rows = step * 16 * 128;
    add_product<64>(out, c.high[step], m.qk.plus(step * 32));
    add_product_by_rows(state.at, c.low[step], m.end.plus(rows));
    add_product_by_rows(state.at, c.high[step], m.end_low.plus(rows));
    add_product_by_rows(state.at, c.high[step], m.end.plus(rows));
  }
  product_end();
}

// One chunk. What queries read runs in the gaps of the way from one state to the next.
__device__ void pass_chunk(const KdaChunkData& data, const Lane& l, State& state, float (&out)[16]) {
  const Matrices m(shared_address(&data));
  float errors[16], corrections[16];
  Fragments<8> s;
#pragma unroll
  for (int step = 0; step < 8; ++step) s.split(state.at, step);
  state.decay(l, data.decay);
#pragma unroll
  for (int i = 0; i < 16; ++i) out[i] = 0;
  product_begin(out);
  read_keys(m, data.v[0], l, s, errors);
  read_queries(m, 0, s, out);
  product_wait<1>();
  correct(m, errors, corrections);
  read_queries(m, 1, s, out);
  product_wait<1>();
  apply(m, corrections, out, state);
  product_wait<0>();
}

__device__ void write_out(const Chunks& c, KdaRange range, const Lane& l, const float (&out)[16]) {
  int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
  int64_t at = (c.run.first_row + range.begin - c.run.position + l.column) * width + c.head * kKdaDim +
               c.slice * kKdaSlice + l.value;
  asm volatile("" : "+l"(at), "+l"(width));  // addresses take registers only from here on
  float* to = c.pieces.out + at;
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

// The run's first checkpoint after a position; its chunks then pass one after the other.
struct NextCheckpoint {
  const Chunks& c;
  int index, position;  // INT32_MAX: none is left

  __device__ NextCheckpoint(const Chunks& chunks, int after) : c(chunks), index(chunks.run.first_checkpoint) {
    for (int end = c.run.end_checkpoint; index < end;) {
      const int middle = (index + end) / 2;
      if (c.call.sequences.checkpoint_position[middle] <= after)
        index = middle + 1;
      else
        end = middle;
    }
    read();
  }
  __device__ void advance() {
    ++index;
    read();
  }

 private:
  __device__ void read() {
    position = index < c.run.end_checkpoint ? c.call.sequences.checkpoint_position[index] : INT32_MAX;
  }
};

// What the end of a chunk leaves: a checkpoint's state, the convolution's tails.
__device__ void finish_chunk(const Chunks& c, KdaRange range, const Lane& l, const State& state, float* unit,
                             NextCheckpoint& next) {
  constexpr int kState = kKdaDim * kKdaDim;
  if (range.end == next.position) {
    float* checkpoint = kda_checkpoint_unit(c.call.state, c.call.sequences, next.index, c.head);
    state.store(l, checkpoint, c.slice);
    if (c.slice == 0) write_tail(c, range.end, unit + kState, checkpoint + kState);
    next.advance();
  }
  if (range.end == c.run.length && c.slice == 0) write_tail(c, range.end, unit + kState, unit + kState);
}

template <int kStages>
__device__ void carry(const Chunks& c, Shared<kStages>& shared) {
  const Lane l;
  const int count = c.count();
  if (count <= 0) return;
  shared.init();
  shared.fetch(c, 0);
  float* unit = kda_unit(c.call.state, c.call.sequences, c.piece.sequence, c.head);
  NextCheckpoint next(c, c.range(0).begin);
  State state;
  state.load(l, unit, c.slice);
  for (int index = 0; index < count; ++index) {
    shared.await(index);
    if (kStages > 1 && index + 1 < count) shared.fetch(c, index + 1);
    float out[16];
    pass_chunk(shared.data(index), l, state, out);
    const KdaRange range = c.range(index);
    write_out(c, range, l, out);
    finish_chunk(c, range, l, state, unit, next);
    if (kStages > 1 || index + 1 == count) continue;
    __syncthreads();
    shared.fetch(c, index + 1);
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
  carry(c, *reinterpret_cast<Shared<kStages>*>(memory));
}

bool has_many_stages() {
  return device_limits().shared_of_block >= static_cast<int>(sizeof(Shared<kManyStages>));
}

// Of a launch of so many blocks. Few take all of a multiprocessor's: blocks of the relate kernel that runs meanwhile
// would slow them, and they are what takes time.
size_t shared_bytes(unsigned blocks, size_t needed) {
  const DeviceLimits& limits = device_limits();
  return blocks * kShareOfFew <= static_cast<unsigned>(limits.multiprocessors)
             ? static_cast<size_t>(limits.shared_of_block)
             : needed;
}

template <int kStages>
cudaError_t launch_carry(const KdaCall& call, const KdaPieces& pieces, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(call.heads * kKdaSlices), static_cast<unsigned>(pieces.count));
  return launch(carry_kernel<kStages>,
                {grid, dim3(kThreads), shared_bytes(grid.x * grid.y, sizeof(Shared<kStages>)), stream}, call, pieces);
}

}  // namespace

cudaError_t kda_load_carry() {
  const auto most = static_cast<size_t>(device_limits().shared_of_block);
  return has_many_stages() ? allow_shared(carry_kernel<kManyStages>, most) : allow_shared(carry_kernel<1>, most);
}

cudaError_t kda_load_kernels() {
  for (const auto load : {kda_load_step, kda_load_relate, kda_load_carry})
    if (const cudaError_t error = load(); error != cudaSuccess) return error;
  return cudaSuccess;
}

cudaError_t kda_carry(const KdaCall& call, const KdaPieces& pieces, cudaStream_t stream) {
  if (pieces.count == 0) return cudaSuccess;
  return has_many_stages() ? launch_carry<kManyStages>(call, pieces, stream) : launch_carry<1>(call, pieces, stream);
}

}  // namespace perigee
