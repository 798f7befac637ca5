#include "ops/cpu/cpu_ops.h"

#include "base/cgroup.h"
#include "ops/cpu/elementwise.h"
#include "ops/cpu/experts.h"
#include "ops/cpu/full_attention.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/kda.h"
#include "ops/cpu/mla_attend.h"
#include "ops/cpu/router.h"
#include "ops/dealt_attention.h"

namespace perigee {
namespace {

struct PackedLinear final : PackedWeight {
  cpu::PanelMatrix matrix;
  Buffer buffer;
  int64_t bytes() const override { return static_cast<int64_t>(buffer.size()); }
};

}  // namespace

CpuOps::CpuOps(Isa isa, int num_threads, Comm& comm, Comm& dcp, OnlineQuantization quantization)
    : Ops(comm, dcp), isa_(isa), quantization_(quantization), pool_(num_threads) {}

const char* CpuOps::name() const {
  switch (isa_) {
    case Isa::kAmx: return "cpu-amx";
    case Isa::kAvx512: return "cpu-avx512";
    case Isa::kAvx2: break;
  }
  return "cpu-avx2";
}

LinearWeight CpuOps::pack_linear(std::span<const RawMatrix> stacked) {
  auto packed = std::make_shared<PackedLinear>();
  packed->matrix = cpu::stacked_panels(stacked, quantization_);
  packed->buffer = Buffer(static_cast<size_t>(packed->matrix.bytes()));
  packed->matrix.data = packed->buffer.data();
  cpu::pack_panels(pool_, packed->matrix, cpu::stacked_rows(stacked));
  return {.out = packed->matrix.out, .in = packed->matrix.in, .packed = packed};
}

ExpertWeights CpuOps::pack_experts(std::span<const RawExpert> experts) {
  return cpu::pack_experts(pool_, experts, quantization_);
}

MlaUpWeight CpuOps::pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) {
  return cpu::pack_mla_up(kv_b, shape);
}

EmbedWeight CpuOps::pack_embed(const RawMatrix& table) {
  return cpu::pack_embed(table);
}

Tensor CpuOps::embed(const EmbedWeight& table, std::span<const int32_t> tokens) {
  const int64_t vocab = table.vocab * comm().size();
  for (const int32_t id : tokens) CHECK(id >= 0 && id < vocab, "token id ", id, " outside the vocabulary of ", vocab);
  const Tensor x = cpu::embed(context(), table, tokens);
  comm().all_reduce(x);
  return x;
}

void CpuOps::rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) {
  cpu::rms_norm(context(), x, weight, eps, out);
}

Tensor CpuOps::linear(const Tensor& x, const LinearWeight& w, DType out) {
  return cpu::linear(context(), x, static_cast<const PackedLinear&>(*w.packed).matrix, out);
}

void CpuOps::add(const Tensor& residual, const Tensor& y) {
  cpu::add(context(), residual, y);
}

Tensor CpuOps::silu_mul(const Tensor& gate_up) {
  return cpu::silu_mul(context(), gate_up);
}

void CpuOps::rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
                  const Rope& rope) {
  cpu::rope(context(), x, head_dim, rope_begin, positions, rope);
}

void CpuOps::write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) {
  cpu::write_latent(context(), c, k_rope, batch, cache);
}

Tensor CpuOps::mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                          const LatentLayer& cache) {
  if (batch.is_shared()) return Ops::mla_attend(q, up, shape, batch, cache);
  if (comm().size() > 1)
    if (const std::optional<Tensor> out = attend_dealt(*this, q, up, shape, batch, cache)) return *out;
  return cpu::mla_attend(context(), q, up, shape, batch, cache);
}

Tensor CpuOps::mla_absorb(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch) {
  return cpu::mla_absorb(context(), q, up, shape, batch);
}

Tensor CpuOps::attend_latents(const Tensor& queries, const MlaShape& shape, const Batch& batch,
                              const LatentLayer& cache) {
  return cpu::attend_latents(context(), queries, shape, batch, cache);
}

Tensor CpuOps::mla_project(const Tensor& u, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch) {
  return cpu::mla_project(context(), u, up, shape, batch);
}

void CpuOps::write_full(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache) {
  cpu::write_full(context(), k, v, batch, cache);
}

Tensor CpuOps::full_attend(const Tensor& q, const FullShape& shape, const Batch& batch, const FullLayer& cache) {
  return cpu::full_attend(context(), q, shape, batch, cache);
}

Tensor CpuOps::kda_attend(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) {
  return cpu::kda_attend(context(), in, w, batch, state);
}

Routing CpuOps::route(const Tensor& x, const RouterWeight& router) {
  return cpu::route(context(), x, router);
}

Tensor CpuOps::moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& experts) {
  return cpu::moe_experts(context(), x, routing, static_cast<const cpu::PackedExperts&>(*experts.packed));
}

Tensor CpuOps::gather_rows(const Tensor& x, std::span<const int32_t> rows) {
  return cpu::gather_rows(context(), x, rows);
}

Result<std::unique_ptr<Ops>> make_cpu_ops(const CpuOptions& options) {
  ASSIGN_OR_RETURN(const Isa isa, detect_isa(options.isa));
  if (options.num_threads < 0) return bad_input("number of threads must not be negative", "num_threads");
  const int threads = options.num_threads > 0 ? options.num_threads : available_cores();
  return std::unique_ptr<Ops>(std::make_unique<CpuOps>(isa, threads, options.comm, options.dcp, options.quantization));
}

}  // namespace perigee
