#include "ops/cuda/choose.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"

namespace perigee {
namespace {

// FP8 matrices: up to kMaxSkinnyFp8Rows rows, reading one twice costs less than widening it. From kMinDirectOutputs
// outputs on, and up to kMaxDirectRows rows, our own tiles beat both.
constexpr int32_t kMaxSkinnyFp8Rows = 64, kMinDirectOutputs = 6144, kMaxDirectRows = 512;
// Deterministic mode: above, ordered_gemm is faster than further passes of skinny_gemm; of experts, on average of each.
constexpr int32_t kMinOrderedRows = 128;
constexpr int64_t kOrderedPairs = 32;
// Up to so many pairs, sorting them costs more than reading an expert twice.
constexpr int64_t kUnsortedPairs = 16;
// Pairs of an expert on average: from kHopperPairs on a warpgroup's tile pays, above kTilePairs a portable tile.
constexpr int64_t kHopperPairs = 8, kTilePairs = 40;
// Pairs of an expert on average up to which items of 8, of 16 rows serve best.
constexpr int64_t kPairsOf8 = 6, kPairsOf16 = 14;

int item_rows(int32_t rows) {
  return rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
}

int32_t max_skinny_rows(const GemmShape& shape) {
  const bool fp8 = shape.format == WeightFormat::kF8Block128 && !shape.silu_mul;
  return fp8 && shape.out < kMinDirectOutputs ? kMaxSkinnyFp8Rows : kMaxSkinnyRows;
}

// The library cannot join gate and up.
bool library_fits(const GemmShape& shape, const KernelTraits& traits) {
  return traits.library && shape.rows > kMaxSkinnyRows && !shape.silu_mul;
}

// Widening reads and writes five times the matrix's bytes and rounds its elements once more: for many rows, or where
// our own tiles are too few to fill the GPU.
bool widening_pays(const GemmShape& shape) {
  return shape.rows > kMaxDirectRows || (shape.rows > kMaxSkinnyFp8Rows && shape.out < kMinDirectOutputs);
}

}  // namespace

bool ordered_gemm_has(WeightFormat format) {
  return format == WeightFormat::kBF16 || format == WeightFormat::kF8Block128;
}

GemmChoice choose_own_gemm(const GemmShape& shape, const KernelTraits& traits) {
  if (traits.deterministic && shape.rows > kMinOrderedRows && ordered_gemm_has(shape.format))
    return {.kernel = GemmKernel::kOrdered};
  if (traits.deterministic || shape.rows <= max_skinny_rows(shape))
    return {.kernel = GemmKernel::kSkinny, .item_rows = item_rows(shape.rows)};
  return {.kernel = traits.wgmma_products() && shape.aligned ? GemmKernel::kHopper : GemmKernel::kTile};
}

GemmChoice choose_gemm(const GemmShape& shape, const KernelTraits& traits) {
  const bool fp8 = shape.format == WeightFormat::kF8Block128;
  if (library_fits(shape, traits) && (!fp8 || widening_pays(shape)))
    return {.kernel = GemmKernel::kLibrary, .widen = fp8};
  return choose_own_gemm(shape, traits);
}

bool choose_separate_silu(WeightFormat format, int64_t rows, const KernelTraits& traits) {
  return traits.library && format == WeightFormat::kBF16 && rows > kMaxSkinnyRows;
}

bool choose_joined_kda_gates(WeightFormat decay, WeightFormat gate, int64_t rows) {
  return rows <= kMaxSkinnyRows && decay == WeightFormat::kBF16 && gate == WeightFormat::kBF16;
}

int64_t first_hopper_pairs(int64_t num_experts, const KernelTraits& traits) {
  return traits.wgmma_products() ? std::max(kHopperPairs * num_experts, kUnsortedPairs + 1) : INT64_MAX;
}

// Few pairs of an expert read its weights at memory speed; many are bound by the products.
ExpertChoice choose_experts(WeightFormat format, int64_t num_pairs, int64_t num_experts, const KernelTraits& traits) {
  const int64_t average = num_pairs / num_experts;
  if (num_pairs <= kUnsortedPairs) return {.sorted = false};
  if (num_pairs >= first_hopper_pairs(num_experts, traits)) return {.kernel = GemmKernel::kHopper, .item_rows = 0};
  if (traits.deterministic && average > kOrderedPairs && ordered_gemm_has(format))
    return {.kernel = GemmKernel::kOrdered, .item_rows = kOrderedRows};
  if (!traits.deterministic && average > kTilePairs) return {.kernel = GemmKernel::kTile, .item_rows = kTileRows};
  return {.item_rows = average <= kPairsOf8 ? kLeastItemRows : average <= kPairsOf16 ? 16 : 32};
}

MlaKernel choose_mla_decode(const MlaDecodeRows& rows) {
  // Records are widened in one kernel, which time goes into, whatever the number of rows.
  const bool few = rows.heads * rows.max_query <= 16 && rows.format != LatentFormat::kF8Tiles;
  if (!rows.fixed && few) return MlaKernel::kMma16;
  return rows.compute_capability == 90 ? MlaKernel::kWgmma64 : MlaKernel::kMma32;
}

PrefillKernel choose_mla_prefill(int64_t nope, int64_t value, int compute_capability) {
  const bool hopper = compute_capability == 90;
  if (nope == 128 && value == 128) return hopper ? PrefillKernel::kWgmma192 : PrefillKernel::kMma192;
  if (nope == 192 && value == 256) return hopper ? PrefillKernel::kWgmma256 : PrefillKernel::kMma256;
  return PrefillKernel::kNone;
}

const char* name(GemmKernel kernel) {
  switch (kernel) {
    case GemmKernel::kSkinny: return "skinny";
    case GemmKernel::kOrdered: return "ordered";
    case GemmKernel::kTile: return "tile";
    case GemmKernel::kHopper: return "hopper";
    case GemmKernel::kLibrary: return "cublaslt";
  }
  return "";
}

const char* name(MlaKernel kernel) {
  switch (kernel) {
    case MlaKernel::kMma16: return "mma16";
    case MlaKernel::kMma32: return "mma32";
    case MlaKernel::kWgmma64: return "wgmma64";
  }
  return "";
}

const char* name(PrefillKernel kernel) {
  switch (kernel) {
    case PrefillKernel::kNone: return "none";
    case PrefillKernel::kMma192: return "mla_prefill mma 192/128";
    case PrefillKernel::kMma256: return "mla_prefill mma 256/256";
    case PrefillKernel::kWgmma192: return "mla_prefill wgmma 192/128";
    case PrefillKernel::kWgmma256: return "mla_prefill wgmma 256/256";
  }
  return "";
}

std::string choices_text(const KernelTraits& traits) {
  constexpr std::array kRows = {1, 8, 16, 32, 33, 64, 65, 128, 129, 512, 513, 8192};
  std::string out = fmt::format("compute capability {}{}{}\n", traits.compute_capability,
                                traits.library ? ", cuBLASLt" : "", traits.deterministic ? ", deterministic" : "");
  // A line for each run of row counts with one choice.
  const auto runs = [&](const char* what, const auto& text_of) {
    std::string last;
    for (const int rows : kRows) {
      const std::string text = text_of(rows);
      if (text != last) out += fmt::format("{}, from {}{}{}\n", what, rows, rows == 1 ? " row: " : " rows: ", text);
      last = text;
    }
  };
  const auto gemm = [&](WeightFormat format, int32_t outputs, bool silu_mul) {
    return [&traits, format, outputs, silu_mul](int rows) {
      const GemmChoice c = choose_gemm({.format = format, .rows = rows, .out = outputs, .silu_mul = silu_mul}, traits);
      std::string text = fmt::format("{}{}", c.widen ? "widened, " : "", name(c.kernel));
      return c.kernel == GemmKernel::kSkinny ? fmt::format("{} by {}", text, c.item_rows) : text;
    };
  };
  const auto experts = [&](WeightFormat format) {
    return [&traits, format](int rows) {
      const ExpertChoice c = choose_experts(format, 8 * int64_t{rows}, 64, traits);
      return fmt::format("{}{}{}", name(c.kernel), c.sorted ? "" : " unsorted",
                         c.item_rows > 0 ? fmt::format(" by {}", c.item_rows) : "");
    };
  };
  runs("bf16", gemm(WeightFormat::kBF16, 2048, false));
  runs("FP8, 2048 outputs", gemm(WeightFormat::kF8Block128, 2048, false));
  runs("FP8, 8192 outputs", gemm(WeightFormat::kF8Block128, 8192, false));
  runs("FP8, gate and up", gemm(WeightFormat::kF8Block128, 8192, true));
  runs("8 of 64 experts, INT4", experts(WeightFormat::kInt4Group32));
  runs("8 of 64 experts, FP8", experts(WeightFormat::kF8Block128));
  const int capability = traits.compute_capability;
  for (const int heads : {8, 16, 64})
    out += fmt::format(
        "MLA decode, {} heads: {}\n", heads,
        name(choose_mla_decode({.heads = heads, .fixed = traits.deterministic, .compute_capability = capability})));
  for (const auto& [nope, value] : {std::pair{128, 128}, std::pair{192, 256}})
    out += fmt::format("MLA prefill, {} and {} columns: {}\n", nope, value,
                       traits.deterministic ? "absorbed" : name(choose_mla_prefill(nope, value, capability)));
  return out;
}

}  // namespace perigee
