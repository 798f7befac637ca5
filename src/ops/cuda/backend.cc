// CudaOps: what is left beside weights (pack.cc), experts (moe/), attention (mla/, full/) and KDA (kda/).
#include "ops/cuda/backend.h"

#include "base/log.h"
#include "comm/cuda/peer_comm.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/gemm/hopper_gemm.h"
#include "ops/cuda/gemm/ordered_gemm.h"
#include "ops/cuda/gemm/tile_gemm.h"
#include "ops/cuda/kda/kda.h"
#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/mla/mla_prefill.h"
#include "ops/cuda/mla/shared_exchange.h"
#include "ops/cuda/reduce_norm.h"
#include "ops/cuda/scatter_norm.h"

namespace perigee {
namespace {

GemmShape gemm_shape(WeightFormat format, const GemmCall& call) {
  return {.format = format,
          .rows = call.rows,
          .out = call.out,
          .silu_mul = call.output == GemmOutput::kSiluMul,
          .aligned = hopper_gemm_fits(call)};
}

GemmOutput output_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return GemmOutput::kF32;
    case DType::kF16: return GemmOutput::kTerm;
    default: CHECK(dtype == DType::kBF16, "a product as ", dtype_name(dtype)); return GemmOutput::kBF16;
  }
}

}  // namespace

Result<std::unique_ptr<Ops>> make_cuda_ops(const CudaOptions& options) {
  RETURN_IF_ERROR(select_device(options.device));
  auto ops = std::make_unique<CudaOps>(options);
  RETURN_IF_ERROR(device_status());
  return std::unique_ptr<Ops>(std::move(ops));
}

CudaOps::CudaOps(const CudaOptions& options)
    : Ops(Arena(device_buffer, options.separate_arrays), *options.comm, *options.dcp), options_(options) {
  if (!options.deterministic && !options.no_library) cublas_ = CublasLt::load();
  int major = 0, minor = 0;
  cuda_ok(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, options.device), "asking the GPU");
  cuda_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options.device), "asking the GPU");
  cuda_ok(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, options.device), "asking the GPU");
  traits_ = {.compute_capability = options.portable ? 80 : 10 * major + minor,
             .deterministic = options.deterministic,
             .library = cublas_ != nullptr};
  log_debug("kernels for ", choices_text(traits_));
  if (traits_.wgmma_products()) cuda_ok(hopper_gemm_prepare(), "loading matrix kernels");
  cuda_ok(mla_decode_prepare(), "loading attention kernels");
  cuda_ok(mla_prefill_prepare(), "loading attention kernels");
  cuda_ok(kda_load_kernels(), "loading recurrent kernels");
  for (Comm* one : {&comm(), &dcp()})
    if (auto* peers = dynamic_cast<PeerComm*>(one)) peers->set_stream(stream());
  peers_ = dynamic_cast<PeerComm*>(&comm());
  if (auto* peers = dynamic_cast<PeerComm*>(&dcp()); peers != nullptr && peers->view().direct) {
    dcp_peers_ = peers;
    cuda_ok(load_exchanges(), "loading collectives");
    shown_queries_ = device_buffer(kShownBytes);
    shown_results_ = device_buffer(kShownBytes);
  }
  CHECK(peers_ != nullptr || comm().size() == 1, "ranks that exchange nothing between GPUs");
  if (peers_ == nullptr) return;
  cuda_ok(load_reduce_norm(), "loading collectives");
  cuda_ok(load_scatter_norm(), "loading collectives");
}

void CudaOps::set_silent(bool silent) {
  for (Comm* one : {&comm(), &dcp()})
    if (auto* peers = dynamic_cast<PeerComm*>(one)) peers->set_silent(silent);
}

Status CudaOps::status() {
  const Status device = device_status();
  return device.ok() ? Ops::status() : device;
}

void CudaOps::begin_step() {
  upload_.reset();
  arena_.reset();
  mla_planned_ = {};
}

Tensor CudaOps::embed(const EmbedWeight& table, std::span<const int32_t> tokens) {
  const Tensor y = arena_.tensor(DType::kF32, std::ssize(tokens), table.dim);
  check(embed_rows(static_cast<const CudaMatrix&>(*table.packed), table.first, tokens.data(), y, stream()), "embed");
  if (comm().size() == 1) return y;
  comm().all_reduce(y);
  check(cudaSuccess, "all_reduce");
  return y;
}

void CudaOps::rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) {
  CHECK(std::ssize(weight) == x.cols && out.rows == x.rows && out.cols == x.cols, weight.size(), " weights for ",
        x.cols, " columns");
  check(rms_norm_rows(x, nullptr, weight.data(), eps, out, stream()), "rms_norm");
}

void CudaOps::add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps,
                       const Tensor& out) {
  CHECK(std::ssize(weight) == y.cols && residual.rows == y.rows && residual.cols == y.cols && out.rows == y.rows &&
        out.cols == y.cols && y.dtype == term_dtype());
  if (peers_ == nullptr || peers_->size() == 1)
    return check(rms_norm_rows(residual, &y, weight.data(), eps, out, stream()), "add_norm");
  const PeerView& view = peers_->view();
  if (!peers_->silent() && reduce_norm_pays(view, residual, y, out))
    return check(reduce_norm_rows(view, residual, y, weight.data(), eps, out, stream()), "reduce_norm");
  if (!peers_->silent() && scatter_norm_pays(view, residual))
    return check(scatter_norm_rows(view, residual, y, weight.data(), eps, out, stream()), "scatter_norm");
  peers_->add_up(y, residual);
  check(cudaSuccess, "all_reduce");
  check(rms_norm_rows(residual, nullptr, weight.data(), eps, out, stream()), "add_norm");
}

