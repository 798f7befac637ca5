// The coarse ops, written in plain ops: their definition, and what a backend runs that does not fuse them.
#include <algorithm>
#include <cstring>

#include "ops/ops.h"

namespace perigee {

void Ops::copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

void Ops::tap(const Tensor& x, const Tensor& out) {
  CHECK(!on_device() && out.dtype == DType::kF32, "a backend that does not tap");
  for (int64_t r = 0; r < x.rows; ++r) std::copy_n(x.row<const float>(r), x.cols, out.row<float>(r));
}

LinearWeight WeightPacker::pack_gate_up(const RawMatrix& gate, const RawMatrix& up) {
  const RawMatrix both[] = {gate, up};
  return pack_linear(both);
}

Tensor Ops::mla_in(const Tensor& x, const MlaWeights& w, const Batch& batch, const LatentLayer& cache) {
  const MlaShape& s = w.shape;
  const DType wide = wide_dtype();
  const Tensor q_in = w.q_a.packed ? rms_norm(linear(x, w.q_a, DType::kF32), w.q_a_norm, w.latent_eps, wide) : x;
  const Tensor q = linear(q_in, w.q, wide);                                             // [n, h * (dn + dr)]
  const Tensor kv = linear(x, w.kv_a, DType::kF32);                                     // [n, L + dr]
  const Tensor c = rms_norm(kv.columns(0, s.latent), w.kv_a_norm, w.latent_eps, wide);  // [n, L], rounded once
  const Tensor k_rope = kv.columns(s.latent, s.rope);                                   // [n, dr], shared by all heads
  if (w.rope.enabled) {
    rope(q, s.q_head(), s.nope, batch.positions, w.rope);
    rope(k_rope, s.rope, 0, batch.positions, w.rope);
  }
  write_latent(c, k_rope, batch, cache);
  return q;
}

void Ops::write_full(const Tensor&, const Tensor&, const Batch&, const FullLayer&) {
  CHECK(false, name(), " has no full attention");
}

Tensor Ops::full_attend(const Tensor&, const FullShape&, const Batch&, const FullLayer&) {
  CHECK(false, name(), " has no full attention");
}

Tensor Ops::full_in(const Tensor& x, const FullWeights& w, const Batch& batch, const FullLayer& cache) {
  const int64_t q_width = w.shape.heads * w.shape.dim, kv_width = w.shape.kv_heads * w.shape.dim;
  const Tensor qkv = linear(x, w.qkv, DType::kF32);
  const Tensor q = qkv.columns(0, q_width), k = qkv.columns(q_width, kv_width);
  rope(q, w.shape.dim, 0, batch.positions, w.rope);
  rope(k, w.shape.dim, 0, batch.positions, w.rope);
  write_full(k, qkv.columns(q_width + kv_width, kv_width), batch, cache);
  return q;
}

Tensor Ops::kda(const Tensor& x, const KdaWeights& w, const Batch& batch, const StateLayer& state) {
  const int64_t dim = w.shape.dim;
  const Tensor gates = linear(x, w.gates, wide_dtype());  // f_a | g_a | b
  const KdaInputs in{.qkv = linear(x, w.qkv, DType::kF32),
                     .a = linear(gates.columns(0, dim), w.f_b, DType::kF32),
                     .b = gates.columns(2 * dim, w.shape.heads),
                     .z = linear(gates.columns(dim, dim), w.g_b, DType::kF32)};
  return kda_attend(in, w, batch, state);
}

Tensor Ops::rms_norm(const Tensor& x, std::span<const float> weight, float eps, DType out) {
  const Tensor y = arena().tensor(out, x.rows, x.cols);
  rms_norm(x, weight, eps, y);
  return y;
}

void Ops::add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps,
                   const Tensor& out) {
  comm_.all_reduce(y);
  add(residual, y);
  rms_norm(residual, weight, eps, out);
}

Tensor Ops::add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps) {
  const Tensor out = arena().tensor(activation_dtype(), residual.rows, residual.cols);
  add_norm(residual, y, weight, eps, out);
  return out;
}

void Ops::moe_norm(const Tensor& residual, const Tensor& x, const MoeWeights& w, std::span<const float> weight,
                   float eps, const Tensor& out) {
  add_norm(residual, moe(x, w), weight, eps, out);
}

Tensor Ops::dense_mlp(const Tensor& x, const MlpWeights& w, DType out) {
  return linear(silu_mul(linear(x, w.gate_up, DType::kF32)), w.down, out);
}

Tensor Ops::moe(const Tensor& x, const MoeWeights& w) {
  const Tensor y = moe_experts(x, route(x, w.router), w.experts);
  if (w.shared.down.packed) add(y, dense_mlp(x, w.shared, DType::kF32));
  return y;
}

Tensor Ops::logits(const Tensor& x, const LinearWeight& head) {
  return linear(x, head, DType::kF32);
}

}  // namespace perigee
