// Which blocks of a sequence lie here, where a group of ranks shares them.
#pragma once

#include "ops/batch.h"

namespace perigee {

// How many of the `count` ascending block numbers in `index` come before `block`.
__device__ inline int blocks_before(const int32_t* index, int count, int block) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (index[middle] < block) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Of a sequence of the batch, all blocks that lie here and which these are.
struct IndexHere {
  const int32_t* index;
  int count;

  __device__ IndexHere(const DeviceSequences& sequences, int sequence)
      : index(sequences.block_index + static_cast<int64_t>(sequence) * sequences.table_width),
        count(sequences.local_blocks[sequence]) {}
  __device__ int before(int block) const { return blocks_before(index, count, block); }
};

}  // namespace perigee
