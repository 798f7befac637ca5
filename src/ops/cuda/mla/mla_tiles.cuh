// The key tiles that a block of an MLA attention kernel walks over, as its work list says. Lists, tables and keys are
// written by earlier kernels of the step: all of it after dependency_wait().
#pragma once

#include "ops/cuda/mla/mla_plan.cuh"

namespace perigee {

// The key tiles of this block's items, in order. A page is looked up one block before its first use.
template <int kTokens>
struct TileStream {
  const MlaAttendParams& params;
  int item, item_end;
  int row = 0;  // of the table: its first entry
  int block_begin = 0, block_end = 0;
  int ahead = 0, left = 0;  // the block looked up; blocks of the item after the tile's
  int length = 0;
  int page = 0, position = 0;  // of the tile; its block begins at a multiple of 64
  int next_page = 0, next_position = 0;

  __device__ TileStream(const MlaAttendParams& p, int2 items) : params(p), item(items.x), item_end(items.y) { open(); }
  __device__ bool done() const { return item >= item_end; }
  __device__ void open() {
    if (done()) return;
    const MlaItem& next = params.plan.items[item];
    block_begin = next.block_begin, block_end = next.block_end;
    length = next.length;
    row = next.sequence * params.batch.table_width;
    ahead = next.block_first, left = block_end - block_begin;
    look_up();
    enter_block();
  }
  __device__ void look_up() {
    next_page = params.batch.block_table[row + ahead];
    next_position = (params.batch.block_index ? params.batch.block_index[row + ahead] : ahead) * kMlaBlock;
  }
  __device__ void enter_block() {
    page = next_page;
    position = next_position;
    if (--left == 0) return;
    if (++ahead == block_end) ahead = block_begin;
    look_up();
  }
  __device__ void next() {
    position += kTokens;
    if (position % kMlaBlock != 0) return;
    if (left > 0) {
      enter_block();
    } else {
      ++item;
      open();
    }
  }
};

// The i-th block of an item that is read.
__device__ __forceinline__ int item_block(const MlaItem& item, int i) {
  const int block = item.block_first + i;
  return block < item.block_end ? block : block - (item.block_end - item.block_begin);
}

// Position of a block's first token, from its place in the table.
__device__ __forceinline__ int block_position(const MlaBatch& batch, int sequence, int block) {
  return (batch.block_index ? batch.block_index[static_cast<int64_t>(sequence) * batch.table_width + block] : block) *
         kMlaBlock;
}

}  // namespace perigee
