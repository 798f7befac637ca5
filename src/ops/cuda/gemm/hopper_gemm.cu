// A block: two warpgroups that multiply, 64 rows of W each, and one that brings tiles, x by gathered 16-byte copies, W
// by tensor map, into a ring of stages of 64 columns. Blocks stay and take every gridDim.x-th tile, so that the first
// stages of a tile arrive while the one before is stored.
//
// W is the left operand: its rows are the 64 of a product and the tokens its columns, of which there may be 64, 128,
// 192 or 256; so little is wasted on experts with few tokens, and widened weights can stay in registers.
#include "comm/cuda/term.h"
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/gemm/dequant.cuh"
#include "ops/cuda/gemm/hopper_gemm.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/tensor_map.h"
#include "ops/cuda/gemm/wgmma_gemm.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // other architectures compile this file to empty kernels
#endif

namespace perigee {
namespace {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kThreads = 3 * kGroup;
constexpr int kFeatures = 128;               // rows of W in a tile
constexpr int kDepth = 64;                   // columns of a stage
constexpr int kPiece = 64;                   // tokens stored at once
                                             // stages whose copies may be under way when the next is begun
constexpr int kStagingBytes = kPiece * 128;  // of a warpgroup

template <WeightFormat kFormat>
struct Ring {
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4Group32, kFp8 = kFormat == WeightFormat::kF8Block128;
  static constexpr int kTokens = kFp8 ? 128 : 256;  // FP8 keeps two sets of sums
  static constexpr int kRowBytes = kInt4 ? 32 : kFp8 ? 64 : 128;
  static constexpr int kXBytes = kTokens * 128, kWeightBytes = kFeatures * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes + (kInt4 ? 1024 : 0);  // scales after the weights
  static constexpr int kStages = kInt4 ? 5 : kFp8 ? 6 : 4;
};

template <WeightFormat kFormat>
struct Shared {
  alignas(1024) uint8_t stages[Ring<kFormat>::kStages][Ring<kFormat>::kStageBytes];
  uint8_t staging[2][kStagingBytes];
  int y_rows[2][256];
  uint64_t full[Ring<kFormat>::kStages], empty[Ring<kFormat>::kStages];
};

// The stage that is next, and the parity of its barriers.
template <int kStages>
struct RingCursor {
  int stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

struct Tile {
  int expert, begin, count, feature;  // tokens begin ... begin + count, rows of W from `feature` on
};

// This block's tiles: every gridDim.x-th, each looked up while the one before is at work.
struct Tiles {
  const GemmCall& c;
  const int item_rows, feature_tiles, count;
  int index;
  Tile tile{}, ahead{};

