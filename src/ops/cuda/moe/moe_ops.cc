// CudaOps: router, experts and gated MLPs.
#include "ops/cuda/backend.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/gemm/hopper_gemm.h"
#include "ops/cuda/gemm/ordered_gemm.h"
#include "ops/cuda/gemm/tile_gemm.h"
#include "ops/cuda/moe/combine.h"
#include "ops/cuda/moe/route.h"

namespace perigee {
namespace {

static_assert(kCudaLimits.max_experts == kMaxRoutedExperts);

// Experts that tokens choose among.
int64_t chosen_among(const Routing& routing, const ExpertWeights& here) {
  return here.num_experts + routing.num_elsewhere;
}

}  // namespace

Routing CudaOps::route(const Tensor& x, const RouterWeight& router) {
  CHECK(x.cols == router.hidden && router.num_experts <= kCudaLimits.max_experts &&
        router.num_groups <= kCudaLimits.max_groups && router.top_k <= kCudaLimits.max_top_k);
  const Routing routing{.num_tokens = x.rows,
                        .top_k = router.top_k,
                        .num_elsewhere = router.num_elsewhere,
                        .ids = arena_.array<int32_t>(x.rows * router.top_k).data(),
                        .weights = arena_.array<float>(x.rows * router.top_k).data()};
  const bool fixed = options_.deterministic;
  float* scores = arena_.array<float>(route_most_scratch(x.rows, router, fixed)).data();
  check(route_rows(x, router, fixed, scores, routing, stream()), "route");
  return routing;
}

CudaOps::ExpertLists CudaOps::make_lists(const Routing& routing, const ExpertWeights& weights) {
  const WeightFormat format = static_cast<const CudaExperts&>(*weights.packed).down.format;
  const int64_t num_pairs = routing.num_tokens * routing.top_k;
  ExpertLists lists{.call = {}, .choice = choose_experts(format, num_pairs, chosen_among(routing, weights), traits_)};
  if (routing.num_elsewhere > 0) lists.choice.sorted = true;  // unsorted, each pair is an item
  if (!lists.choice.sorted) {
    lists.call.expert_ids = routing.ids;
    lists.call.max_items = static_cast<int32_t>(num_pairs);
    return lists;
  }
  if (lists.choice.kernel == GemmKernel::kHopper) lists.choice.item_rows = hopper_item_rows(format);
  const int item_rows = lists.choice.item_rows;
  lists.call.max_items = static_cast<int32_t>(moe_max_items(num_pairs, weights.num_experts, item_rows));
  // As long as those of fewer pairs in shorter items: what a step takes grows with its rows.
  lists.call.items = arena_.array<MoeItem>(moe_max_items(num_pairs, weights.num_experts, kLeastItemRows)).data();
  lists.call.pairs = arena_.array<int32_t>(num_pairs).data();
  lists.call.num_items = arena_.array<int32_t>(1).data();
  int32_t* counts = arena_.array<int32_t>(sort_counts(num_pairs, weights.num_experts)).data();
  check(sort_pairs(routing.ids, num_pairs, weights.num_experts, item_rows, counts, lists.call, stream()), "moe_sort");
  return lists;
}

void CudaOps::expert_product(const CudaMatrix& weight, GemmCall call, const ExpertLists& lists, const char* op) {
  call.weight = weight.data.data();
  call.scale = weight.scale.data();
  call.weight_stride = weight.matrix_bytes();
  call.scale_stride = weight.scale_bytes();
  call.out = static_cast<int32_t>(weight.out);
  call.in = static_cast<int32_t>(weight.in);
  call.chunks = static_cast<int32_t>(weight.padded_in / 128);
  if (lists.choice.kernel != GemmKernel::kHopper) {
    const GemmChoice own{.kernel = lists.choice.kernel, .item_rows = lists.choice.item_rows};
    return own_gemm(weight.format, call, own, op);
  }
  const auto experts = static_cast<int>(weight.data.size() / static_cast<size_t>(weight.matrix_bytes()));
  check(hopper_gemm(weight.format, call, experts, stream()), op);
}

Tensor CudaOps::moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& weights) {
  const Tensor y = arena_.tensor(DType::kF32, x.rows, weights.hidden);
  const Tensor outputs = run_experts(x, routing, make_lists(routing, weights), weights);
  check(combine_rows({.outputs = outputs, .routing = routing, .shared = {}}, false, y, stream()), "moe_combine");
  return y;
}

