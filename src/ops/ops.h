// Ops: the words a model is written in. A backend (ref, cpu, cuda) is one implementation of this class.
//
// Plain ops are pure virtual. Coarse ops (mla_in, full_in, kda, dense_mlp, moe, logits) have a default body in
// ops/coarse.cc that composes plain ops: that composition is the definition and the fallback; a backend overrides what
// it fuses. Every Tensor returned lives in the step's arena, until the next begin_step().
//
// With several ranks (tensor parallelism) every tensor of heads, of an MLP's inner width or of the vocabulary is this
// rank's share. These words reach other ranks: embed, add_norm and moe_norm add up what each has (DESIGN D13),
// gather_residual joins its rows, and mla_attend reads the cache of its dcp group (D6). So every rank must say the same
// words in the same order.
//
// Letters: n new tokens of all sequences of the batch, H hidden size, h heads, dn/dr/dv the nope/rope/value dims of a
// head, L the latent rank. The residual stream is always f32; activations are of the backend's activation_dtype().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "comm/comm.h"
#include "ops/batch.h"
#include "ops/isa.h"
#include "ops/weight_packer.h"
#include "tensor/tensor.h"

namespace perigee {

// What kda_attend takes of each new token, column views of projections.
struct KdaInputs {
  Tensor qkv;  // [n, 3 * h * dim] f32: q, k, v before the convolution
  Tensor a;    // [n, h * dim] f32: log decay g = -exp(A_log) * softplus(a + dt_bias)
  Tensor b;    // [n, h] wide: beta = sigmoid(b)
  Tensor z;    // [n, h * dim] f32: the output is multiplied by sigmoid(z)
};

class Ops : public WeightPacker {
 public:
  // Of queries, of attention's output and of what the projections around attention read: those errors add up over the
  // layers. f32 where a backend multiplies f32 at little cost (as two bf16 terms), else the activation dtype.
  virtual DType wide_dtype() const { return activation_dtype(); }
  // Of what a rank adds at a reduce point, its term: where links between ranks bind kF16, of a sixteenth of it (ADR
  // 0011). Sums are f32.
  virtual DType term_dtype() const { return DType::kF32; }

  // --- Memory that this backend's kernels read and write; the host's unless a backend says otherwise. ---
  virtual Buffer make_buffer(size_t bytes) { return Buffer(bytes); }
  virtual void copy(void* to, const void* from, size_t bytes);  // between it and the host's; complete on return
  // kDeviceLost: all computed since the last success is void.
  virtual Status status() { return comm_.status().ok() ? dcp_.status() : comm_.status(); }
  Comm& comm() const { return comm_; }
  Comm& dcp() const { return dcp_; }  // with the ranks that share the cache of latents

  // Lays weights out as this backend does, and keeps their sizes alone.
  virtual std::unique_ptr<WeightPacker> sizes() const = 0;