void CudaOps::gather_residual(const Tensor& residual) {
  if (peers_ == nullptr || !scatter_norm_pays(peers_->view(), residual)) return;
  const RowShares shares(residual.rows, peers_->size());
  const auto bytes = static_cast<size_t>(shares.each * residual.cols) * sizeof(float);
  peers_->all_gather(residual.row<float>(peers_->rank() * shares.each), bytes, residual.data);
  check(cudaSuccess, "gather_residual");
}

void CudaOps::own_gemm(WeightFormat format, const GemmCall& call, const GemmChoice& choice, const char* op) {
  switch (choice.kernel) {
    case GemmKernel::kSkinny: return check(skinny_gemm(format, call, choice.item_rows, stream()), op);
    case GemmKernel::kOrdered: return check(ordered_gemm(format, call, stream()), op);
    case GemmKernel::kTile: return check(tile_gemm(format, call, stream()), op);
    case GemmKernel::kHopper: return check(hopper_gemm(format, call, 1, stream()), op);
    case GemmKernel::kLibrary: CHECK(false, op, " by the library");
  }
}

void CudaOps::gemm(const CudaMatrix& w, GemmCall call, const char* op) {
  call.weight = w.data.data();
  call.scale = w.scale.data();
  call.out = static_cast<int32_t>(w.out);
  call.in = static_cast<int32_t>(w.in);
  call.chunks = static_cast<int32_t>(w.padded_in / 128);
  if (call.rows == 0) return;
  if (w.format == WeightFormat::kBF16) return gemm(call, op);
  const GemmChoice choice = choose_gemm(gemm_shape(w.format, call), traits_);
  if (!choice.widen) return own_gemm(w.format, call, choice, op);
  const ArenaScope scratch(arena_);
  auto* wide = arena_.array<uint16_t>(w.out * w.padded_in).data();
  check(widen_fp8(w, wide, stream()), "widen");
  call.weight = reinterpret_cast<const uint8_t*>(wide);
  gemm(call, op);
}

void CudaOps::gemm(const GemmCall& call, const char* op) {
  if (call.rows == 0) return;
  const int64_t padded = static_cast<int64_t>(call.chunks) * 128;
  const GemmShape shape = gemm_shape(WeightFormat::kBF16, call);
  const GemmChoice choice = choose_gemm(shape, traits_);
  if (choice.kernel != GemmKernel::kLibrary) return own_gemm(WeightFormat::kBF16, call, choice, op);
  if (call.output == GemmOutput::kTerm) return terms_by_library(call, op);
  if (cublas_->multiply({.x = call.x,
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
                        stream()))
    return check(cudaSuccess, op);
  own_gemm(WeightFormat::kBF16, call, choose_own_gemm(shape, traits_), op);
}

// The library writes no f16 where it reads bf16.
void CudaOps::terms_by_library(GemmCall call, const char* op) {
  const Tensor terms{
      .data = call.y, .dtype = DType::kF16, .rows = call.rows, .cols = call.out, .row_stride = call.y_stride};
  const ArenaScope scratch(arena_);
  const Tensor sums = arena_.tensor(DType::kF32, call.rows, call.out);
  call.y = sums.data;
  call.y_stride = sums.row_stride;
  call.output = GemmOutput::kF32;
  gemm(call, op);
  check(round_rows(sums, terms, stream()), "terms");
}

Tensor CudaOps::linear(const Tensor& x, const LinearWeight& w, DType out) {
  return product(x, w, out, "linear");
}

Tensor CudaOps::product(const Tensor& x, const LinearWeight& w, DType out, const char* op) {
  CHECK(x.cols == w.in && x.dtype == DType::kBF16, x.cols, " columns for ", w.in);
  // Products read rows of two bytes by 16: also those of column ranges, whose stride is this one.
  const int64_t stride = out != DType::kF32 ? (w.out + 7) / 8 * 8 : w.out;
  const Tensor y = arena_.tensor(out, x.rows, stride).columns(0, w.out);
  gemm(static_cast<const CudaMatrix&>(*w.packed),
       {.x = x.row<const uint16_t>(0),
        .x_stride = x.row_stride,
        .y = y.data,
        .y_stride = y.row_stride,
        .rows = static_cast<int32_t>(x.rows),
        .output = output_of(out)},
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
                   .halves = rope.halves,
                   .factor = rope.cos_sin_factor},
                  stream()),
        "rope");
}

void CudaOps::write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) {
  CHECK(batch.device != nullptr);
  CHECK(cache.format != LatentFormat::kF32 && cache.row_bytes == latent_row_bytes(cache.format, c.cols, k_rope.cols),
        latent_format_name(cache.format));
  check(write_latent_rows(c, k_rope, batch, cache, stream()), "write_latent");
}

Tensor CudaOps::gather_rows(const Tensor& x, std::span<const int32_t> rows) {
  const Tensor y = arena_.tensor(x.dtype, std::ssize(rows), x.cols);
  if (y.rows > 0) check(gather_tensor_rows(x, rows.data(), y, stream()), "gather_rows");
  return y;
}

void CudaOps::tap(const Tensor& x, const Tensor& out) {
  if (x.rows > 0) check(round_rows(x, out, stream()), "tap");
}

}  // namespace perigee