Tensor CudaOps::dense_mlp(const Tensor& x, const MlpWeights& w, DType out) {
  const Tensor hidden = arena_.tensor(DType::kBF16, x.rows, w.gate_up.out / 2);
  if (choose_separate_silu(static_cast<const CudaMatrix&>(*w.gate_up.packed).format, x.rows, traits_)) {
    check(silu_mul_rows(product(x, w.gate_up, DType::kF32, "dense_mlp"), true, hidden, stream()), "silu_mul");
    return linear(hidden, w.down, out);
  }
  gemm(static_cast<const CudaMatrix&>(*w.gate_up.packed),
       {.x = x.row<const uint16_t>(0),
        .x_stride = x.row_stride,
        .y = hidden.data,
        .y_stride = hidden.row_stride,
        .rows = static_cast<int32_t>(x.rows),
        .output = GemmOutput::kSiluMul},
       "dense_mlp");
  return linear(hidden, w.down, out);
}

Tensor CudaOps::moe(const Tensor& x, const MoeWeights& w) {
  const Tensor y = arena_.tensor(DType::kF32, x.rows, w.experts.hidden);
  check(combine_rows(run_moe(x, w), false, y, stream()), "moe_combine");
  return y;
}

void CudaOps::moe_norm(const Tensor& residual, const Tensor& x, const MoeWeights& w, std::span<const float> weight,
                       float eps, const Tensor& out) {
  CHECK(std::ssize(weight) == residual.cols && residual.rows == x.rows && residual.cols == x.cols &&
        out.rows == x.rows && out.cols == x.cols);
  const MoeParts parts = run_moe(x, w);
  if (comm().size() > 1) {
    const Tensor y = arena_.tensor(term_dtype(), x.rows, w.experts.hidden);
    check(combine_rows(parts, false, y, stream()), "moe_combine");
    return add_norm(residual, y, weight, eps, out);
  }
  if (combine_norm_pays(residual))
    return check(combine_norm_rows(parts, residual, weight.data(), eps, out, stream()), "moe_combine");
  check(combine_rows(parts, true, residual, stream()), "moe_combine");
  rms_norm(residual, weight, eps, out);
}

MoeParts CudaOps::run_moe(const Tensor& x, const MoeWeights& w) {
  MoeParts parts{.outputs = {}, .routing = route(x, w.router), .shared = {}};
  ExpertLists lists = make_lists(parts.routing, w.experts);
  if (w.shared.down.packed) {
    parts.shared = dense_mlp(x, w.shared, DType::kF32);
    lists.call.lists_settled = true;
  }
  parts.outputs = run_experts(x, parts.routing, lists, w.experts);
  return parts;
}

Tensor CudaOps::run_experts(const Tensor& x, const Routing& routing, const ExpertLists& lists,
                            const ExpertWeights& weights) {
  CHECK(x.cols == weights.hidden && weights.num_experts <= kMaxRoutedExperts);
  const auto& experts = static_cast<const CudaExperts&>(*weights.packed);
  const int64_t num_pairs = x.rows * routing.top_k;
  const bool hopper = lists.choice.kernel == GemmKernel::kHopper;
  const Tensor hidden = arena_.tensor(DType::kBF16, num_pairs, weights.inter);
  // As much as those of fewer pairs, which are f32.
  const int64_t first_bf16 = first_hopper_pairs(chosen_among(routing, weights), traits_);
  Tensor parts = arena_.tensor(DType::kF32, moe_most_parts(num_pairs, first_bf16), weights.hidden);
  parts.dtype = hopper ? DType::kBF16 : DType::kF32;
  parts.rows = num_pairs;
  GemmCall up = lists.call;
  up.x = x.row<const uint16_t>(0);
  up.x_stride = x.row_stride;
  up.x_divisor = routing.top_k;
  up.y = hidden.data;
  up.y_stride = hidden.row_stride;
  up.output = GemmOutput::kSiluMul;
  expert_product(experts.gate_up, up, lists, "moe gate and up");
  GemmCall down = lists.call;
  down.lists_settled = true;
  down.x = hidden.row<const uint16_t>(0);
  down.x_stride = hidden.row_stride;
  down.y = parts.data;
  down.y_stride = parts.row_stride;
  down.output = hopper ? GemmOutput::kBF16 : GemmOutput::kF32;
  expert_product(experts.down, down, lists, "moe down");
  return parts;
}

}  // namespace perigee
