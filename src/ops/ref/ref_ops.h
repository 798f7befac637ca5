// RefOps: the definition of every op. Plain loops over f32, one thread, no cleverness: other backends are tested
// against it, and a person reads it to learn what an op means. Weights are kept dequantised in f32, so it is for small
// models.
#pragma once

#include <vector>

#include "ops/ops.h"

namespace perigee {

class RefOps : public Ops {
 public:
  explicit RefOps(Comm& comm = Comm::alone(), Comm& dcp = Comm::alone()) : Ops(comm, dcp) {}

  const char* name() const override { return "ref"; }
  DType activation_dtype() const override { return DType::kF32; }
  std::unique_ptr<WeightPacker> sizes() const override { return make_ref_sizes(); }

  using Ops::pack_linear;
  LinearWeight pack_linear(std::span<const RawMatrix> stacked) override;
  ExpertWeights pack_experts(std::span<const RawExpert> experts) override;
  MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) override;
  EmbedWeight pack_embed(const RawMatrix& table) override;

  Tensor embed(const EmbedWeight& table, std::span<const int32_t> tokens) override;
  using Ops::rms_norm;
  // `out` must be f32
  void rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) override;
  Tensor linear(const Tensor& x, const LinearWeight& w, DType out) override;
  void add(const Tensor& residual, const Tensor& y) override;
  Tensor silu_mul(const Tensor& gate_up) override;
  void rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
            const Rope& rope) override;
  void write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) override;
  // The absorbed form here is the same sum in another order, for contexts where the expanded one takes too long.
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
};

// sum of a[i] * b[i], in eight interleaved partial sums: faster than one, and closer to the true value.
float ref_dot(const float* a, const float* b, int64_t n);

// The f32 values of a weight that RefOps packed, row-major.
const float* ref_values(const Packed& packed);

}  // namespace perigee
