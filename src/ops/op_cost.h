// What the ops that models call read and compute, for traces: the one place where their bytes are counted.
//
// Bytes are what must come from memory at least once: packed weights (of experts those that were chosen), the cache,
// the recurrent state (read and written), and the activations that go in. FLOPs count a multiply-add as two.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/batch.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee {

// A piece of an op that a backend may run as kernels of its own. `labels` are what such a backend calls these launches
// (OpObserver::launched), with | between; where several parts share a label, they are the first, second ... launch of
// that label.
struct CostPart {
  const char* labels = "";
  std::string what;  // for readers: "q", "experts: down"
  int64_t bytes = 0;
  double flops = 0;

  bool has_label(std::string_view label) const;
};

struct OpCost {
  std::string op;  // its name, with what tells its uses apart
  std::vector<CostPart> parts;
  int64_t distinct_experts = 0, num_experts = 0;  // of MoE ops: those of this rank that were chosen, and all of them

  int64_t bytes() const;
  double flops() const;
};

OpCost embed_cost(const EmbedWeight& table, int64_t rows, DType stored);
OpCost rms_norm_cost(const Tensor& x);
OpCost linear_cost(const Tensor& x, const LinearWeight& w);
OpCost add_cost(const Tensor& residual);
OpCost add_norm_cost(const Tensor& residual);
OpCost gather_residual_cost();  // what comes from other ranks is no memory's
OpCost gather_rows_cost(const Tensor& x, int64_t rows);
OpCost tap_cost(const Tensor& x, const Tensor& out);
OpCost mla_in_cost(const Tensor& x, const MlaWeights& w, const LatentLayer& cache);
// `wide`: element type of the up-projections and queries.
OpCost mla_attend_cost(const MlaShape& shape, const Batch& batch, const LatentLayer& cache, DType wide);
OpCost full_in_cost(const Tensor& x, const FullWeights& w, const FullLayer& cache);
OpCost full_attend_cost(const FullShape& shape, const Batch& batch, const FullLayer& cache);
OpCost kda_cost(const Tensor& x, const KdaWeights& w, const Batch& batch);
OpCost dense_mlp_cost(const Tensor& x, const MlpWeights& w);
// Of the experts here: how many were chosen, and how often.
struct ChosenExperts {
  int64_t distinct = 0, pairs = 0;
};
OpCost moe_cost(const Tensor& x, const MoeWeights& w, const ChosenExperts& chosen);
OpCost moe_norm_cost(const Tensor& residual, const Tensor& x, const MoeWeights& w, const ChosenExperts& chosen);

}  // namespace perigee
