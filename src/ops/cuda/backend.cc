// CudaOps: what is left beside weights (pack.cc), experts (moe.cc), latent attention (mla_ops.cc) and KDA (kda_ops.cc).
#include "ops/cuda/backend.h"

#include "ops/cuda/elementwise.h"
#include "ops/cuda/hopper_gemm.h"
#include "ops/cuda/kda.h"
#include "ops/cuda/mla_decode.h"
#include "ops/cuda/mla_prefill.h"
#include "ops/cuda/ordered_gemm.h"
#include "ops/cuda/tile_gemm.h"

namespace perigee {
namespace {

// FP8 matrices: rows up to which reading one twice costs less than widening it, and from how many outputs on, and up to
// how many rows, our own tiles beat both.
constexpr int32_t kMaxSkinnyFp8Rows = 64, kMinDirectOutputs = 6144, kMaxDirectRows = 512;

// Rows above which tiles of kOrderedRows rows pay.
constexpr int32_t kMinOrderedRows = 128;

// Rows that skinny_gemm serves best.
int32_t max_skinny_rows(WeightFormat format, const GemmCall& call) {
  const bool fp8 = format == WeightFormat::kF8Block128 && call.output != GemmOutput::kSiluMul;
  return fp8 && call.out < kMinDirectOutputs ? kMaxSkinnyFp8Rows : kMaxSkinnyRows;
}

}  // namespace

Result<std::unique_ptr<Ops>> make_cuda_ops(const CudaOptions& options) {
  RETURN_IF_ERROR(select_device(options.device));
  auto ops = std::make_unique<CudaOps>(options);
  RETURN_IF_ERROR(device_status());
  return std::unique_ptr<Ops>(std::move(ops));
}

CudaOps::CudaOps(const CudaOptions& options) : Ops(Arena(device_buffer, options.separate_arrays)), options_(options) {
  if (!options.deterministic && !options.no_library) cublas_ = CublasLt::load();
  int major = 0, minor = 0;
  cuda_ok(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, options.device), "asking the GPU");
  cuda_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options.device), "asking the GPU");
  cuda_ok(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, options.device), "asking the GPU");
  compute_capability_ = options.portable ? 80 : 10 * major + minor;
  hopper_ = compute_capability_ == 90 && !options.deterministic;
  if (hopper_) cuda_ok(hopper_gemm_prepare(), "loading matrix kernels");
  cuda_ok(mla_decode_prepare(), "loading attention kernels");
  cuda_ok(mla_prefill_prepare(), "loading attention kernels");
  cuda_ok(kda_load_kernels(), "loading recurrent kernels");
}

Status CudaOps::status() {
  return device_status();
}

void CudaOps::begin_step() {
  upload_.reset();
  arena_.reset();
  mla_planned_ = false;
}

Tensor CudaOps::embed(const EmbedWeight& table, std::span<const int32_t> tokens) {
  const Tensor y = arena_.tensor(DType::kF32, std::ssize(tokens), table.dim);
  check(embed_rows(static_cast<const CudaMatrix&>(*table.packed), tokens.data(), y, stream()), "embed");
  return y;
}

Tensor CudaOps::rms_norm(const Tensor& x, std::span<const float> weight, float eps, DType out) {
  CHECK(std::ssize(weight) == x.cols && out == DType::kBF16, weight.size(), " weights for ", x.cols, " columns");
  const Tensor y = arena_.tensor(DType::kBF16, x.rows, x.cols);
  if (x.rows == 0) return y;  // no row's logits are wanted
  check(rms_norm_rows(x, nullptr, weight.data(), eps, y, stream()), "rms_norm");
  return y;
}

Tensor CudaOps::add_norm(const Tensor& residual, const Tensor& x, std::span<const float> weight, float eps) {
  CHECK(std::ssize(weight) == x.cols && residual.rows == x.rows && residual.cols == x.cols);
  const Tensor y = arena_.tensor(DType::kBF16, x.rows, x.cols);
  check(rms_norm_rows(residual, &x, weight.data(), eps, y, stream()), "add_norm");
  return y;
}

void CudaOps::gemm_rows(WeightFormat format, const GemmCall& call, const char* op) {
  // Deterministic: two kernels of the same bits.
  if (options_.deterministic && call.rows > kMinOrderedRows && ordered_gemm_has(format))
    check(ordered_gemm(format, call, stream()), op);
  else if (call.rows <= max_skinny_rows(format, call) || options_.deterministic)
    check(skinny_gemm(format, call, call.rows <= 8 ? 8 : call.rows <= 16 ? 16 : 32, stream()), op);
  else if (hopper_ && hopper_gemm_fits(call))
    check(hopper_gemm(format, call, 1, stream()), op);
  else
    check(tile_gemm(format, call, stream()), op);
}

// Whether cuBLASLt serves this product: it cannot join gate and up.
bool CudaOps::by_library(const GemmCall& call) const {
  return cublas_ != nullptr && call.rows > kMaxSkinnyRows && call.output != GemmOutput::kSiluMul;
}