  __device__ Tiles(const GemmCall& call, int rows)
      : c(call),
        item_rows(rows),
        feature_tiles((c.out + kFeatures - 1) / kFeatures),
        count((c.items != nullptr ? *c.num_items : (c.rows + item_rows - 1) / item_rows) * feature_tiles),
        index(static_cast<int>(blockIdx.x)) {
    look_up(index);
    tile = ahead;
    look_up(index + static_cast<int>(gridDim.x));
  }
  __device__ bool more() const { return index < count; }
  __device__ void next() {
    index += static_cast<int>(gridDim.x);
    tile = ahead;
    look_up(index + static_cast<int>(gridDim.x));
  }
  __device__ void look_up(int at) {
    if (at >= count) return;
    const int item = at / feature_tiles, feature = at % feature_tiles * kFeatures;
    if (c.items == nullptr) {
      ahead = {0, item * item_rows, min(item_rows, c.rows - item * item_rows), feature};
      return;
    }
    const MoeItem found = c.items[item];
    ahead = {found.expert, found.begin, found.count, feature};
  }
};

// The row of y of token `index` of the sorted list; x's is that over x_divisor.
__device__ __forceinline__ int y_row(const GemmCall& c, int index) {
  return c.pairs != nullptr ? c.pairs[index] : index;
}

// --- The warpgroup that brings tiles. ---

// Brings the stages of one tile whose tokens fill kRows / 4 * 64 columns. Thread i copies chunk i % 8 of rows i / 8,
// i / 8 + 16, ... of x; rows past the last are copies of it, and what is made of them is never stored.
template <WeightFormat kFormat, int kRows>
__device__ __forceinline__ void bring_tile(const GemmCall& c, const CUtensorMap& map, const Tile& tile,
                                           Shared<kFormat>& shared, RingCursor<Ring<kFormat>::kStages>& cursor) {
  using R = Ring<kFormat>;
  const int thread = threadIdx.x % kGroup, chunk = thread % 8, first = thread / 8;
  const uint16_t* rows[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = y_row(c, tile.begin + min(first + 16 * i, tile.count - 1)) / c.x_divisor;
    rows[i] = c.x + row * c.x_stride + chunk * 8;
  }
  const int64_t scale_row = min(tile.feature + thread, c.out - 1);
  const auto* scales = static_cast<const uint8_t*>(c.scale) + tile.expert * c.scale_stride + scale_row * c.chunks * 8;
  const uint32_t place = first * 128 + ((chunk ^ (first & 7)) << 4);
  const auto bring_stage = [&](int step, int column) {
    uint8_t* stage = shared.stages[cursor.stage];
    uint64_t* full = &shared.full[cursor.stage];
    barrier_wait(&shared.empty[cursor.stage], cursor.parity ^ 1);
    if (thread == 0) {
      barrier_expect(full, R::kWeightBytes);
      bulk_copy_box(shared_address(stage + R::kXBytes), &map, step * (R::kInt4 ? 32 : 64), tile.feature, tile.expert,
                    full);
    }
    const uint32_t to = shared_address(stage) + place;
    const int bytes = step * kDepth + chunk * 8 < c.in ? 16 : 0;  // past the last column: zeros
#pragma unroll
    for (int i = 0; i < kRows; ++i) copy_async16(to + i * 16 * 128, rows[i] + column, bytes);
    if constexpr (R::kInt4)
      copy_async4(shared_address(stage + R::kXBytes + R::kWeightBytes) + thread * 4, scales + step * 4);
    barrier_arrive_copies(full);
    cursor.next();
  };
  for (int step = 0; step < 2 * c.chunks; step += 2) {
    bring_stage(step, 0);
    bring_stage(step + 1, kDepth);
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] += 2 * kDepth;
  }
}

template <WeightFormat kFormat>
__device__ void bring(const GemmCall& c, const CUtensorMap& map, Shared<kFormat>& shared) {
  RingCursor<Ring<kFormat>::kStages> cursor;
  for (Tiles tiles(c, Ring<kFormat>::kTokens); tiles.more(); tiles.next()) {
    const Tile& tile = tiles.tile;
    if (tile.count <= 64)
      bring_tile<kFormat, 4>(c, map, tile, shared, cursor);
    else if (tile.count <= 128)
      bring_tile<kFormat, 8>(c, map, tile, shared, cursor);
    else if constexpr (Ring<kFormat>::kTokens > 128) {
      if (tile.count <= 192)
        bring_tile<kFormat, 12>(c, map, tile, shared, cursor);
      else
        bring_tile<kFormat, 16>(c, map, tile, shared, cursor);
    }
  }
  copy_async_wait<0>();
}

// --- The warpgroups that multiply. ---

// The A fragments of 64 columns of this warp's 16 rows of W, widened; `row` is this lane's first.
__device__ __forceinline__ void widen_int4(const uint8_t* weights, int row, uint32_t (&a)[4][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    const auto* scales = reinterpret_cast<const __nv_bfloat162*>(weights + kFeatures * 32) + r;
    const __nv_bfloat162 both = *scales, first = __low2bfloat162(both), second = __high2bfloat162(both);
#pragma unroll
    for (int k = 0; k < 2; ++k) {  // 16 columns of both groups: 16 bytes, swizzled by 32
      const uint4 words = *reinterpret_cast<const uint4*>(weights + r * 32 + ((k ^ (r >> 2 & 1)) << 4));
      a[k][half] = int4_pair(words.x, t, first);
      a[k][half + 2] = int4_pair(words.z, t, first);
      a[k + 2][half] = int4_pair(words.y, t, second);
      a[k + 2][half + 2] = int4_pair(words.w, t, second);
    }
  }
}

__device__ __forceinline__ void widen_fp8(const uint8_t* weights, int row, uint32_t (&a)[4][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 columns: 16 bytes, swizzled by 64
      const uint8_t* bytes = weights + r * 64 + ((k ^ (r >> 1 & 3)) << 4) + 2 * t;
      a[k][half] = fp8_pair(*reinterpret_cast<const uint16_t*>(bytes), 0);
      a[k][half + 2] = fp8_pair(*reinterpret_cast<const uint16_t*>(bytes + 8), 0);
    }
  }
}

template <WeightFormat kFormat, int kSums>
__device__ __forceinline__ void multiply(float (&sum)[kSums], const uint32_t (&a)[4][4], const uint8_t* stage) {
  const uint32_t x = shared_address(stage);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) wgmma_add(sum, a[k], matrix_k_major(x + k * 32));
  wgmma_commit();
}

