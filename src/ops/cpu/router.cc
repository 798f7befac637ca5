#include "ops/cpu/router.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/gemm.h"
#include "ops/uniform_routing.h"

namespace perigee::cpu {
namespace {

// Working memory of one thread.
struct RouteScratch {
  float* x;       // [H]
  float* choice;  // [E] what is selected by
  float* totals;  // [groups]
};

// Ties: the lower index. NaN is never larger; -1 if nothing is larger than -infinity.
int64_t arg_max(const float* values, int64_t n) {
  int64_t best = -1;
  float largest = -INFINITY;
  for (int64_t i = 0; i < n; ++i) {
    if (!(values[i] > largest)) continue;
    largest = values[i];
    best = i;
  }
  return best;
}

void apply_score(RouterScore score, float* values, int64_t n) {
  if (score == RouterScore::kSigmoid) {
    for (int64_t i = 0; i < n; ++i) values[i] = 1.0f / (1.0f + std::exp(-values[i]));
    return;
  }
  const float largest = *std::max_element(values, values + n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    values[i] = std::exp(values[i] - largest);
    sum += values[i];
  }
  for (int64_t i = 0; i < n; ++i) values[i] /= sum;
}

// Leaves the experts of the best groups in `choice`, -infinity elsewhere.
void keep_best_groups(const RouterWeight& router, const RouteScratch& scratch) {
  const int64_t size = router.num_experts / router.num_groups;
  for (int32_t g = 0; g < router.num_groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::fmax(second, std::fmin(first, scratch.choice[e]));
      first = std::fmax(first, scratch.choice[e]);
    }
    scratch.totals[g] = first + second;
  }
  for (int32_t i = 0; i < router.top_groups; ++i) {
    const int64_t best = arg_max(scratch.totals, router.num_groups);
    if (best < 0) break;
    scratch.totals[best] = NAN;  // kept
  }
  for (int32_t g = 0; g < router.num_groups; ++g) {
    if (!std::isnan(scratch.totals[g])) std::fill_n(scratch.choice + g * size, size, -INFINITY);
  }
}

void route_token(const RouterWeight& router, const RouteScratch& scratch, float* scores, int64_t token, int32_t* ids,
                 float* weights) {
  const int64_t n = router.num_experts;
  apply_score(router.score, scores, n);
  for (int64_t e = 0; e < n; ++e)
    scratch.choice[e] = scores[e] + (router.bias.empty() ? 0.0f : router.bias[static_cast<size_t>(e)]);
  if (router.num_groups > 1) keep_best_groups(router, scratch);
  if (router.uniform)
    for (int64_t e = 0; e < n; ++e) scratch.choice[e] = uniform_choice(token, e);
  float sum = 0;
  for (int32_t k = 0; k < router.top_k; ++k) {
    // Only a row of NaN has no largest expert; it keeps its NaN weights and the sampler's finite check reports it.
    ids[k] = static_cast<int32_t>(std::max<int64_t>(arg_max(scratch.choice, n), 0));
    weights[k] = (router.bias_in_weights && !router.uniform ? scratch.choice : scores)[ids[k]];
    scratch.choice[ids[k]] = -INFINITY;
    sum += weights[k];
  }
  const float divisor = router.normalize ? sum + 1e-20f : 1.0f;
  for (int32_t k = 0; k < router.top_k; ++k) {
    weights[k] = weights[k] / divisor * router.scale;
    ids[k] = router.id_here(ids[k]);
  }
}

}  // namespace

Routing route(const CpuContext& cpu, const Tensor& x, const RouterWeight& router) {
  CHECK(x.dtype == DType::kBF16 && x.cols == router.hidden, "router of ", router.hidden, " given ", x.cols);
  const Routing routing{.num_tokens = x.rows,
                        .top_k = router.top_k,
                        .num_elsewhere = router.num_elsewhere,
                        .ids = cpu.arena.array<int32_t>(x.rows * router.top_k).data(),
                        .weights = cpu.arena.array<float>(x.rows * router.top_k).data()};
  cpu.scratch.reset();
  const std::span<RouteScratch> scratches = cpu.scratch.array<RouteScratch>(cpu.pool.size());
  for (RouteScratch& one : scratches) {
    one = {.x = cpu.scratch.array<float>(router.hidden).data(),
           .choice = cpu.scratch.array<float>(router.num_experts).data(),
           .totals = cpu.scratch.array<float>(router.num_groups).data()};
  }
  const PanelKernels& kernels = panel_kernels(cpu.isa);
  const int64_t n = router.num_experts;
  float* scores = cpu.scratch.array<float>(x.rows * n).data();  // [rows, E]
  // The experts of one token are shared out where there are fewer tokens than threads.
  const int64_t parts = x.rows < cpu.pool.size() ? cpu.pool.size() : 1;
  cpu.pool.run(x.rows * parts, [&](int64_t task, int thread) {
    const RouteScratch& scratch = scratches[static_cast<size_t>(thread)];
    const int64_t token = task / parts, begin = n * (task % parts) / parts, end = n * (task % parts + 1) / parts;
    kernels.to_f32(x.row<uint16_t>(token), scratch.x, router.hidden);
    kernels.dots(scratch.x, router.weight.data() + begin * router.hidden, router.hidden, end - begin,
                 scores + token * n + begin);
  });
  cpu.pool.run(x.rows, [&](int64_t token, int thread) {
    route_token(router, scratches[static_cast<size_t>(thread)], scores + token * n, token,
                routing.ids + token * router.top_k, routing.weights + token * router.top_k);
  });
  return routing;
}

}  // namespace perigee::cpu
