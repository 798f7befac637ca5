// Where the blocks of one sequence lie, for kernels around a step.
#pragma once

#include "ops/cuda/mla/blocks_here.cuh"

namespace perigee {

// The blocks of a sequence that lie here.
struct BlocksHere {
  const int32_t* pages;
  const int32_t* index;  // which these are, ascending; null: all
  int count;

  // How many come before `block`.
  __device__ int before(int block) const { return index == nullptr ? block : blocks_before(index, count, block); }
  __device__ int page(int block) const {
    if (index == nullptr) return pages[block];
    const int at = before(block);
    return at < count && index[at] == block ? pages[at] : -1;
  }
};

}  // namespace perigee