template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// What a multiplying warpgroup knows about the ring.
template <WeightFormat kFormat>
struct Reader {
  Shared<kFormat>& shared;
  RingCursor<Ring<kFormat>::kStages> cursor;
  __device__ const uint8_t* wait() const {
    barrier_wait(&shared.full[cursor.stage], cursor.parity);
    fence_async_proxy();  // x came by ordinary copies
    return shared.stages[cursor.stage];
  }
  __device__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[stage]);
  }
};

template <int kSums>
__device__ void sum_bf16(Reader<WeightFormat::kBF16>& reader, int steps, float (&sum)[kSums]) {
  using R = Ring<WeightFormat::kBF16>;
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    const uint32_t x = shared_address(reader.wait());
    const uint32_t w = x + R::kXBytes + threadIdx.x / kGroup * 64 * 128;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) wgmma_add(sum, matrix_k_major(w + k * 32), matrix_k_major(x + k * 32));
    wgmma_commit();
    if (step > 0) {
      wait_products<1>();
      reader.release(before);
    }
    before = reader.cursor.stage;
    reader.cursor.next();
  }
  wait_products<0>();
  reader.release(before);
}

// Widens one stage while the products of the one before run. Two stages an iteration, since fragments must have names
// that the compiler knows; the number of stages is even.
template <int kSums>
__device__ void sum_int4(Reader<WeightFormat::kInt4Group32>& reader, int steps, int row, float (&sum)[kSums]) {
  using R = Ring<WeightFormat::kInt4Group32>;
  uint32_t even[4][4], odd[4][4];
  const uint8_t* stage = reader.wait();
  widen_int4(stage + R::kXBytes, row, even);
  for (int step = 0; step < steps; step += 2) {
    multiply<WeightFormat::kInt4Group32>(sum, even, stage);
    const int first = reader.cursor.stage;
    reader.cursor.next();
    stage = reader.wait();
    widen_int4(stage + R::kXBytes, row, odd);
    wait_products<0>();
    reader.release(first);
    multiply<WeightFormat::kInt4Group32>(sum, odd, stage);
    const int second = reader.cursor.stage;
    reader.cursor.next();
    if (step + 2 < steps) {
      stage = reader.wait();
      widen_int4(stage + R::kXBytes, row, even);
    }
    wait_products<0>();
    reader.release(second);
  }
}

// Sums of 128 columns are scaled as they join the others: scales are those of this lane's two rows.
template <int kSums>
__device__ void sum_fp8(Reader<WeightFormat::kF8Block128>& reader, int chunks, int row, const float* const (&scales)[2],
                        float (&sum)[kSums]) {
  using R = Ring<WeightFormat::kF8Block128>;
  float next[2] = {__ldg(scales[0]), __ldg(scales[1])};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const float scale[2] = {next[0], next[1]};
    if (chunk + 1 < chunks) next[0] = __ldg(scales[0] + chunk + 1), next[1] = __ldg(scales[1] + chunk + 1);
    float part[kSums] = {};
    uint32_t even[4][4], odd[4][4];
    const uint8_t* stage = reader.wait();
    widen_fp8(stage + R::kXBytes, row, even);
    multiply<WeightFormat::kF8Block128>(part, even, stage);
    const int first = reader.cursor.stage;
    reader.cursor.next();
    stage = reader.wait();
    widen_fp8(stage + R::kXBytes, row, odd);
    multiply<WeightFormat::kF8Block128>(part, odd, stage);
    wait_products<0>();
    reader.release(first);
    reader.release(reader.cursor.stage);
    reader.cursor.next();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] += part[i] * scale[i / 2 % 2];
  }
}

__device__ __forceinline__ void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// 64 tokens from `first` sum on, to [token][64 or, joined, 32 rows of W] in shared memory; chunks of 8 rows lie at
// chunk ^ token % 8.
template <bool kSiluMul, int kSums>
__device__ __forceinline__ void stage_piece(const float (&sum)[kSums], int first, bool terms, uint32_t staging) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroup / 32;
#pragma unroll
  for (int j = 0; j < kPiece / 8; j += kSiluMul ? 4 : 2) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* s = sum + first + 4 * (kSiluMul ? j + i : j + i / 2);
      if constexpr (kSiluMul)
        r[i] = pack_pair(Bf16(), silu_mul(s[0], s[2]), silu_mul(s[1], s[3]));
      else
        r[i] = terms ? to_terms(s[i % 2 * 2], s[i % 2 * 2 + 1]) : pack_pair(Bf16(), s[i % 2 * 2], s[i % 2 * 2 + 1]);
    }
    const int token = 8 * (kSiluMul ? j + lane / 8 : j + lane / 16) + lane % 8;
    const int chunk = kSiluMul ? warp : 2 * warp + lane / 8 % 2;
    store_matrix_x4(staging + token * 128 + ((chunk ^ (token & 7)) << 4), r);
  }
}

