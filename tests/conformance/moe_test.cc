// Router and experts of a backend against their definition in `ref`.
#include "backends.h"

namespace perigee {
namespace {

RouterWeight make_router(int64_t experts, int64_t hidden, RouterScore score, int32_t groups, bool bf16 = false) {
  RouterWeight router{.num_experts = experts, .hidden = hidden, .score = score, .top_k = 4};
  std::vector<float> weight, bias;
  for (int64_t i = 0; i < experts * hidden; ++i)
    weight.push_back(value_at(21, i) * 2 / std::sqrt(static_cast<float>(hidden)));
  if (bf16)
    for (float& w : weight) w = bf16_to_f32(f32_to_bf16(w));
  if (score == RouterScore::kSigmoid)
    for (int64_t e = 0; e < experts; ++e) bias.push_back(0.1f * value_at(22, e));
  router.weight = std::move(weight);
  router.bias = std::move(bias);
  router.num_groups = groups;
  router.top_groups = std::max(1, groups / 2);
  router.normalize = score == RouterScore::kSigmoid;
  router.scale = 2.5f;
  return router;
}

// The router with its vectors where the backend reads them.
RouterWeight packed(Ops& ops, RouterWeight router) {
  router.weight = ops.pack_vector(router.weight);
  router.bias = ops.pack_vector(router.bias);
  return router;
}

TEST(Conformance, Route) {
  struct Case {
    RouterScore score;
    int32_t groups;
    int64_t experts, hidden, rows;
    bool bias_in_weights = false;
    bool bf16 = false;  // weights are bf16 numbers
    bool uniform = false;
    int64_t first_here = 0, num_elsewhere = 0;
  };
  const auto ref = make_ref_ops();
  for (Backend& backend : backends())
    for (const Case& c : ends_if_sanitized<Case>({{RouterScore::kSigmoid, 1, 32, 256, 40},
                                                  {RouterScore::kSigmoid, 8, 32, 256, 40},
                                                  {RouterScore::kSigmoid, 8, 32, 256, 40, true},
                                                  {RouterScore::kSigmoid, 1, 32, 256, 3, true},
                                                  {RouterScore::kSigmoid, 1, 384, 1000, 1},
                                                  {.score = RouterScore::kSigmoid,
                                                  .groups = 8,
                                                  .experts = 32,
                                                  .hidden = 256,
                                                  .rows = 40,
                                                  .first_here = 11,
                                                  .num_elsewhere = 22},
                                                  {RouterScore::kSigmoid, 1, 384, 1000, 70, true},
                                                  {RouterScore::kSoftmax, 1, 70, 584, 200},
                                                  {RouterScore::kSigmoid, 1, 384, 1000, 5, false, true},
                                                  {RouterScore::kSigmoid, 1, 384, 7168, 64, false, true},
                                                  {RouterScore::kSoftmax, 1, 70, 2056, 9},
                                                  {RouterScore::kSoftmax, 1, 70, 584, 129, false, true},
                                                  {RouterScore::kSoftmax, 1, 1000, 264, 600},
                                                  {RouterScore::kSigmoid, 8, 384, 256, 1100, true, false, true},
                                                  {RouterScore::kSoftmax, 1, 70, 584, 5, false, false, true},
                                                  {RouterScore::kSoftmax, 1, 32, 256, 40}})) {
      RouterWeight router = make_router(c.experts, c.hidden, c.score, c.groups, c.bf16);
      router.bias_in_weights = c.bias_in_weights;
      router.uniform = c.uniform;
      router.first_here = c.first_here;
      router.num_elsewhere = c.num_elsewhere;
      poison(*backend.ops, 4 << 20);
      ref->begin_step();
      Ops& ops = *backend.ops;
      const auto count = c.rows * router.top_k;
      const Routing got = ops.route(activation(ops, c.rows, c.hidden, 6), packed(ops, router));
      const std::vector<int32_t> ids = fetch(ops, got.ids, count);
      const std::vector<float> weights = fetch(ops, got.weights, count);
      const Routing wanted = ref->route(activation(*ref, c.rows, c.hidden, 6), router);
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(ids[static_cast<size_t>(i)], wanted.ids[i])
            << backend.name << " experts " << c.experts << " groups " << c.groups << " at " << i;
        ASSERT_NEAR(weights[static_cast<size_t>(i)], wanted.weights[i], 1e-5) << backend.name;
      }
    }
}

struct ExpertCase {
  int64_t hidden, inter, rows;
};

// Every kernel by its number of pairs, whole and cut tiles.
std::vector<ExpertCase> expert_cases(const Ops& ops) {
  std::vector<ExpertCase> all =
      ends_if_sanitized<ExpertCase>({{256, 128, 1}, {256, 128, 5}, {256, 128, 300}, {256, 128, 70}});
  if (!ops.on_device()) return all;
  if (gpu_sanitizer())
    return {{352, 96, 1}, {352, 96, 12}, {352, 96, 24}, {352, 96, 100}, {352, 96, 1100}, {8704, 96, 2}};
  for (const int64_t rows : {1, 3, 12, 24, 70, 200, 300, 420, 700, 1100}) all.push_back({352, 96, rows});
  for (const int64_t rows : {2, 40, 600}) all.push_back({1408, 320, rows});
  for (const int64_t rows : {2, 4}) all.push_back({4096, 160, rows});
  all.push_back({8704, 96, 2});  // more tiles than blocks of a GPU at once
  return all;
}

// Gate, up and down of each.
std::vector<Stored> store_experts(WeightFormat format, int64_t count, int64_t hidden, int64_t inter) {
  std::vector<Stored> stored;
  for (int64_t e = 0; e < count; ++e) {
    stored.push_back(store(format, inter, hidden, 100 + static_cast<uint64_t>(e)));
    stored.push_back(store(format, inter, hidden, 200 + static_cast<uint64_t>(e)));
    stored.push_back(store(format, hidden, inter, 300 + static_cast<uint64_t>(e)));
  }
  return stored;
}

std::vector<RawExpert> raw_experts(const std::vector<Stored>& stored) {
  std::vector<RawExpert> experts;
  for (size_t i = 0; i < stored.size(); i += 3)
    experts.push_back({stored[i].raw, stored[i + 1].raw, stored[i + 2].raw});
  return experts;
}

class Experts : public testing::TestWithParam<WeightFormat> {};

TEST_P(Experts, AreThoseOfRef) {
  const auto ref = make_ref_ops();
  constexpr int64_t kExperts = 8;
  for (Backend& backend : backends())
    for (const auto& [hidden, inter, rows] : expert_cases(*backend.ops)) {
      const std::vector<Stored> stored = store_experts(GetParam(), kExperts, hidden, inter);
      const std::vector<RawExpert> experts = raw_experts(stored);
      const RouterWeight router = make_router(kExperts, hidden, RouterScore::kSigmoid, 1);
      const auto run = [&, hidden = hidden, rows = rows](Ops& ops) {
        const Tensor x = activation(ops, rows, hidden, 6);
        return fetch(ops, ops.moe_experts(x, ops.route(x, packed(ops, router)), ops.pack_experts(experts)));
      };
      poison(*backend.ops, 64 << 20);
      ref->begin_step();
      expect_close(run(*backend.ops), run(*ref),
                   str_cat(backend.name, " experts, hidden ", hidden, " inter ", inter, " rows ", rows));
    }
}

// What ranks make of the same tokens adds up, one of them with a single expert, which of few tokens none may have
// chosen.
TEST_P(Experts, OfSeveralRanksAddUp) {
  constexpr int64_t kExperts = 8;
  for (Backend& backend : backends())
    for (const int64_t rows : few_if_gpu_sanitizer<int64_t>({1, 12, 70, 300, 700}, {1, 24})) {
      constexpr int64_t hidden = 352, inter = 96;
      const std::vector<Stored> stored = store_experts(GetParam(), kExperts, hidden, inter);
      const std::vector<RawExpert> experts = raw_experts(stored);
      const auto run = [&](Ops& ops, int64_t first, int64_t count) {
        RouterWeight router = make_router(kExperts, hidden, RouterScore::kSigmoid, 1);
        router.first_here = first;
        router.num_elsewhere = kExperts - count;
        const Tensor x = activation(ops, rows, hidden, 6);
        const ExpertWeights here =
            ops.pack_experts(std::span(experts).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
        return fetch(ops, ops.moe_experts(x, ops.route(x, packed(ops, router)), here));
      };
      const auto ref = make_ref_ops();
      Values sum = run(*ref, 0, kExperts);
      const Values wanted = sum;
      std::fill(sum.at.begin(), sum.at.end(), 0.0f);
      for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 3}, {3, 1}, {4, 4}}) {
        poison(*backend.ops, 16 << 20);
        const Values part = run(*backend.ops, first, count);
        for (size_t i = 0; i < sum.at.size(); ++i) sum.at[i] += part.at[i];
      }
      expect_close(sum, wanted, str_cat(backend.name, " experts of three ranks, rows ", rows));
    }
}

