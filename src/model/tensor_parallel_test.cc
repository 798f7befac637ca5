// Ranks that each hold their shards compute the whole model: sums at the reduce points and at the embedding, and logits
// side by side, are all that they exchange.
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <thread>

#include "model/single_sequence.h"
#include "model/test_weights.h"
#include "ops/ref/ref_ops.h"

namespace perigee {
namespace {

// What the ranks of a group show each other.
struct Exchange {
  explicit Exchange(int64_t size) : tensors(static_cast<size_t>(size)), met(size) {}
  std::vector<Tensor> tensors;  // of each rank
  std::barrier<> met;
};

// One rank of a group of threads.
class RankOps final : public RefOps {
 public:
  RankOps(Exchange& exchange, int64_t rank) : exchange_(exchange), rank_(rank) {}
  int64_t num_sums() const { return num_sums_; }

  Tensor embed(const EmbedWeight& table, std::span<const int32_t> tokens) override {
    std::vector<int32_t> local(tokens.begin(), tokens.end());
    for (int32_t& token : local) token -= static_cast<int32_t>(rank_ * table.vocab);
    const Tensor x = arena_.tensor(DType::kF32, std::ssize(tokens), table.dim);
    for (int64_t i = 0; i < x.rows; ++i) {
      const int32_t token = local[static_cast<size_t>(i)];
      const bool here = token >= 0 && token < table.vocab;
      for (int64_t c = 0; c < x.cols; ++c)
        x.row<float>(i)[c] = here ? ref_values(table.packed)[token * table.dim + c] : 0.0f;
    }
    return sum(x);
  }
  using RefOps::add_norm;
  void add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps,
                const Tensor& out) override {
    RefOps::add_norm(residual, sum(y), weight, eps, out);
  }
  Tensor logits(const Tensor& x, const LinearWeight& head) override {
    const Tensor mine = RefOps::logits(x, head);
    const Tensor all = arena_.tensor(DType::kF32, mine.rows, mine.cols * std::ssize(exchange_.tensors));
    meet(mine, [&] {
      for (int64_t r = 0; r < all.rows; ++r)
        for (int64_t c = 0; c < all.cols; ++c)
          all.row<float>(r)[c] = exchange_.tensors[static_cast<size_t>(c / mine.cols)].row<float>(r)[c % mine.cols];
    });
    return all;
  }

 private:
  Tensor sum(const Tensor& mine) {
    ++num_sums_;
    const Tensor total = arena_.tensor(DType::kF32, mine.rows, mine.cols);
    meet(mine, [&] {
      for (int64_t r = 0; r < mine.rows; ++r)
        for (int64_t c = 0; c < mine.cols; ++c) {
          float value = 0;
          for (const Tensor& part : exchange_.tensors) value += part.row<float>(r)[c];
          total.row<float>(r)[c] = value;
        }
    });
    return total;
  }
  template <typename Read>
  void meet(const Tensor& mine, const Read& read) {
    exchange_.tensors[static_cast<size_t>(rank_)] = mine;
    exchange_.met.arrive_and_wait();
    read();
    exchange_.met.arrive_and_wait();
  }

  Exchange& exchange_;
  const int64_t rank_;
  int64_t num_sums_ = 0;
};

using Rows = std::vector<std::vector<float>>;

// Logits of a prompt and of single tokens after it, as rank `rank` of the group has them.
Rows run_rank(const std::string& folder, LoadFormat format, Exchange& exchange, const TensorParallel& ranks) {
  RankOps ops(exchange, ranks.rank);
  const auto model = load_model({.path = folder, .format = format, .ranks = ranks}, ops);
  CHECK(model.ok(), model.error().message);
  SingleSequence sequence(**model, ops, DType::kF32, 128);
  std::vector<int32_t> prompt(70);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>((i * i + 7 * i) % 96);
  Rows out = sequence.run(prompt, MlaForm::kExpanded);
  for (const int32_t token : {5, 90, 41})
    for (std::vector<float>& row : sequence.propose({token}, MlaForm::kAbsorbed)) out.push_back(std::move(row));
  EXPECT_EQ(ops.num_sums(), 4 * (1 + 2 * (*model)->info().num_layers));  // of four steps
  return out;
}

Rows run_group(const std::string& folder, LoadFormat format, int64_t size) {
  Exchange exchange(size);
  std::vector<Rows> rows(static_cast<size_t>(size));
  std::vector<std::jthread> threads;
  for (int64_t rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      rows[static_cast<size_t>(rank)] = run_rank(folder, format, exchange, {.rank = rank, .size = size});
    });
  threads.clear();
  for (const Rows& other : rows) EXPECT_EQ(other, rows[0]);
  return rows[0];
}

void expect_group_is_one(const Json& config, std::initializer_list<int64_t> sizes) {
  const TempFolder folder;
  folder.write("config.json", dump_json(config));
  const Rows one = run_group(folder.path(), LoadFormat::kDummy, 1);
  for (const int64_t size : sizes) {
    const Rows group = run_group(folder.path(), LoadFormat::kDummy, size);
    ASSERT_EQ(group.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i)
      for (size_t t = 0; t < 96; ++t) ASSERT_NEAR(group[i][t], one[i][t], 1e-4) << size << " ranks, row " << i;
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
  expect_group_is_one(four_heads, {2, 4});
  expect_group_is_one(with(four_heads, "q_lora_rank", Json()), {2});
  expect_group_is_one(with(four_heads, "n_shared_experts", Json(0)), {2});
  // Quantised: halves and quarters of 160 and of 32 columns cut blocks of 128 and groups of 32.
  expect_group_is_one(with(four_heads, "quantization_config", fp8_quantization()), {2, 4});
  expect_group_is_one(with(four_heads, "quantization_config", int4_quantization()), {2, 4});
}

TEST(TensorParallelModel, KimiDeltaAttention) {
  Json config = with_heads(tiny_hybrid_config(), 4);
  config.find("linear_attn_config")->set("num_heads", Json(4));
  expect_group_is_one(config, {2, 4});
}

}  // namespace
}  // namespace perigee