template <bool kSiluMul, int kSums>
__device__ void store_tile(const GemmCall& c, const Tile& tile, const float (&sum)[kSums], uint8_t* staging,
                           const int* y_rows) {
  constexpr int kChunks = kSiluMul ? 4 : 8;  // of 16 bytes, of one token
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  const int column = (tile.feature + group * 64) / (kSiluMul ? 2 : 1) + thread % kChunks * 8;
  const int columns = kSiluMul ? c.out / 2 : c.out;
#pragma unroll
  for (int piece = 0; piece < kSums / 32; ++piece) {
    if (piece * kPiece >= tile.count) break;
    stage_piece<kSiluMul>(sum, piece * 32, c.output == GemmOutput::kTerm, shared_address(staging));
    named_barrier(1 + group, kGroup);
#pragma unroll
    for (int token = thread / kChunks; token < kPiece; token += kGroup / kChunks) {
      const int index = piece * kPiece + token;
      if (index >= tile.count || column >= columns) break;
      const int chunk = thread % kChunks;
      const uint4 value = *reinterpret_cast<const uint4*>(staging + token * 128 + ((chunk ^ (token & 7)) << 4));
      const int64_t row = y_rows[index];
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(c.y) + row * c.y_stride + column) = value;
    }
    named_barrier(1 + group, kGroup);
  }
}

// Sums as they are, from registers: eight lanes write 32 bytes of a token.
template <int kSums>
__device__ void store_f32(const GemmCall& c, const Tile& tile, const float (&sum)[kSums], int row) {
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int token = i / 4 * 8 + pair + i % 2, feature = tile.feature + row + i / 2 % 2 * 8;
    if (token < tile.count && feature < c.out)
      static_cast<float*>(c.y)[y_row(c, tile.begin + token) * c.y_stride + feature] = sum[i];
  }
}

template <WeightFormat kFormat, int kTokens>
__device__ __forceinline__ void do_tile(const GemmCall& c, const Tile& tile, Reader<kFormat>& reader) {
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup, lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 16 + lane / 4;  // of the tile: two warpgroups' eight warps have 16 each
  // Asked for now, needed after the products.
  int y_rows[kTokens / kGroup + 1];
#pragma unroll
  for (int i = 0; i * kGroup < kTokens; ++i)
    y_rows[i] = y_row(c, tile.begin + min(thread + i * kGroup, tile.count - 1));
  float sum[kTokens / 2] = {};
  if constexpr (kFormat == WeightFormat::kBF16) {
    sum_bf16(reader, c.chunks * 2, sum);
  } else if constexpr (kFormat == WeightFormat::kInt4Group32) {
    sum_int4(reader, c.chunks * 2, row, sum);
  } else {
    const float* scales[2];
    for (int half = 0; half < 2; ++half) {
      const int64_t block = min(tile.feature + row + 8 * half, c.out - 1) / 8;
      scales[half] =
          reinterpret_cast<const float*>(static_cast<const uint8_t*>(c.scale) + tile.expert * c.scale_stride) +
          block * c.chunks;
    }
    sum_fp8(reader, c.chunks, row, scales, sum);
  }
  if (c.output == GemmOutput::kF32) return store_f32(c, tile, sum, row);
  int* kept = reader.shared.y_rows[group];  // the warpgroup's own, read after its next barrier
#pragma unroll
  for (int i = 0; i * kGroup < kTokens; ++i) kept[thread + i * kGroup] = y_rows[i];
  if (c.output == GemmOutput::kSiluMul)
    store_tile<true>(c, tile, sum, reader.shared.staging[group], kept);
  else
    store_tile<false>(c, tile, sum, reader.shared.staging[group], kept);
}

template <WeightFormat kFormat>
__device__ void consume(const GemmCall& c, Shared<kFormat>& shared) {
  constexpr int kTokens = Ring<kFormat>::kTokens;
  Reader<kFormat> reader{shared, {}};
  for (Tiles tiles(c, kTokens); tiles.more(); tiles.next()) {
    const Tile& tile = tiles.tile;
    if (tile.count <= 64)
      do_tile<kFormat, 64>(c, tile, reader);
    else if (tile.count <= 128)
      do_tile<kFormat, 128>(c, tile, reader);
    else if constexpr (kTokens > 128) {
      if (tile.count <= 192)
        do_tile<kFormat, 192>(c, tile, reader);
      else
        do_tile<kFormat, 256>(c, tile, reader);
    }
  }
}

