// The key tiles that a block of an MLA attention kernel walks over, as its work list says.
#pragma once

#include "ops/cuda/mla_plan.cuh"

namespace perigee {

// The key tiles of this block's items, in order. A page is looked up one block before its first use.
template <int kTokens>
struct TileStream {
  const MlaAttendParams& params;
  int item, item_end;
  int64_t entry = 0;  // of the table: the sequence's row and the block
  int token = 0, token_end = 0, length = 0, num_new = 0;
  int page = 0, position = 0;  // of the tile
  int next_page = 0, next_position = 0;

  __device__ TileStream(const MlaAttendParams& p, int2 items) : params(p), item(items.x), item_end(items.y) { open(); }
  __device__ bool done() const { return item >= item_end; }
  // Whether all its keys are older than this step: then it may be read before the kernel in front is complete.
  __device__ bool settled() const { return position + kTokens <= length - num_new; }
  __device__ void open() {
    if (done()) return;
    const MlaItem& next = params.plan.items[item];
    token = next.block_begin * kMlaBlock;
    token_end = next.block_end * kMlaBlock;
    length = next.length;
    num_new = next.num_tokens;
    entry = static_cast<int64_t>(next.sequence) * params.batch.table_width + next.block_begin;
    look_up(token);
    enter_block();
  }
  // The block that begins at `first` (place in the table, not position).
  __device__ void look_up(int first) {
    next_page = params.batch.block_table[entry];
    next_position = params.batch.block_index ? params.batch.block_index[entry] * kMlaBlock : first;
    ++entry;
  }
  __device__ void enter_block() {
    page = next_page;
    position = next_position;
    if (token + kMlaBlock < token_end) look_up(token + kMlaBlock);
  }
  __device__ void next() {
    token += kTokens;
    position += kTokens;
    if (token >= token_end) {
      ++item;
      open();
    } else if (token % kMlaBlock == 0) {
      enter_block();
    }
  }
};

// Position of a block's first token, from its place in the table.
__device__ __forceinline__ int block_position(const MlaBatch& batch, int sequence, int block) {
  return (batch.block_index ? batch.block_index[static_cast<int64_t>(sequence) * batch.table_width + block] : block) *
         kMlaBlock;
}

}  // namespace perigee
