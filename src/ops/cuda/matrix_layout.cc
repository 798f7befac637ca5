#include "ops/cuda/matrix_layout.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "ops/cuda/cuda_ops.h"

namespace perigee {
namespace {

constexpr int64_t kColumnUnit = 128;  // of padded columns
static_assert(kCudaLimits.latent_unit == kColumnUnit, "latents have no padding");

MatrixLayout layout_of(WeightFormat format, int64_t out, int64_t in, int64_t count = 1) {
  CHECK(in % kCudaLimits.unit == 0, "a matrix of ", in, " columns");
  const int64_t padded_in = (in + kColumnUnit - 1) / kColumnUnit * kColumnUnit;
  return {.format = format, .out = out, .in = in, .padded_in = padded_in, .count = count};
}

// Whether a packed FP8 matrix, which has a scale for each 8 rows (packed.h), can hold a window's scales.
bool keeps_fp8(const RawMatrix& m) {
  const bool in_one_block = m.first_row / 128 == (m.first_row + m.out - 1) / 128;
  return m.format == WeightFormat::kF8Block128 && m.starts_at_scale() && (m.first_row % 8 == 0 || in_one_block);
}

// Dense matrices stay FP8 if all of a stack are and its seams lie between the 8 rows that share a scale; all else
// becomes bf16.
WeightFormat dense_format(std::span<const RawMatrix> stacked) {
  for (size_t i = 0; i < stacked.size(); ++i)
    if (!keeps_fp8(stacked[i]) || (i + 1 < stacked.size() && stacked[i].out % 8 != 0)) return WeightFormat::kBF16;
  return WeightFormat::kF8Block128;
}

// What a matrix of an expert stays as.
WeightFormat expert_format(const RawMatrix& m) {
  const bool int4 = m.format == WeightFormat::kInt4Group32 && m.starts_at_scale();
  return int4 || keeps_fp8(m) ? m.format : WeightFormat::kBF16;
}

// Theirs if all matrices of all experts share it, else bf16: a model may leave some of them unquantised, and a
// shard may begin between scales.
WeightFormat common_format(std::span<const RawExpert> experts) {
  const WeightFormat format = expert_format(experts[0].gate);
  const bool alike = std::all_of(experts.begin(), experts.end(), [format](const RawExpert& e) {
    return expert_format(e.gate) == format && expert_format(e.up) == format && expert_format(e.down) == format;
  });
  return alike ? format : WeightFormat::kBF16;
}

class CudaSizes final : public WeightPacker {
 public:
  const char* name() const override { return "cuda"; }
  DType activation_dtype() const override { return DType::kBF16; }
  bool on_device() const override { return true; }
  ShapeLimits limits() const override { return kCudaLimits; }
  bool makes_dummy_weights() const override { return true; }

  LinearWeight pack_linear(std::span<const RawMatrix> stacked) override {
    return counted_linear(stacked, linear_layout(stacked).all_bytes());
  }
  LinearWeight pack_gate_up(const RawMatrix& gate, const RawMatrix& up) override {
    return counted_linear(std::array{gate, up}, gate_up_layout(gate, up).all_bytes());
  }
  ExpertWeights pack_experts(std::span<const RawExpert> experts) override {
    const ExpertLayout layout = expert_layout(experts);
    return counted_experts(experts, layout.gate_up.all_bytes() + layout.down.all_bytes());
  }
  MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) override {
    const MlaUpLayout layout = mla_up_layout(kv_b, shape);
    return {.packed = counted_weight(layout.kv_b.all_bytes() + layout.keys.all_bytes())};
  }
  EmbedWeight pack_embed(const RawMatrix& table) override {
    return counted_embed(table, embed_layout(table).all_bytes());
  }
};

}  // namespace

MatrixLayout linear_layout(std::span<const RawMatrix> stacked) {
  CHECK(!stacked.empty());
  int64_t out = 0;
  for (const RawMatrix& m : stacked) {
    CHECK(m.in == stacked[0].in, "stacked matrices of ", m.in, " and ", stacked[0].in, " columns");
    out += m.out;
  }
  return layout_of(dense_format(stacked), out, stacked[0].in);
}

MatrixLayout gate_up_layout(const RawMatrix& gate, const RawMatrix& up) {
  CHECK(gate.out == up.out && gate.in == up.in && gate.out % kCudaLimits.unit == 0, gate.out, "x", gate.in, " and ",
        up.out, "x", up.in);
  return layout_of(dense_format(std::array{gate, up}), 2 * gate.out, gate.in);
}

ExpertLayout expert_layout(std::span<const RawExpert> experts) {
  CHECK(!experts.empty());
  const auto count = static_cast<int64_t>(experts.size());
  const int64_t hidden = experts[0].gate.in, inter = experts[0].gate.out;
  CHECK(inter % kCudaLimits.unit == 0, "experts of ", inter, " rows");
  const WeightFormat format = common_format(experts);
  return {.gate_up = layout_of(format, 2 * inter, hidden, count), .down = layout_of(format, hidden, inter, count)};
}

MlaUpLayout mla_up_layout(const RawMatrix& kv_b, const MlaShape& shape) {
  CHECK(kv_b.out == shape.heads * (shape.nope + shape.value) && kv_b.in == shape.latent, kv_b.out, "x", kv_b.in);
  const MlaUpLayout layout{.kv_b = layout_of(WeightFormat::kBF16, kv_b.out, kv_b.in),
                           .keys = layout_of(WeightFormat::kBF16, shape.heads * shape.latent, shape.nope)};
  CHECK(layout.kv_b.padded_in == shape.latent, "latent of ", shape.latent);
  return layout;
}

MatrixLayout embed_layout(const RawMatrix& table) {
  return layout_of(WeightFormat::kBF16, table.out, table.in);
}

std::unique_ptr<WeightPacker> make_cuda_sizes() {
  return std::make_unique<CudaSizes>();
}

}  // namespace perigee
