// Which kernel runs: every choice between kernels that give the same result, as pure functions of shapes and of the
// GPU.
//
// Thresholds stand here and nowhere else; docs/results/cuda.md has what they were measured by. No CUDA header, so the
// choices are tested on machines without a GPU (choose_test.cc), and choices_text() prints them.
#pragma once

#include <cstdint>
#include <string>

#include "ops/latent_format.h"
#include "ops/weights.h"

namespace perigee {

// What choices depend on besides shapes.
struct KernelTraits {
  int compute_capability = 0;  // 80, 90, 120 ...; 80 where the portable kernels are asked for
  bool deterministic = false;  // a row's bits do not depend on the number of rows
  bool library = false;        // cuBLASLt is loaded

  // wgmma kernels sum in another order than those of deterministic mode.
  bool wgmma_products() const { return compute_capability == 90 && !deterministic; }
};

// --- Matrix products ---

constexpr int kMaxSkinnyRows = 32;  // of one pass over the weights by skinny_gemm
constexpr int kOrderedRows = 96;    // rows of x in a tile of ordered_gemm
constexpr int kTileRows = 128;      // the same of tile_gemm

enum class GemmKernel : uint8_t { kSkinny, kOrdered, kTile, kHopper, kLibrary };

struct GemmShape {
  WeightFormat format = WeightFormat::kBF16;  // kBF16 or kF8Block128
  int32_t rows = 0, out = 0;
  bool silu_mul = false;  // the output is SiLU(gate) * up of interleaved rows
  bool aligned = true;    // hopper_gemm_fits()
};

struct GemmChoice {
  GemmKernel kernel = GemmKernel::kSkinny;
  int item_rows = 8;   // of kSkinny
  bool widen = false;  // an FP8 matrix is widened to bf16 for this product

  bool operator==(const GemmChoice&) const = default;
};

GemmChoice choose_gemm(const GemmShape& shape, const KernelTraits& traits);
// Among our own kernels: where the library declines a product.
GemmChoice choose_own_gemm(const GemmShape& shape, const KernelTraits& traits);
// Whether there is an ordered_gemm for weights of this format.
bool ordered_gemm_has(WeightFormat format);
// A gated MLP's first product: gate and up by the library, then SiLU(gate) * up by a kernel; else both in one.
bool choose_separate_silu(WeightFormat format, int64_t rows, const KernelTraits& traits);
// KDA's decay and output gate, two products of one shape: in one launch.
bool choose_joined_kda_gates(WeightFormat decay, WeightFormat gate, int64_t rows);

// --- Experts: products grouped by expert ---

struct ExpertChoice {
  GemmKernel kernel = GemmKernel::kSkinny;  // kHopper: items are as long as that kernel's tiles of the format
  bool sorted = true;                       // pairs (token, choice) are grouped by expert, in items of ...
  int item_rows = 8;                        // ... at most so many; 0 for kHopper

  bool operator==(const ExpertChoice&) const = default;
};

constexpr int kLeastItemRows = 8;

// The fewest pairs that choose_experts() gives to kHopper; INT64_MAX where it never does.
int64_t first_hopper_pairs(int64_t num_experts, const KernelTraits& traits);
ExpertChoice choose_experts(WeightFormat format, int64_t num_pairs, int64_t num_experts, const KernelTraits& traits);

// --- Latent attention ---

enum class MlaKernel : uint8_t {
  kMma16,    // portable, 16 query rows a block, two blocks a multiprocessor
  kMma32,    // portable, 32 query rows
  kWgmma64,  // Hopper, 64 query rows
};

// Absorbed form.
struct MlaDecodeRows {
  int heads = 0, max_query = 1;  // of a sequence, new tokens
  LatentFormat format = LatentFormat::kBF16;
  bool fixed = false;  // work lists at fixed places, for deterministic mode
  int compute_capability = 0;
};
MlaKernel choose_mla_decode(const MlaDecodeRows& rows);

enum class PrefillKernel : uint8_t { kNone, kMma192, kMma256, kWgmma192, kWgmma256 };

// Expanded form, by columns of a head's keys without rope and of its values; kNone: no kernel for this geometry.
PrefillKernel choose_mla_prefill(int64_t nope, int64_t value, int compute_capability);

const char* name(GemmKernel kernel);
const char* name(MlaKernel kernel);
const char* name(PrefillKernel kernel);

// The choices for a GPU as a table: kind of product, rows, kernel.
std::string choices_text(const KernelTraits& traits);

}  // namespace perigee