// So many pairs that several blocks sort them; the last tokens against ref.
TEST_P(Experts, OfManyTokens) {
  constexpr int64_t kExperts = 8, kHidden = 352, kInter = 96, kTokens = 16384, kChecked = 48;
  for (Backend& backend : backends()) {
    if (!backend.name.starts_with("cuda") || gpu_sanitizer()) continue;
    const std::vector<Stored> stored = store_experts(GetParam(), kExperts, kHidden, kInter);
    const std::vector<RawExpert> experts = raw_experts(stored);
    const RouterWeight router = make_router(kExperts, kHidden, RouterScore::kSigmoid, 1);
    const auto run = [&](Ops& ops, int64_t first) {
      const Tensor x = activation(ops, kTokens, kHidden, 6).row_range(first, kTokens - first);
      const Tensor y = ops.moe_experts(x, ops.route(x, packed(ops, router)), ops.pack_experts(experts));
      return fetch(ops, y.row_range(y.rows - kChecked, kChecked));
    };
    poison(*backend.ops, 64 << 20);
    const auto ref = make_ref_ops();
    expect_close(run(*backend.ops, 0), run(*ref, kTokens - kChecked), str_cat(backend.name, " experts of many tokens"));
  }
}

// Deterministic: a token has the bits beside others that it has alone.
TEST_P(Experts, DoNotDependOnTheNumberOfTokens) {
  constexpr int64_t kExperts = 16;
  for (Backend& backend : backends()) {
    if (backend.name != "cuda_fixed") continue;
    Ops& ops = *backend.ops;
    for (const auto& [hidden, inter] :
         few_if_gpu_sanitizer<std::pair<int64_t, int64_t>>({{7168, 256}, {2304, 1024}, {352, 96}}, {{352, 96}})) {
      std::vector<RawExpert> raw;
      const auto matrix = [&](int64_t out, int64_t in) {
        const auto key = static_cast<uint64_t>(10 * raw.size());
        return RawMatrix{.format = GetParam(), .out = out, .in = in, .data_key = key + out, .scale_key = key + 1};
      };
      while (std::ssize(raw) < kExperts)
        raw.push_back({matrix(inter, hidden), matrix(inter, hidden), matrix(hidden, inter)});
      const ExpertWeights weights = ops.pack_experts(raw);
      const auto run = [&, hidden = hidden](int64_t tokens) {
        poison(ops, 16 << 20);
        std::vector<int32_t> ids;
        for (int64_t i = 0; i < 4 * tokens; ++i) ids.push_back(static_cast<int32_t>(i * 5 % kExperts));
        const Tensor factors = activation(ops, tokens, 4, 7, DType::kF32);
        const Routing routing{.num_tokens = tokens,
                              .top_k = 4,
                              .ids = const_cast<int32_t*>(place(ops, ids).data()),
                              .weights = static_cast<float*>(factors.data)};
        return fetch(ops, ops.moe_experts(activation(ops, tokens, hidden, 6), routing, weights)).at;
      };
      const std::vector<float> many = run(gpu_sanitizer() ? 150 : 700);
      // 132 and 133: 33 tokens an expert, from where on they run on another kernel.
      for (const int64_t tokens :
           few_if_gpu_sanitizer<int64_t>({1, 2, 4, 7, 24, 33, 70, 128, 129, 132, 133, 300}, {1, 24, 70})) {
        const std::vector<float> few = run(tokens);
        for (size_t i = 0; i < few.size(); ++i)
          ASSERT_EQ(few[i], many[i]) << hidden << "x" << inter << " tokens " << tokens << " at " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Experts,
                         testing::Values(WeightFormat::kBF16, WeightFormat::kInt4Group32, WeightFormat::kF8Block128),
                         [](const auto& info) {
                           return info.param == WeightFormat::kBF16          ? "bf16"
                                  : info.param == WeightFormat::kInt4Group32 ? "int4"
                                                                             : "fp8";
                         });

// Routed and shared experts together, as an output and onto a residual.
TEST(Conformance, MoeWithSharedExperts) {
  const auto ref = make_ref_ops();
  constexpr int64_t kExperts = 8, kHidden = 352, kInter = 160;
  for (Backend& backend : backends())
    for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kInt4Group32})
      for (const int64_t rows : few_if_gpu_sanitizer(ends_if_sanitized<int64_t>({1, 4, 100, 600, 9}), {4, 100})) {
        const std::vector<Stored> stored = store_experts(format, kExperts, kHidden, kInter);
        const std::vector<RawExpert> experts = raw_experts(stored);
        const std::vector<Stored> shared = store_experts(WeightFormat::kBF16, 1, kHidden, kInter);
        const auto run = [&](Ops& ops, bool add) {
          const MoeWeights w{
              .router = packed(ops, make_router(kExperts, kHidden, RouterScore::kSigmoid, 1)),
              .experts = ops.pack_experts(experts),
              .shared = {ops.pack_gate_up(shared[0].raw, shared[1].raw), ops.pack_linear(shared[2].raw)}};
          const Tensor x = activation(ops, rows, kHidden, 6);
          if (!add) return fetch(ops, ops.moe(x, w));
          const Tensor residual = activation(ops, rows, kHidden, 7, DType::kF32);
          const Tensor norm = ops.arena().tensor(ops.wide_dtype(), rows, kHidden);
          ops.moe_norm(residual, x, w, ops.pack_vector(std::vector<float>(kHidden, 1.25f)), 1e-5f, norm);
          Values both = fetch(ops, residual);
          const Values of_norm = fetch(ops, norm);
          both.rows *= 2;
          both.at.insert(both.at.end(), of_norm.at.begin(), of_norm.at.end());
          return both;
        };
        for (const bool add : {false, true}) {
          poison(*backend.ops, 16 << 20);
          ref->begin_step();
          expect_close(run(*backend.ops, add), run(*ref, add),
                       str_cat(backend.name, " moe, format ", static_cast<int>(format), " rows ", rows, " add ", add));
        }
      }
}

// At a layer's end, fused or not: the bits of the sum and its norm do not depend on it.
TEST(Conformance, MoeNormIsTheNormOfTheSum) {
  struct Case {
    int64_t hidden, rows;
    int32_t top_k;
    bool shared;
  };
  constexpr int64_t kExperts = 16, kInter = 64;
  // Rows that fill a GPU's block in part, in turns, or not at all; many rows; more experts than are loaded at once.
  const std::vector<Case> cases = few_if_gpu_sanitizer<Case>({{352, 1, 4, true},
                                                              {2048, 3, 6, true},
                                                              {2304, 2, 8, true},
                                                              {2304, 9, 13, false},
                                                              {7168, 1, 8, true},
                                                              {7168, 33, 8, true},
                                                              {8704, 2, 4, true},
                                                              {352, 700, 4, true},
                                                              {2304, 513, 9, true}},
                                                             {{352, 2, 4, true}, {352, 513, 9, true}});
  for (Backend& backend : backends())
    for (const Case& c : cases) {
      Ops& ops = *backend.ops;
      poison(ops, 16 << 20);
      RouterWeight router = make_router(kExperts, c.hidden, RouterScore::kSigmoid, 1);
      router.top_k = c.top_k;
      const std::vector<Stored> stored = store_experts(WeightFormat::kBF16, kExperts, c.hidden, kInter);
      MoeWeights w{.router = packed(ops, router), .experts = ops.pack_experts(raw_experts(stored)), .shared = {}};
      if (c.shared) {
        const std::vector<Stored> shared = store_experts(WeightFormat::kBF16, 1, c.hidden, kInter);
        w.shared = {ops.pack_gate_up(shared[0].raw, shared[1].raw), ops.pack_linear(shared[2].raw)};
      }
      const VectorWeight norm = ops.pack_vector(std::vector<float>(static_cast<size_t>(c.hidden), 1.25f));
      const Tensor x = activation(ops, c.rows, c.hidden, 6);
      const Tensor one = activation(ops, c.rows, c.hidden, 7, DType::kF32);
      const Tensor two = activation(ops, c.rows, c.hidden, 7, DType::kF32);
      const Tensor one_norm = ops.arena().tensor(ops.wide_dtype(), c.rows, c.hidden);
      const Tensor two_norm = ops.arena().tensor(ops.wide_dtype(), c.rows, c.hidden);
      ops.moe_norm(one, x, w, norm, 1e-5f, one_norm);
      ops.add_norm(two, ops.moe(x, w), norm, 1e-5f, two_norm);
      const std::string what = str_cat(backend.name, " ", c.rows, " rows of ", c.hidden, ", ", c.top_k, " experts");
      EXPECT_EQ(fetch(ops, one).at, fetch(ops, two).at) << what;
      EXPECT_EQ(fetch(ops, one_norm).at, fetch(ops, two_norm).at) << what;
    }
}

}  // namespace
}  // namespace perigee