// Whether an FP8 matrix becomes bf16 for one product by cuBLASLt, which reads and writes five times its bytes and
// rounds its numbers once more: of many rows, or where our own tiles are too few to fill the GPU.
bool CudaOps::worth_widening(const GemmCall& call) const {
  if (!by_library(call)) return false;
  return call.rows > kMaxDirectRows || (call.rows > kMaxSkinnyFp8Rows && call.out < kMinDirectOutputs);
}

void CudaOps::gemm(const CudaMatrix& w, GemmCall call, const char* op) {
  call.weight = w.data.data();
  call.scale = w.scale.data();
  call.out = static_cast<int32_t>(w.out);
  call.in = static_cast<int32_t>(w.in);
  call.chunks = static_cast<int32_t>(w.padded_in / 128);
  if (call.rows == 0) return;
  if (w.format == WeightFormat::kBF16) return gemm(call, op);
  if (!worth_widening(call)) return gemm_rows(w.format, call, op);
  const ArenaScope scratch(arena_);
  auto* wide = arena_.array<uint16_t>(w.out * w.padded_in).data();
  check(widen_fp8(w, wide, stream()), "widen");
  call.weight = reinterpret_cast<const uint8_t*>(wide);
  gemm(call, op);
}

void CudaOps::gemm(const GemmCall& call, const char* op) {
  if (call.rows == 0) return;
  const int64_t padded = static_cast<int64_t>(call.chunks) * 128;
  if (by_library(call) && cublas_->multiply({.x = call.x,
                                             .x_stride = call.x_stride,
                                             .x_head = call.x_head,
                                             .w = reinterpret_cast<const uint16_t*>(call.weight),
                                             .w_stride = padded,
                                             .w_head = call.weight_stride / 2,
                                             .y = call.y,
                                             .y_stride = call.y_stride,
                                             .y_head = call.y_head,
                                             .rows = call.rows,
                                             .out = call.out,
                                             .in = call.in,
                                             .heads = call.heads,
                                             .f32_out = call.output == GemmOutput::kF32},
                                            stream())) {
    check(cudaSuccess, op);
    return;
  }
  gemm_rows(WeightFormat::kBF16, call, op);
}

Tensor CudaOps::linear(const Tensor& x, const LinearWeight& w, DType out) {
  return product(x, w, out, "linear");
}

Tensor CudaOps::product(const Tensor& x, const LinearWeight& w, DType out, const char* op) {
  CHECK(x.cols == w.in && x.dtype == DType::kBF16, x.cols, " columns for ", w.in);
  // Products read rows of bf16 by 16 bytes: also those of column ranges, whose stride is this one.
  const int64_t stride = out == DType::kBF16 ? (w.out + 7) / 8 * 8 : w.out;
  const Tensor y = arena_.tensor(out, x.rows, stride).columns(0, w.out);
  gemm(static_cast<const CudaMatrix&>(*w.packed),
       {.x = x.row<const uint16_t>(0),
        .x_stride = x.row_stride,
        .y = y.data,
        .y_stride = y.row_stride,
        .rows = static_cast<int32_t>(x.rows),
        .output = out == DType::kF32 ? GemmOutput::kF32 : GemmOutput::kBF16},
       op);
  return y;
}

void CudaOps::add(const Tensor& residual, const Tensor& y) {
  CHECK(residual.rows == y.rows && residual.cols == y.cols);
  check(add_rows(residual, y, stream()), "add");
}

Tensor CudaOps::silu_mul(const Tensor& gate_up) {
  const Tensor y = arena_.tensor(DType::kBF16, gate_up.rows, gate_up.cols / 2);
  check(silu_mul_rows(gate_up, false, y, stream()), "silu_mul");
  return y;
}

void CudaOps::rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
                   const Rope& rope) {
  const auto pairs = static_cast<int32_t>(rope.inv_freq.size());
  CHECK(x.cols % head_dim == 0 && rope_begin + 2 * pairs <= head_dim);
  check(rope_rows(x,
                  {.head_dim = head_dim,
                   .rope_begin = rope_begin,
                   .positions = positions.data(),
                   .inv_freq = rope.inv_freq.data(),
                   .pairs = pairs,
                   .factor = rope.cos_sin_factor},
                  stream()),
        "rope");
}

void CudaOps::write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) {
  CHECK(cache.dtype != DType::kF32 && batch.device != nullptr);
  check(write_latent_rows(c, k_rope, batch, cache, stream()), "write_latent");
}

Tensor CudaOps::gather_rows(const Tensor& x, std::span<const int32_t> rows) {
  const Tensor y = arena_.tensor(DType::kF32, std::ssize(rows), x.cols);
  if (y.rows > 0) check(gather_f32_rows(x, rows.data(), y, stream()), "gather_rows");
  return y;
}

}  // namespace perigee
