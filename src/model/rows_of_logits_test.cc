// The last layer computes what follows its attention for the rows of logits alone, and every bit is as if it did for
// all.
#include <gtest/gtest.h>

#include "model/single_sequence.h"
#include "model/test_weights.h"
#include "ops/ref/ref_ops.h"

namespace perigee {
namespace {

// Remembers the rows of each layer's end.
class CountingOps final : public RefOps {
 public:
  void moe_norm(const Tensor& residual, const Tensor& x, const MoeWeights& w, std::span<const float> weight, float eps,
                const Tensor& out) override {
    rows.push_back(x.rows);
    RefOps::moe_norm(residual, x, w, weight, eps, out);
  }
  std::vector<int64_t> rows;
};

using Rows = std::vector<std::vector<float>>;

void expect_rows(const Json& config) {
  const TempFolder folder;
  folder.write("config.json", dump_json(config));
  CountingOps ops;
  const auto model = load_model({.path = folder.path(), .format = LoadFormat::kDummy}, ops);
  ASSERT_TRUE(model.ok()) << model.error().message;
  std::vector<int32_t> prompt(70);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>((i * i + 7 * i) % 96);
  const auto run = [&](const std::vector<int32_t>& rows, Rows* next) {
    ops.rows.clear();
    SingleSequence sequence(**model, ops, LatentFormat::kF32, 128);
    Rows logits = sequence.run(prompt, MlaForm::kExpanded, rows);
    const std::vector<int64_t> counted = ops.rows;
    *next = sequence.propose({17}, MlaForm::kAbsorbed);
    ops.rows = counted;
    return logits;
  };
  std::vector<int32_t> all(prompt.size());
  std::iota(all.begin(), all.end(), 0);
  Rows next, next_of_few;
  const Rows whole = run(all, &next);
  ASSERT_EQ(whole.size(), prompt.size());
  std::vector<int64_t> rows = ops.rows;
  EXPECT_EQ(rows.back(), 70);

  const Rows few = run({3, 41, 69}, &next_of_few);
  EXPECT_EQ(few, (Rows{whole[3], whole[41], whole[69]}));
  EXPECT_EQ(next_of_few, next);
  rows.back() = 3;
  EXPECT_EQ(ops.rows, rows);

  EXPECT_TRUE(run({}, &next_of_few).empty());
  EXPECT_EQ(next_of_few, next);
  rows.pop_back();
  EXPECT_EQ(ops.rows, rows);
}

TEST(RowsOfLogits, EndTheLastLayerOfLatentAttention) {
  expect_rows(tiny_config());
}

TEST(RowsOfLogits, EndTheLastLayerOfKimiLinear) {
  expect_rows(tiny_hybrid_config());
}

}  // namespace
}  // namespace perigee
