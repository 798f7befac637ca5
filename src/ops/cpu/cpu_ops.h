// CpuOps: the fast CPU backend. Activations bf16 (around attention f32, multiplied as two bf16 terms), sums f32,
// threads of its own; results do not depend on how many.
//
// The work is in free functions: matrices in gemm.h, experts.h and router.h, attention in mla_attend.h and kda.h, the
// rest in elementwise.h. This class owns the threads and the memory that they need, and packs weights for them.
#pragma once

#include <memory>

#include "ops/cpu/context.h"
#include "ops/ops.h"

namespace perigee {

class CpuOps final : public Ops {
 public:
  CpuOps(Isa isa, int num_threads, Comm& comm = Comm::alone(), Comm& dcp = Comm::alone(),
         OnlineQuantization quantization = OnlineQuantization::kNone);

  const char* name() const override;  // "cpu-avx2", "cpu-avx512" or "cpu-amx"
  DType activation_dtype() const override { return DType::kBF16; }
  DType wide_dtype() const override { return DType::kF32; }
  std::unique_ptr<WeightPacker> sizes() const override { return make_cpu_sizes(quantization_); }
  Isa isa() const { return isa_; }

  using Ops::pack_linear;
  LinearWeight pack_linear(std::span<const RawMatrix> stacked) override;
  ExpertWeights pack_experts(std::span<const RawExpert> experts) override;
  MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) override;
  EmbedWeight pack_embed(const RawMatrix& table) override;

  Tensor embed(const EmbedWeight& table, std::span<const int32_t> tokens) override;
  using Ops::rms_norm;
  void rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) override;
  Tensor linear(const Tensor& x, const LinearWeight& w, DType out) override;
  void add(const Tensor& residual, const Tensor& y) override;
  Tensor silu_mul(const Tensor& gate_up) override;
  void rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
            const Rope& rope) override;
  void write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) override;
  Tensor mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                    const LatentLayer& cache) override;
  Tensor mla_absorb(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch) override;
  Tensor attend_latents(const Tensor& queries, const MlaShape& shape, const Batch& batch,
                        const LatentLayer& cache) override;
  Tensor mla_project(const Tensor& u, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch) override;
  void write_full(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache) override;
  Tensor full_attend(const Tensor& q, const FullShape& shape, const Batch& batch, const FullLayer& cache) override;
  Tensor kda_attend(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) override;
  Routing route(const Tensor& x, const RouterWeight& router) override;
  Tensor moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& experts) override;
  Tensor gather_rows(const Tensor& x, std::span<const int32_t> rows) override;

 private:
  CpuContext context() { return {.pool = pool_, .arena = arena_, .scratch = scratch_, .isa = isa_}; }

  const Isa isa_;
  const OnlineQuantization quantization_;
  ThreadPool pool_;
  Arena scratch_;  // working memory of one op: the next op resets it
};

}  // namespace perigee
