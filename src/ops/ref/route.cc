// Expert choice (DeepSeek-V3 2024, section 2.1.2, equations 12 to 16), as RefOps defines it.
#include <algorithm>
#include <cmath>

#include "ops/ref/ref_ops.h"
#include "ops/uniform_routing.h"

namespace perigee {
namespace {

void apply_score(RouterScore score, std::vector<float>& logits) {
  if (score == RouterScore::kSigmoid) {
    for (float& z : logits) z = 1.0f / (1.0f + std::exp(-z));
    return;
  }
  float largest = -INFINITY, sum = 0;
  for (const float z : logits) largest = std::fmax(largest, z);
  for (float& z : logits) sum += z = std::exp(z - largest);
  for (float& z : logits) z /= sum;
}

// The index of the largest value, the lowest of equals; -1 when all are -infinity.
int32_t arg_max(std::span<const float> x) {
  int32_t best = -1;
  for (int32_t i = 0; i < static_cast<int32_t>(x.size()); ++i)
    if (x[i] > (best < 0 ? -INFINITY : x[best])) best = i;
  return best;
}

// Leaves the experts of the best groups in `choice`, -infinity elsewhere.
void keep_best_groups(const RouterWeight& router, std::vector<float>& choice) {
  const int64_t size = router.num_experts / router.num_groups;
  std::vector<float> totals(router.num_groups);
  for (int32_t g = 0; g < router.num_groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::fmax(second, std::fmin(first, choice[e]));
      first = std::fmax(first, choice[e]);
    }
    totals[g] = first + second;
  }
  std::vector<bool> kept(router.num_groups);
  for (int32_t i = 0; i < router.top_groups; ++i) {
    const int32_t best = arg_max(totals);
    if (best < 0) break;
    kept[best] = true;
    totals[best] = -INFINITY;
  }
  for (int64_t e = 0; e < router.num_experts; ++e)
    if (!kept[e / size]) choice[e] = -INFINITY;
}

void route_token(const RouterWeight& router, const float* x, int64_t token, int32_t* ids, float* weights) {
  std::vector<float> scores(router.num_experts);
  for (int64_t e = 0; e < router.num_experts; ++e)
    scores[e] = ref_dot(x, router.weight.data() + e * router.hidden, router.hidden);
  apply_score(router.score, scores);
  std::vector<float> choice = scores;
  for (size_t e = 0; e < router.bias.size(); ++e) choice[e] += router.bias[e];
  if (router.num_groups > 1) keep_best_groups(router, choice);
  if (router.uniform)
    for (int64_t e = 0; e < router.num_experts; ++e) choice[e] = uniform_choice(token, e);
  float sum = 0;
  for (int32_t k = 0; k < router.top_k; ++k) {
    // Only a row of NaN has no largest expert; it keeps its NaN weights and the sampler's finite check reports it.
    ids[k] = std::max(arg_max(choice), 0);
    weights[k] = (router.bias_in_weights && !router.uniform ? choice : scores)[ids[k]];
    choice[ids[k]] = -INFINITY;
    sum += weights[k];
  }
  const float divisor = router.normalize ? sum + 1e-20f : 1.0f;
  for (int32_t k = 0; k < router.top_k; ++k) {
    weights[k] = weights[k] / divisor * router.scale;
    ids[k] = router.id_here(ids[k]);
  }
}

}  // namespace

Routing RefOps::route(const Tensor& x, const RouterWeight& router) {
  const Routing routing{.num_tokens = x.rows,
                        .top_k = router.top_k,
                        .num_elsewhere = router.num_elsewhere,
                        .ids = arena_.array<int32_t>(x.rows * router.top_k).data(),
                        .weights = arena_.array<float>(x.rows * router.top_k).data()};
  for (int64_t i = 0; i < x.rows; ++i)
    route_token(router, x.row<float>(i), i, routing.ids + i * router.top_k, routing.weights + i * router.top_k);
  return routing;
}

}  // namespace perigee
