// Ranks that each hold their shards compute the whole model: sums at the reduce points and at the embedding, and logits
// side by side, are all that they exchange.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "comm/thread_comms.h"
#include "model/single_sequence.h"
#include "model/test_weights.h"
#include "ops/cpu/test_isa.h"

namespace perigee {
namespace {

using Rows = std::vector<std::vector<float>>;

enum class Backend { kRef, kCpu };

struct Case {
  std::string folder;
  LoadFormat format = LoadFormat::kDummy;
  Backend backend = Backend::kRef;
  bool whole_experts = false;
};

std::unique_ptr<Ops> make_ops(Backend backend, Comm& comm, Comm& dcp) {
  if (backend == Backend::kRef) return make_ref_ops(comm, dcp);
  auto ops = make_cpu_ops({.num_threads = 1, .isa = isa_under_test(), .comm = comm, .dcp = dcp});
  CHECK(ops.ok(), ops.error().message);
  return std::move(*ops);
}

// Logits of a prompt, of single tokens and of several proposed ones after it, as one rank of the group has them.
Rows run_rank(const Case& c, ShardComms& comms, int32_t rank) {
  Comm& comm = comms.of(rank);
  const std::unique_ptr<Ops> ops = make_ops(c.backend, comm, comms.dcp_of(rank));
  const TensorParallel ranks{.rank = comm.rank(), .size = comm.size(), .whole_experts = c.whole_experts};
  const auto model = load_model({.path = c.folder, .format = c.format, .ranks = ranks}, *ops);
  CHECK(model.ok(), model.error().message);
  SingleSequence sequence(**model, *ops, latent_format(ops->activation_dtype()), 256);
  int32_t next = 0;
  const auto tokens = [&next](int32_t count) {
    std::vector<int32_t> out(static_cast<size_t>(count));
    for (int32_t& token : out) token = (next * next + 7 * next) % 96, ++next;
    return out;
  };
  Rows out;
  const auto keep = [&out](Rows rows) {
    for (std::vector<float>& row : rows) out.push_back(std::move(row));
  };
  keep(sequence.run(tokens(70), MlaForm::kExpanded));
  keep(sequence.run(tokens(60), MlaForm::kExpanded));
  keep(sequence.run(tokens(9), MlaForm::kAbsorbed));
  keep(sequence.propose(tokens(5), MlaForm::kAbsorbed));
  for (int i = 0; i < 3; ++i) keep(sequence.propose(tokens(1), MlaForm::kAbsorbed));
  // The sums of seven steps, and the rows of logits that are gathered.
  if (ops->dcp().size() == 1) {
    EXPECT_EQ(comms.num_meetings(rank), 7 * (1 + 2 * (*model)->info().num_layers) + std::ssize(out));
  }
  return out;
}

struct GroupSize {
  int32_t tp = 1, dcp = 1;
  bool whole_experts = false;
};

Rows run_group(Case c, GroupSize size) {
  c.whole_experts = size.whole_experts;
  const std::atomic<bool> abort{false};
  ShardComms comms(size.tp, size.dcp, abort);
  std::vector<Rows> rows(static_cast<size_t>(size.tp));
  std::vector<std::jthread> threads;
  for (int32_t rank = 0; rank < size.tp; ++rank)
    threads.emplace_back([&, rank] { rows[static_cast<size_t>(rank)] = run_rank(c, comms, rank); });
  threads.clear();
  for (int32_t rank = 0; rank < size.tp; ++rank) {
    EXPECT_EQ(rows[static_cast<size_t>(rank)], rows[0]);
    EXPECT_EQ(comms.num_meetings(rank), comms.num_meetings(0));
  }
  return rows[0];
}

// Largest difference of two log-probabilities of a row.
float most_apart(const std::vector<float>& a, const std::vector<float>& b) {
  const auto log_sum = [](const std::vector<float>& row) {
    double sum = 0;
    for (const float x : row) sum += std::exp(static_cast<double>(x));
    return std::log(sum);
  };
  double most = 0;
  const double apart = log_sum(a) - log_sum(b);
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(static_cast<double>(a[i]) - b[i] - apart));
  return static_cast<float>(most);
}

void expect_group_is_one(const Json& config, std::initializer_list<GroupSize> sizes, Backend backend = Backend::kRef) {
  const TempFolder folder;
  folder.write("config.json", dump_json(config));
  const Case c{.folder = folder.path(), .backend = backend};
  const Rows one = run_group(c, {});
  for (const GroupSize size : sizes) {
    const Rows group = run_group(c, size);
    ASSERT_EQ(group.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      ASSERT_EQ(group[i].size(), one[i].size());
      ASSERT_LE(most_apart(group[i], one[i]), backend == Backend::kRef ? 1e-4f : 0.05f)
          << "tp " << size.tp << " dcp " << size.dcp << (size.whole_experts ? ", whole experts" : "") << ", row " << i;
    }
  }
}

Json with(Json config, const char* key, Json value) {
  config.set(key, std::move(value));
  return config;
}

Json with_heads(Json config, int64_t heads) {
  return with(with(std::move(config), "num_attention_heads", Json(heads)), "num_key_value_heads", Json(heads));
}

TEST(TensorParallelModel, LatentAttentionAndExperts) {
  const Json four_heads = with_heads(tiny_config(), 4);
  expect_group_is_one(four_heads, {{2}, {4}, {2, 2}, {4, 2}, {4, 4}});
  expect_group_is_one(with_heads(tiny_config(), 8), {{8, 2}, {8, 4}, {8, 8}});
  expect_group_is_one(with(four_heads, "q_lora_rank", Json()), {{2}});
  expect_group_is_one(with(four_heads, "n_shared_experts", Json(0)), {{2}});
  // Quantised: halves and quarters of 160 and of 32 columns cut blocks of 128 and groups of 32.
  expect_group_is_one(with(four_heads, "quantization_config", fp8_quantization()), {{2}, {4}});
  expect_group_is_one(with(four_heads, "quantization_config", int4_quantization()), {{2}, {4}});
}

TEST(TensorParallelModel, KimiDeltaAttention) {
  Json config = with_heads(tiny_hybrid_config(), 4);
  config.find("linear_attn_config")->set("num_heads", Json(4));
  expect_group_is_one(config, {{2}, {4}, {2, 2}, {4, 2}});
}

// In each storage format, and where three ranks have three, three and two experts.
TEST(TensorParallelModel, WholeExperts) {
  const Json four_heads = with_heads(tiny_config(), 4);
  constexpr GroupSize kTwo{.tp = 2, .whole_experts = true}, kFour{.tp = 4, .dcp = 2, .whole_experts = true};
  for (const Json& quantization : {Json(), fp8_quantization(), int4_quantization()})
    expect_group_is_one(with(four_heads, "quantization_config", quantization), {kTwo, kFour});
  const Json uneven =
      with(with(with_heads(tiny_config(), 6), "intermediate_size", Json(96)), "n_shared_experts", Json(3));
  expect_group_is_one(uneven, {{.tp = 3, .whole_experts = true}});
  Json hybrid = with_heads(tiny_hybrid_config(), 4);
  hybrid.find("linear_attn_config")->set("num_heads", Json(4));
  expect_group_is_one(hybrid, {kTwo});
}

// Every expert is chosen: where the router has a choice, roundings decide it, as weights are random.
TEST(TensorParallelModel, OnTheCpuBackend) {
  Json k2 = with(with(with_heads(tiny_config(), 4), "num_experts_per_tok", Json(8)), "topk_group", Json(4));
  expect_group_is_one(k2, {{2}, {4}, {2, 2}, {4, 2}, {4, 4}, {2, 1, true}, {4, 2, true}}, Backend::kCpu);
  Json hybrid = with(with_heads(tiny_hybrid_config(), 4), "num_experts_per_token", Json(8));
  hybrid.find("linear_attn_config")->set("num_heads", Json(4));
  expect_group_is_one(hybrid, {{2}, {4}, {2, 2}, {4, 4}, {2, 1, true}}, Backend::kCpu);
}

}  // namespace
}  // namespace perigee
