// What ranks that share the blocks of each sequence do with data around the exchanges of attention; see
// ops/shared_attention.cc. Device pointers; `ranks` of a dcp group.
#pragma once

#include <cuda_runtime.h>

#include "ops/batch.h"
#include "tensor/tensor.h"

namespace perigee {

inline constexpr int64_t kPieceBlocks = 128;  // of a sequence's cached rows that are gathered at once, at most

// Queries of each rank's heads [ranks][n, w] bf16 -> of all heads, [n, ranks * w].
cudaError_t join_queries(const uint16_t* by_rank, int ranks, const Tensor& all, cudaStream_t stream);

// to[i] is the rank of the heads that row i of [n, ranks * heads] belongs to.
cudaError_t list_owners(int32_t* to, int64_t count, int heads, int ranks, cudaStream_t stream);

// Results as Comm::all_to_all deals them.
inline Tensor as_words(Tensor results) {
  results.dtype = DType::kF32;
  results.cols /= 2, results.row_stride /= 2;
  return results;
}
// whole [n, ranks * result_columns(L)], the rows of each rank (result_row.h) side by side -> y [n, L] bf16:
// sum_r exp(lse_r) mean_r / sum_r exp(lse_r), in the order of the ranks. A rank that saw nothing (-inf) is left out,
// whatever its mean holds; infinities and NaN show.
cudaError_t merge_results(const Tensor& whole, int ranks, const Tensor& y, cudaStream_t stream);

// Of blocks [begin, end) of a sequence those that lie here: rows as they are cached, then the numbers of the blocks, -1
// beyond the last. What one rank gives has room for `most` blocks.
struct BlockPiece {
  int32_t begin = 0, end = 0, most = 0;

  constexpr int64_t numbers_at(const LatentLayer& cache) const { return most * kRowsOfBlock * cache.row_bytes; }
  constexpr int64_t bytes(const LatentLayer& cache) const { return numbers_at(cache) + (most * 4 + 15) / 16 * 16; }
};
cudaError_t take_blocks(const DeviceSequences& sequences, int sequence, const BlockPiece& piece,
                        const LatentLayer& cache, uint8_t* to, cudaStream_t stream);
// The pieces of all ranks -> y[i] = the cached row of position 64 * begin + i, bf16 [keys, L + dr].
cudaError_t spread_blocks(const uint8_t* pieces, int ranks, const BlockPiece& piece, const LatentLayer& cache,
                          int64_t latent, const Tensor& y, cudaStream_t stream);

}  // namespace perigee
