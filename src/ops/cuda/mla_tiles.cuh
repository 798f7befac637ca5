// The key tiles that a block of an MLA attention kernel walks over, as its work list says.
#pragma once

#include "ops/cuda/mla_plan.cuh"

namespace perigee {

// The key tiles of this block's items, in order; `page` is fetched one tile ahead of its use.
template <int kTokens>
struct TileStream {
  const MlaAttendParams& params;
  int item, item_end;
  int sequence = 0, token = 0, token_end = 0, length = 0, num_new = 0, page = 0, position = 0;

  __device__ TileStream(const MlaAttendParams& p, int2 items) : params(p), item(items.x), item_end(items.y) { open(); }
  __device__ bool done() const { return item >= item_end; }
  // Whether all its keys are older than this step: then it may be read before the kernel in front is complete.
  __device__ bool settled() const { return position + kTokens <= length - num_new; }
  __device__ void open() {
    if (done()) return;
    const MlaItem& next = params.plan.items[item];
    sequence = next.sequence;
    token = next.block_begin * kMlaBlock;
    token_end = next.block_end * kMlaBlock;
    length = next.length;
    num_new = next.num_tokens;
    fetch();
  }
  __device__ void fetch() {
    const int64_t at = static_cast<int64_t>(sequence) * params.batch.table_width + token / kMlaBlock;
    const int block = params.batch.block_index ? params.batch.block_index[at] : token / kMlaBlock;
    page = params.batch.block_table[at];
    position = block * kMlaBlock + token % kMlaBlock;
  }
  __device__ void next() {
    token += kTokens;
    if (token < token_end) {
      fetch();
    } else {
      ++item;
      open();
    }
  }
};

// Position of a block's first token, from its place in the table.
__device__ __forceinline__ int block_position(const MlaBatch& batch, int sequence, int block) {
  return (batch.block_index ? batch.block_index[static_cast<int64_t>(sequence) * batch.table_width + block] : block) *
         kMlaBlock;
}

}  // namespace perigee
