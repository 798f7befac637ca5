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
};

enum class ShardKind : uint8_t {
  kWhole,       // every rank keeps all of it
  kRows,        // outputs; of a vector, its elements
  kColumns,     // inputs: the products of the ranks add up to the whole
  kHeads,       // rows (of a vector, elements) in equal runs, one for each attention head; cut between heads
  kVocabulary,  // rows, one for each token id
};

// How a tensor is cut. There is no default: who declares a tensor decides.
class Shard {
 public:
  static constexpr Shard whole() { return Shard(ShardKind::kWhole, 0); }
  static constexpr Shard rows() { return Shard(ShardKind::kRows, 0); }
  static constexpr Shard columns() { return Shard(ShardKind::kColumns, 0); }
  static constexpr Shard heads(int64_t count) { return Shard(ShardKind::kHeads, count); }
  static constexpr Shard vocabulary() { return Shard(ShardKind::kVocabulary, 0); }
  constexpr ShardKind kind() const { return kind_; }
  constexpr int64_t num_heads() const { return num_heads_; }

 private:
  constexpr Shard(ShardKind kind, int64_t num_heads) : kind_(kind), num_heads_(num_heads) {}
  ShardKind kind_;
  int64_t num_heads_;
};

// A range of rows and columns. Vectors are one row.
struct MatrixPart {
  int64_t first_row = 0, rows = 0, first_column = 0, columns = 0;
};

// Requires that check_shards() passed.
MatrixPart part_of(const TensorSpec& spec, const TensorParallel& ranks);
// `m`, which is all of a tensor, cut to `part`.
RawMatrix window(const RawMatrix& m, const MatrixPart& part);

// Whether every tensor divides evenly among `size` ranks; heads are not cut, nor are the 8 columns in a word of INT4.
// Errors name the tensor, its dimension and the sizes that divide all. Requires that `source` verified `specs`.
Status check_shards(std::span<const TensorSpec> specs, const TensorSource& source, int64_t size);
// The bytes of what a rank keeps.
int64_t part_bytes(std::span<const TensorSpec> specs, const TensorSource& source, const TensorParallel& ranks);

}  // namespace perigee
