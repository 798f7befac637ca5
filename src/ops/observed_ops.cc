#include "ops/observed_ops.h"

#include <algorithm>

namespace perigee {
namespace {

class ObservedOps final : public Ops {
 public:
  ObservedOps(Ops& inner, OpObserver& observer) : Ops(inner.comm(), inner.dcp()), inner_(inner), observer_(observer) {}

  const char* name() const override { return inner_.name(); }
  DType activation_dtype() const override { return inner_.activation_dtype(); }
  DType wide_dtype() const override { return inner_.wide_dtype(); }
  DType term_dtype() const override { return inner_.term_dtype(); }
  bool on_device() const override { return inner_.on_device(); }
  Buffer make_buffer(size_t bytes) override { return inner_.make_buffer(bytes); }
  void copy(void* to, const void* from, size_t bytes) override { inner_.copy(to, from, bytes); }
  Status status() override { return inner_.status(); }
  Arena& arena() override { return inner_.arena(); }

  std::unique_ptr<WeightPacker> sizes() const override { return inner_.sizes(); }
  ShapeLimits limits() const override { return inner_.limits(); }
  LinearWeight pack_linear(std::span<const RawMatrix> stacked) override { return inner_.pack_linear(stacked); }
  LinearWeight pack_gate_up(const RawMatrix& gate, const RawMatrix& up) override {
    return inner_.pack_gate_up(gate, up);
  }
  ExpertWeights pack_experts(std::span<const RawExpert> experts) override { return inner_.pack_experts(experts); }
  MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) override {
    return inner_.pack_mla_up(kv_b, shape);
  }
  EmbedWeight pack_embed(const RawMatrix& table) override { return inner_.pack_embed(table); }
  VectorWeight pack_vector(VectorWeight host) override { return inner_.pack_vector(std::move(host)); }
  bool makes_dummy_weights() const override { return inner_.makes_dummy_weights(); }

  void begin_step() override {
    inner_.begin_step();
    observer_.begin_step();
  }
  Tensor embed(const EmbedWeight& table, std::span<const int32_t> tokens) override {
    return observe([&] { return embed_cost(table, std::ssize(tokens), activation_dtype()); },
                   [&] { return inner_.embed(table, tokens); });
  }
  void rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) override {
    observe([&] { return rms_norm_cost(x); }, [&] { inner_.rms_norm(x, weight, eps, out); });
  }
  Tensor linear(const Tensor& x, const LinearWeight& w, DType out) override {
    return observe([&] { return linear_cost(x, w); }, [&] { return inner_.linear(x, w, out); });
  }
  void add(const Tensor& residual, const Tensor& y) override {
    observe([&] { return add_cost(residual); }, [&] { inner_.add(residual, y); });
  }
  Tensor gather_rows(const Tensor& x, std::span<const int32_t> rows) override {
    return observe([&] { return gather_rows_cost(x, std::ssize(rows)); }, [&] { return inner_.gather_rows(x, rows); });
  }
  void tap(const Tensor& x, const Tensor& out) override {
    observe([&] { return tap_cost(x, out); }, [&] { inner_.tap(x, out); });
  }
  Tensor mla_in(const Tensor& x, const MlaWeights& w, const Batch& batch, const LatentLayer& cache) override {
    return observe([&] { return mla_in_cost(x, w, cache); }, [&] { return inner_.mla_in(x, w, batch, cache); });
  }
  Tensor mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                    const LatentLayer& cache) override {
    return observe([&] { return mla_attend_cost(shape, batch, cache, activation_dtype()); },
                   [&] { return inner_.mla_attend(q, up, shape, batch, cache); });
  }
  Tensor full_in(const Tensor& x, const FullWeights& w, const Batch& batch, const FullLayer& cache) override {
    return observe([&] { return full_in_cost(x, w, cache); }, [&] { return inner_.full_in(x, w, batch, cache); });
  }
  Tensor full_attend(const Tensor& q, const FullShape& shape, const Batch& batch, const FullLayer& cache) override {
    return observe([&] { return full_attend_cost(shape, batch, cache); },
                   [&] { return inner_.full_attend(q, shape, batch, cache); });
  }
  Tensor kda(const Tensor& x, const KdaWeights& w, const Batch& batch, const StateLayer& state) override {
    return observe([&] { return kda_cost(x, w, batch); }, [&] { return inner_.kda(x, w, batch, state); });
  }
  void add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps,
                const Tensor& out) override {
    observe([&] { return add_norm_cost(residual); }, [&] { inner_.add_norm(residual, y, weight, eps, out); });
  }
  void gather_residual(const Tensor& residual) override {
    observe([&] { return gather_residual_cost(); }, [&] { inner_.gather_residual(residual); });
  }
  Tensor dense_mlp(const Tensor& x, const MlpWeights& w, DType out) override {
    return observe([&] { return dense_mlp_cost(x, w); }, [&] { return inner_.dense_mlp(x, w, out); });
  }
  Tensor moe(const Tensor& x, const MoeWeights& w) override {
    return observe([&] { return moe_cost(x, w, chosen_experts(x, w.router)); }, [&] { return inner_.moe(x, w); });
  }
  void moe_norm(const Tensor& residual, const Tensor& x, const MoeWeights& w, std::span<const float> weight, float eps,
                const Tensor& out) override {
    observe([&] { return moe_norm_cost(residual, x, w, chosen_experts(x, w.router)); },
            [&] { inner_.moe_norm(residual, x, w, weight, eps, out); });
  }
  Tensor logits(const Tensor& x, const LinearWeight& head) override {
    return observe([&] { return linear_cost(x, head); }, [&] { return inner_.logits(x, head); });
  }

  // Models call none of these; the coarse ops above are made of them, inside the backend.
  Tensor silu_mul(const Tensor& gate_up) override { return inner_.silu_mul(gate_up); }
  void rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
            const Rope& rope) override {
    inner_.rope(x, head_dim, rope_begin, positions, rope);
  }
  void write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) override {
    inner_.write_latent(c, k_rope, batch, cache);
  }
  Tensor kda_attend(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) override {
    return inner_.kda_attend(in, w, batch, state);
  }
  Routing route(const Tensor& x, const RouterWeight& router) override { return inner_.route(x, router); }
  Tensor moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& experts) override {
    return inner_.moe_experts(x, routing, experts);
  }

 private:
  template <typename Cost, typename Run>
  auto observe(const Cost& cost, const Run& run) -> decltype(run()) {
    if (observer_.wants_costs()) observer_.cost(cost());
    const Scope scope(observer_);
    return run();
  }
  struct Scope {
    explicit Scope(OpObserver& o) : observer(o) { observer.begin_op(); }
    ~Scope() { observer.end_op(); }
    OpObserver& observer;
  };

  ChosenExperts chosen_experts(const Tensor& x, const RouterWeight& router) {
    const ArenaScope scratch(arena());
    const Routing routing = inner_.route(x, router);
    std::vector<int32_t> ids(static_cast<size_t>(routing.num_tokens * routing.top_k));
    inner_.copy(ids.data(), routing.ids, ids.size() * sizeof(int32_t));
    std::erase(ids, -1);
    const int64_t pairs = std::ssize(ids);
    std::sort(ids.begin(), ids.end());
    return {.distinct = std::unique(ids.begin(), ids.end()) - ids.begin(), .pairs = pairs};
  }

  Ops& inner_;
  OpObserver& observer_;
};

}  // namespace

std::unique_ptr<Ops> observe_ops(Ops& inner, OpObserver& observer) {
  return std::make_unique<ObservedOps>(inner, observer);
}

}  // namespace perigee