  // --- Plain ops ---
  virtual void begin_step() { arena_.reset(); }
  // -> [n, H] f32. Of a share of the vocabulary: summed over the ranks, rows of other shares being zero.
  virtual Tensor embed(const EmbedWeight& table, std::span<const int32_t> tokens) = 0;
  // RMSNorm (Zhang, Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight; x [n, d] f32 or activation -> `out`.
  virtual void rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) = 0;
  Tensor rms_norm(const Tensor& x, std::span<const float> weight, float eps, DType out);
  Tensor rms_norm(const Tensor& x, std::span<const float> weight, float eps) {
    return rms_norm(x, weight, eps, activation_dtype());
  }
  virtual Tensor linear(const Tensor& x, const LinearWeight& w, DType out) = 0;  // x [n, in] activation or wide
  virtual void add(const Tensor& residual, const Tensor& y) = 0;                 // residual += y, both f32 [n, H]
  virtual Tensor silu_mul(const Tensor& gate_up) = 0;  // [n, 2I] f32 -> silu(first half) * second half, activation
  // Rotates the dr columns of `head_dim` wide heads that begin at `rope_begin`, pairs as Rope has them, in place.
  // x [n, heads * head_dim] f32 or activation. RoFormer (Su et al. 2021), YaRN (Peng et al. 2023) in the frequencies.
  virtual void rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
                    const Rope& rope) = 0;
  // Stores [c | k_rope] of each new token whose block lies here into the cache: row position % 64 of the block's page.
  virtual void write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) = 0;
  // Multi-head latent attention over the cache, causal, per sequence (DeepSeek-V2 2024, section 2.1), absorbed or
  // expanded as row.form says. q [n, h * (dn + dr)] wide, rotated; -> [n, h * dv] wide. The body is that of a shared
  // cache (ops/shared_attention.cc): a backend computes the others, and may run it for batches that are shared.
  virtual Tensor mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                            const LatentLayer& cache);
  // What it is made of, of backends that share caches. All sequences absorbed, their rows covering all of q.
  // -> [n, h * (L + dr)] activation: of each head [W_UK^T q_nope | q_rope].
  virtual Tensor mla_absorb(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch);
  // Such queries of shape.heads heads, those of other ranks among them, over the cached rows that lie here, each up to
  // its token. -> [n * heads, L + 1] f32: [mean of latents by softmax | natural log of the sum of exponentials]; zeros
  // and -inf where no row is seen. On a GPU rows as in ops/cuda/mla/result_row.h, f16.
  virtual Tensor attend_latents(const Tensor& queries, const MlaShape& shape, const Batch& batch,
                                const LatentLayer& cache);
  // W_UV of each head's mean: u [n, h * L] f32, on a GPU rounded to its activations -> [n, h * dv] wide.
  virtual Tensor mla_project(const Tensor& u, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch);
  // Stores k and v [n, hkv * dim] f32, k rotated, of each new token into the cache, of which no part lies elsewhere.
  virtual void write_full(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache);
  // Softmax attention over that cache, causal, per sequence. q [n, h * dim] wide, rotated -> [n, h * dim] wide.
  virtual Tensor full_attend(const Tensor& q, const FullShape& shape, const Batch& batch, const FullLayer& cache);
  // Kimi Delta Attention (Kimi Linear 2025, section 3) per sequence and head: convolution + SiLU of q, k, v; q and k of
  // length 1; the state decays, is corrected by the delta rule and read; output norm, gated. -> [n, h * dim] wide.
  // Which tokens move the state: see StateLayer.
  virtual Tensor kda_attend(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) = 0;
  // Expert choice (DeepSeek-V3 2024, section 2.1.2): x [n, H] activation; ties: lower id. Every rank has the same
  // choice; see Routing::ids.
  virtual Routing route(const Tensor& x, const RouterWeight& router) = 0;
  // sum_k weight_k * down_e(silu(gate_e x) * up_e x) over the experts here, in the order of k; -> [n, H] f32.
  virtual Tensor moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& experts) = 0;
  virtual Tensor gather_rows(const Tensor& x, std::span<const int32_t> rows) = 0;  // x f32 or wide
  // Copies a residual stream x [n, H] f32 to `out`, wide, for a draft model. The body is for wide numbers in f32.
  virtual void tap(const Tensor& x, const Tensor& out);

  // --- Coarse ops, composed of the above (ops/coarse.cc) ---
  // q projection (with or without q_lora), latent projection, norms, rope, cache write; -> rotated q.
  virtual Tensor mla_in(const Tensor& x, const MlaWeights& w, const Batch& batch, const LatentLayer& cache);
  // Projections of queries, keys and values, rope, cache write; -> rotated q, a view.
  virtual Tensor full_in(const Tensor& x, const FullWeights& w, const Batch& batch, const FullLayer& cache);
  // Projections and kda_attend: x [n, H] activation or wide -> [n, h * dim] wide.
  virtual Tensor kda(const Tensor& x, const KdaWeights& w, const Batch& batch, const StateLayer& state);
  // The reduce points, after a layer's attention and after its MLP: residual += the ranks' sum of y [n, H], of
  // term_dtype(), which may be overwritten, then `out` = the norm of the residual, activation or wide. Of many rows a
  // rank may keep the residual of its own only: before any other word reads it, gather_residual() makes it whole.
  virtual void add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps,
                        const Tensor& out);
  Tensor add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps);  // -> activation
  // add_norm of moe(x), rounded to a term.
  virtual void moe_norm(const Tensor& residual, const Tensor& x, const MoeWeights& w, std::span<const float> weight,
                        float eps, const Tensor& out);
  virtual void gather_residual(const Tensor& /*residual*/) {}
  virtual Tensor dense_mlp(const Tensor& x, const MlpWeights& w, DType out);  // -> [n, H]
  virtual Tensor moe(const Tensor& x, const MoeWeights& w);                   // routed + shared, [n, H] f32
  virtual Tensor logits(const Tensor& x, const LinearWeight& head);           // -> [rows, its share of vocab] f32

  virtual Arena& arena() { return arena_; }

 protected:
  Ops() = default;
  Ops(Comm& comm, Comm& dcp) : comm_(comm), dcp_(dcp) {}  // which outlive it
  Ops(Arena arena, Comm& comm, Comm& dcp) : arena_(std::move(arena)), comm_(comm), dcp_(dcp) {}

  Arena arena_;

 private:
  Comm& comm_ = Comm::alone();
  Comm& dcp_ = Comm::alone();
};

// The definition: plain loops, f32 everywhere, one thread.
std::unique_ptr<Ops> make_ref_ops(Comm& comm = Comm::alone(), Comm& dcp = Comm::alone());
std::unique_ptr<WeightPacker> make_ref_sizes();  // Ops::sizes() of it; so below

struct CpuOptions {
  int num_threads = 0;     // 0: as many as available_cores()
  std::optional<Isa> isa;  // none: the best one of this machine
  Comm& comm = Comm::alone();
  Comm& dcp = Comm::alone();
  OnlineQuantization quantization = OnlineQuantization::kNone;
};
// The fast CPU backend. Unavailable without AVX2 + FMA, and where the machine lacks the wanted instruction set.
Result<std::unique_ptr<Ops>> make_cpu_ops(const CpuOptions& options);
std::unique_ptr<WeightPacker> make_cpu_sizes(OnlineQuantization quantization = OnlineQuantization::kNone);

}  // namespace perigee
