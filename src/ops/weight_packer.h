// WeightPacker: how a backend keeps weights. Every Ops is one. A sizes packer (make_ref_sizes() and its like) lays
// weights out by the same functions and keeps their sizes alone: what a model takes is known without its numbers.
#pragma once

#include <memory>
#include <span>

#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee {

class WeightPacker {
 public:
  virtual ~WeightPacker() = default;
  virtual const char* name() const = 0;
  virtual DType activation_dtype() const = 0;
  virtual bool on_device() const { return false; }  // whether it packs into other memory than the host's

  // --- Once at load: copied and repacked into this backend's layout; `raw` may be freed after the call. ---
  virtual ShapeLimits limits() const { return {}; }  // a model beyond them must not be packed
  // Matrices stacked by rows become one: y = concat(W_i x).
  virtual LinearWeight pack_linear(std::span<const RawMatrix> stacked) = 0;
  // Of a gated MLP, for dense_mlp() alone, which may want its rows in another order.
  virtual LinearWeight pack_gate_up(const RawMatrix& gate, const RawMatrix& up);
  virtual ExpertWeights pack_experts(std::span<const RawExpert> experts) = 0;
  // kv_b: per head dn rows of W_UK, then dv rows of W_UV; [h * (dn + dv), L].
  virtual MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) = 0;
  virtual EmbedWeight pack_embed(const RawMatrix& table) = 0;
  // Norms, biases, frequencies and routers go through here; host backends keep what they are given.
  virtual VectorWeight pack_vector(VectorWeight host) { return host; }
  // Whether pack_linear, pack_experts, pack_mla_up and pack_embed take a RawMatrix of keys without data.
  virtual bool makes_dummy_weights() const { return false; }
  LinearWeight pack_linear(const RawMatrix& raw) { return pack_linear(std::span(&raw, 1)); }
};

// A weight of which nothing is kept but its size.
inline Packed counted_weight(int64_t bytes) {
  struct Counted final : PackedWeight {
    explicit Counted(int64_t n) : size(n) {}
    int64_t size;
    int64_t bytes() const override { return size; }
  };
  return std::make_shared<const Counted>(bytes);
}

// What a sizes packer returns, from the shapes of what it is given.
inline LinearWeight counted_linear(std::span<const RawMatrix> stacked, int64_t bytes) {
  LinearWeight w{.out = 0, .in = stacked.front().in, .packed = counted_weight(bytes)};
  for (const RawMatrix& m : stacked) w.out += m.out;
  return w;
}
inline ExpertWeights counted_experts(std::span<const RawExpert> experts, int64_t bytes) {
  return {.num_experts = static_cast<int64_t>(experts.size()),
          .hidden = experts.front().gate.in,
          .inter = experts.front().gate.out,
          .packed = counted_weight(bytes)};
}
inline EmbedWeight counted_embed(const RawMatrix& table, int64_t bytes) {
  return {.vocab = table.out, .dim = table.in, .first = table.first_row, .packed = counted_weight(bytes)};
}

}  // namespace perigee
