#include "model/shard.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "model/weights.h"

namespace perigee {
namespace {

// What is dealt to the ranks: so many equal units of a dimension. 0: nothing is.
struct Units {
  int64_t count = 0;
  const char* what = "";
};

Units units_of(const TensorSpec& spec, WeightFormat format) {
  switch (spec.shard.kind()) {
    case ShardKind::kWhole:
    case ShardKind::kOneRank: break;
    case ShardKind::kHeads: return {spec.shard.num_heads(), "heads"};
    case ShardKind::kRows: return {is_vector(spec.role) ? spec.in : spec.out, is_vector(spec.role) ? "values" : "rows"};
    case ShardKind::kVocabulary: return {spec.out, "rows of the vocabulary"};
    case ShardKind::kColumns:
      if (format == WeightFormat::kInt4Group32) return {spec.in / 8, "words of 8 INT4 columns"};
      return {spec.in, "columns"};
  }
  return {};
}

std::string divisors_text(int64_t n) {
  std::string text;
  for (int64_t size = 1; size <= n; ++size)
    if (n % size == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", size);
  return text;
}

}  // namespace

Dealt dealt(int64_t count, const TensorParallel& ranks) {
  const int64_t each = count / ranks.size, more = count % ranks.size;
  return {.first = ranks.rank * each + std::min(ranks.rank, more), .count = each + (ranks.rank < more ? 1 : 0)};
}

MatrixPart part_of(const TensorSpec& spec, const TensorParallel& ranks) {
  MatrixPart part{.rows = spec.out, .columns = spec.in};
  const ShardKind kind = spec.shard.kind();
  if (kind == ShardKind::kWhole) return part;
  if (kind == ShardKind::kOneRank) return spec.shard.is_of(ranks) ? part : MatrixPart();
  const bool by_columns = kind == ShardKind::kColumns || is_vector(spec.role);
  int64_t& first = by_columns ? part.first_column : part.first_row;
  int64_t& count = by_columns ? part.columns : part.rows;
  CHECK(count % ranks.size == 0, "tensor ", spec.name, ": ", count, " among ", ranks.size, " ranks");
  count /= ranks.size;
  first = ranks.rank * count;
  return part;
}

RawMatrix window(const RawMatrix& m, const MatrixPart& part) {
  return window(m, part.first_row, part.rows, part.first_column, part.columns);
}

Status check_shards(std::span<const TensorSpec> specs, const TensorSource& source, int64_t size) {
  int64_t common = 0;
  for (const TensorSpec& spec : specs) common = std::gcd(common, units_of(spec, source.format(spec)).count);
  for (const TensorSpec& spec : specs)
    if (spec.shard.kind() == ShardKind::kOneRank && spec.shard.num_tensors() < size)
      return bad_input(fmt::format("--enable-expert-parallel: {} experts are too few for {} ranks, which each take at "
                                   "least one; without it every rank takes a share of each expert",
                                   spec.shard.num_tensors(), size),
                       "enable-expert-parallel");
  if (common % size == 0) return {};
  for (const TensorSpec& spec : specs) {
    const Units units = units_of(spec, source.format(spec));
    if (units.count % size == 0) continue;
    return bad_input(
        fmt::format("--tensor-parallel-size {}: tensor {}: {} {} do not divide among {} ranks; every tensor of this "
                    "model divides among {}",
                    size, spec.name, units.count, units.what, size, divisors_text(common)),
        "tensor-parallel-size");
  }
  return {};
}

int64_t part_bytes(std::span<const TensorSpec> specs, const TensorSource& source, const TensorParallel& ranks) {
  int64_t total = 0;
  for (const TensorSpec& spec : specs) {
    const RawMatrix whole{.format = source.format(spec), .out = spec.out, .in = spec.in};
    total += raw_bytes(window(whole, part_of(spec, ranks)));
  }
  return total;
}

}  // namespace perigee
