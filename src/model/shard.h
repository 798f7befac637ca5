// Shards: which part of each tensor a rank of a tensor-parallel group keeps (Megatron-LM, Shoeybi et al. 2019). Each
// rank takes an equal, contiguous range; the sums of partial products are all-reduced at two points of a layer.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "ops/weights.h"

namespace perigee {

class TensorSource;
struct TensorSpec;

struct TensorParallel {
  int64_t rank = 0, size = 1;
  bool whole_experts = false;  // each expert is one rank's (expert parallel); else every rank has a share of all
};

// Which of `count` equal things, in a row, are a rank's. Where they do not divide, the first ranks have one more.
struct Dealt {
  int64_t first = 0, count = 0;
};
Dealt dealt(int64_t count, const TensorParallel& ranks);

enum class ShardKind : uint8_t {
  kWhole,       // every rank keeps all of it
  kRows,        // outputs; of a vector, its elements
  kColumns,     // inputs: the products of the ranks add up to the whole
  kHeads,       // rows (of a vector, elements) in equal runs, one for each attention head; cut between heads
  kVocabulary,  // rows, one for each token id
  kOneRank,     // one rank keeps all of it: of tensors that are alike, dealt() to the ranks
};

// How a tensor is cut. There is no default: who declares a tensor decides.
class Shard {
 public:
  static constexpr Shard whole() { return Shard(ShardKind::kWhole, 0); }
  static constexpr Shard rows() { return Shard(ShardKind::kRows, 0); }
  static constexpr Shard columns() { return Shard(ShardKind::kColumns, 0); }
  static constexpr Shard heads(int64_t count) { return Shard(ShardKind::kHeads, count); }
  static constexpr Shard vocabulary() { return Shard(ShardKind::kVocabulary, 0); }
  // The tensor `index` of `count`.
  static constexpr Shard one_rank(int64_t index, int64_t count) { return Shard(ShardKind::kOneRank, count, index); }
  constexpr ShardKind kind() const { return kind_; }
  constexpr int64_t num_heads() const { return count_; }
  // Of kOneRank: whether the rank has it.
  bool is_of(const TensorParallel& ranks) const {
    const Dealt mine = dealt(count_, ranks);
    return index_ >= mine.first && index_ < mine.first + mine.count;
  }
  constexpr int64_t num_tensors() const { return count_; }

 private:
  constexpr Shard(ShardKind kind, int64_t count, int64_t index = 0) : kind_(kind), count_(count), index_(index) {}
  ShardKind kind_;
  int64_t count_, index_;
};

// A range of rows and columns, none where a rank has nothing of a tensor. Vectors are one row.
struct MatrixPart {
  int64_t first_row = 0, rows = 0, first_column = 0, columns = 0;
};

// Requires that check_shards() passed.
MatrixPart part_of(const TensorSpec& spec, const TensorParallel& ranks);
// `m`, which is all of a tensor, cut to `part`.
RawMatrix window(const RawMatrix& m, const MatrixPart& part);

// Whether every tensor divides evenly among `size` ranks; heads are not cut, nor are the 8 columns in a word of INT4.
// Whole tensors that are dealt need not divide; each rank gets one. Errors name the tensor, its dimension and the sizes
// that divide all. Requires that `source` verified `specs`.
Status check_shards(std::span<const TensorSpec> specs, const TensorSource& source, int64_t size);
// The bytes of what a rank keeps.
int64_t part_bytes(std::span<const TensorSpec> specs, const TensorSource& source, const TensorParallel& ranks);

}  // namespace perigee
