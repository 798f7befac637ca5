// The work lists of MLA decode as they lie in the workspace; made by mla_plan, read by the attention kernels.
#pragma once

#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/mma.cuh"

namespace perigee {

// One row tile over key blocks [block_begin, block_end) of its sequence (places in the table). They are read from
// block_first to the end and then from the beginning.
struct alignas(16) MlaItem {
  int32_t sequence;
  int32_t row_begin;  // first query row of the tile; row = token of the sequence * heads + head
  int32_t block_begin;
  int32_t block_end;
  int32_t block_first;
  int32_t partial;      // where the partial result goes; -1: the item is the whole row tile and writes the output
  int32_t length;       // tokens of the sequence
  int32_t first_token;  // batch row of the sequence's first query token
  int32_t num_tokens;
};

// A row tile whose partial results must be joined; none at all (count 0): its rows get 0 and -inf.
struct alignas(16) MlaJoin {
  int32_t out_row;  // of its first row: batch row * heads + head
  int32_t rows;
  int32_t first_partial;
  int32_t count;
};

struct MlaPlan {
  MlaItem* items;          // [max_partials]
  int2* slot_items;        // [slots] first and last + 1 item
  MlaJoin* joins;          // [max_tiles]: those of few partials from the front, of many from the back
  int32_t* num_joins;      // [2] few, many
  float* partial_lse;      // [max_partials][rows]
  uint16_t* partial_mean;  // [max_partials][rows][512], f16 as in result_row.h
};

struct MlaPlanLayout {
  size_t slot_items, joins, num_joins, partial_lse, partial_mean, end;
};

inline MlaPlanLayout mla_plan_layout(const MlaDecodeConfig& c) {
  const auto align = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  MlaPlanLayout at{};
  at.slot_items = align(c.max_partials * sizeof(MlaItem));
  at.joins = at.slot_items + align(c.slots * sizeof(int2));
  at.num_joins = at.joins + align(c.max_tiles * sizeof(MlaJoin));
  at.partial_lse = at.num_joins + align(2 * sizeof(int32_t));
  at.partial_mean = at.partial_lse + align(c.max_partials * c.rows * sizeof(float));
  at.end = at.partial_mean + static_cast<size_t>(c.max_partials) * c.rows * kMlaLatent * sizeof(uint16_t);
  return at;
}

inline MlaPlan mla_plan_view(const MlaDecodeConfig& config, void* workspace) {
  const MlaPlanLayout at = mla_plan_layout(config);
  char* base = static_cast<char*>(workspace);
  return {reinterpret_cast<MlaItem*>(base),
          reinterpret_cast<int2*>(base + at.slot_items),
          reinterpret_cast<MlaJoin*>(base + at.joins),
          reinterpret_cast<int32_t*>(base + at.num_joins),
          reinterpret_cast<float*>(base + at.partial_lse),
          reinterpret_cast<uint16_t*>(base + at.partial_mean)};
}

// Two means, of the f16 of a result, as bf16. Outputs come from it even where nothing is joined: a row that sees keys
// of one piece alone gets the same bits whether there are other pieces or not.
__device__ __forceinline__ uint32_t mean_to_bf16(uint32_t means) {
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&means));
  return pack_pair(Bf16(), kMeanUnit * x.x, kMeanUnit * x.y);
}

// From sixteenths of two means.
template <bool kF16>
__device__ __forceinline__ uint32_t pack_means(float x, float y) {
  const uint32_t means = pack_pair(F16(), x, y);
  return kF16 ? means : mean_to_bf16(means);
}

// What an attention kernel is launched with.
struct MlaAttendParams {
  MlaPlan plan;
  MlaBatch batch;
  MlaDecodeArgs args;
  int heads;
};

// Where an item's rows go: to partial results; as whole row tiles to results, or to the output [token * heads + head].
struct MlaItemOutput {
  uint16_t* at;  // the item's first row
  int stride;
  bool is_f16;  // of result_row.h; else bf16

  __device__ __forceinline__ MlaItemOutput(const MlaAttendParams& params, const MlaItem& item, int tile_rows) {
    const int64_t row = static_cast<int64_t>(item.first_token) * params.heads + item.row_begin;
    is_f16 = item.partial >= 0 || params.args.results;
    stride = item.partial < 0 && is_f16 ? kMlaResult : kMlaLatent;
    if (item.partial >= 0) {
      at = params.plan.partial_mean + static_cast<int64_t>(item.partial) * tile_rows * kMlaLatent;
    } else {
      at = (is_f16 ? params.args.results : static_cast<uint16_t*>(params.args.out)) + row * stride;
    }
  }

  __device__ __forceinline__ uint16_t* row(int i) const { return at + i * stride; }
};

// The log-sum-exp of row `row` of an item; `exists`: the row is none of those that fill up a row tile.
__device__ __forceinline__ void store_lse(const MlaAttendParams& params, const MlaItem& item, int tile_rows, int row,
                                          bool exists, float lse) {
  const int64_t at = static_cast<int64_t>(item.first_token) * params.heads + item.row_begin + row;
  if (item.partial >= 0) {
    params.plan.partial_lse[static_cast<int64_t>(item.partial) * tile_rows + row] = lse;
  } else if (exists && params.args.results) {
    *reinterpret_cast<float4*>(params.args.results + at * kMlaResult + kMlaLatent) = make_float4(lse, 0, 0, 0);
  } else if (exists && params.args.lse) {
    params.args.lse[at] = lse;
  }
}

// The attention kernels, each in a file of its own.
cudaError_t mla_mma_prepare();
cudaError_t mla_mma_launch(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream);
cudaError_t mla_wgmma_prepare();
cudaError_t mla_wgmma_launch(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream);
cudaError_t mla_wgmma_fp8_prepare();
cudaError_t mla_wgmma_fp8_launch(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream);

}  // namespace perigee