template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_kernel(const __grid_constant__ GemmCall c, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<kFormat>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Ring<kFormat>::kStages; ++i) {
      barrier_init(&shared.full[i], kGroup + 1);
      barrier_init(&shared.empty[i], 2 * kGroup / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  dependency_wait();
  dependency_trigger();
  if (threadIdx.x >= 2 * kGroup) {
    registers_shrink<104>();
    bring<kFormat>(c, map, shared);
  } else {
    registers_grow<200>();
    consume<kFormat>(c, shared);
  }
#endif
}

// Boxes of 64 columns by 128 rows of `matrices` packed matrices.
template <WeightFormat kFormat>
cudaError_t make_map(const GemmCall& c, int matrices, CUtensorMap* map) {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  const cudaError_t error = find_tensor_map_encoder(&encode);
  if (error != cudaSuccess) return error;
  constexpr bool kWide = kFormat == WeightFormat::kBF16;
  using R = Ring<kFormat>;
  const auto row_bytes = static_cast<cuuint64_t>(c.chunks * 2 * R::kRowBytes);
  const cuuint64_t sizes[3] = {kWide ? row_bytes / 2 : row_bytes, static_cast<cuuint64_t>(c.out),
                               static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {row_bytes,
                                 matrices > 1 ? static_cast<cuuint64_t>(c.weight_stride) : row_bytes * c.out};
  const cuuint32_t box[3] = {kWide ? 64 : R::kRowBytes, kFeatures, 1}, steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, kWide ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
             const_cast<uint8_t*>(c.weight), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             R::kInt4  ? CU_TENSOR_MAP_SWIZZLE_32B
             : R::kFp8 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <WeightFormat kFormat>
cudaError_t launch_hopper(const GemmCall& c, int matrices, cudaStream_t stream) {
  CUtensorMap map;
  const cudaError_t error = make_map<kFormat>(c, matrices, &map);
  if (error != cudaSuccess) return error;
  const int64_t blocks = device_limits().multiprocessors;
  const int items = c.items != nullptr ? c.max_items : (c.rows + Ring<kFormat>::kTokens - 1) / Ring<kFormat>::kTokens;
  const int64_t tiles = static_cast<int64_t>(items) * ((c.out + kFeatures - 1) / kFeatures);
  return launch(
      hopper_kernel<kFormat>,
      {dim3(static_cast<unsigned>(tiles < blocks ? tiles : blocks)), dim3(kThreads), sizeof(Shared<kFormat>), stream},
      c, map);
}

}  // namespace

bool hopper_gemm_fits(const GemmCall& c) {
  return c.heads == 1 && c.out % (c.output == GemmOutput::kSiluMul ? 16 : 8) == 0 && c.in % 8 == 0 &&
         c.x_stride % 8 == 0 && (c.y_stride % 8 == 0 || c.output == GemmOutput::kF32);
}

int hopper_item_rows(WeightFormat format) {
  return format == WeightFormat::kF8Block128 ? Ring<WeightFormat::kF8Block128>::kTokens
                                             : Ring<WeightFormat::kBF16>::kTokens;
}

cudaError_t hopper_gemm_prepare() {
  static_assert(sizeof(Shared<WeightFormat::kBF16>) <= 227 * 1024);
  static_assert(sizeof(Shared<WeightFormat::kInt4Group32>) <= 227 * 1024);
  static_assert(sizeof(Shared<WeightFormat::kF8Block128>) <= 227 * 1024);
  constexpr auto kBF16 = WeightFormat::kBF16, kInt4 = WeightFormat::kInt4Group32, kFp8 = WeightFormat::kF8Block128;
  for (const cudaError_t error : {allow_shared(hopper_kernel<kBF16>, sizeof(Shared<kBF16>)),
                                  allow_shared(hopper_kernel<kInt4>, sizeof(Shared<kInt4>)),
                                  allow_shared(hopper_kernel<kFp8>, sizeof(Shared<kFp8>))})
    if (error != cudaSuccess) return error;
  return cudaSuccess;
}

cudaError_t hopper_gemm(WeightFormat format, const GemmCall& call, int matrices, cudaStream_t stream) {
  switch (format) {
    case WeightFormat::kInt4Group32: return launch_hopper<WeightFormat::kInt4Group32>(call, matrices, stream);
    case WeightFormat::kF8Block128: return launch_hopper<WeightFormat::kF8Block128>(call, matrices, stream);
    default: return launch_hopper<WeightFormat::kBF16>(call, matrices, stream);
  }
}

}  // namespace perigee
