// The logits of a trained draft against an independent forward pass, that of its training (tools/train_tiny/draft.py
// --golden): of made-up hidden states and tokens, the first pass and two that follow it.
#include <gtest/gtest.h>

#include <cmath>

#include "base/file.h"
#include "base/json.h"
#include "model/eagle3.h"
#include "ops/cpu/test_isa.h"

namespace perigee {
namespace {

constexpr int32_t kRows = 70;

class Drafted {
 public:
  Drafted(std::unique_ptr<Ops> ops, LatentFormat cache) : ops_(std::move(ops)) {
    auto target = load_model({.path = "models/tiny-k2"}, *ops_);
    CHECK(target.ok(), target.error().message);
    target_ = std::move(*target);
    auto draft = Eagle3::load({.path = "models/tiny-k2-eagle3"}, *target_, *ops_);
    CHECK(draft.ok(), draft.error().message);
    draft_ = std::move(*draft);
    pool_.layout = draft_->cache_layout(target_->cache_layout(latent_format(ops_->activation_dtype())), cache, 1);
    memory_ = Buffer(static_cast<size_t>(2 * pool_.layout.bytes_per_page()));
    pool_.base = memory_.data();
    pool_.draft_base = memory_.data() + 2 * pool_.layout.page_bytes();
    for (int32_t i = 0; i < kRows; ++i) tokens_.push_back((7 * i * i + 3) % 2000);
  }

  // All rows of the first pass but two, then one of each pass after it.
  std::vector<std::vector<float>> rows() {
    std::vector<std::vector<float>> out;
    ops_->begin_step();
    const int64_t width = std::ssize(draft_->config().taps) * target_->info().hidden;
    const Tensor taps = ops_->arena().tensor(ops_->wide_dtype(), kRows - 2, width);
    for (int64_t r = 0; r < taps.rows; ++r)
      for (int64_t c = 0; c < width; ++c)
        taps.row<float>(r)[c] = static_cast<float>((r * 7919 + c * 10477) % 511 - 255) / 128;
    Tensor hidden = run(0, kRows - 2, draft_->fuse(taps, *ops_), out);
    for (int32_t position = kRows - 2; position < kRows; ++position)
      hidden =
          run(position, 1, ops_->gather_rows(hidden, std::vector<int32_t>{static_cast<int32_t>(hidden.rows) - 1}), out);
    return out;
  }

 private:
  Tensor run(int32_t position, int32_t count, const Tensor& hidden, std::vector<std::vector<float>>& out) {
    static constexpr int32_t kPages[] = {1, 0};
    std::vector<int32_t> positions, rows;
    for (int32_t i = 0; i < count; ++i) {
      positions.push_back(position + i);
      rows.push_back(i);
    }
    const SequenceRows sequence = {.num_tokens = count, .position = position, .pages = kPages};
    const Batch batch{.tokens = std::span(tokens_).subspan(static_cast<size_t>(position), static_cast<size_t>(count)),
                      .positions = positions,
                      .sequences = std::span(&sequence, 1),
                      .logit_rows = rows};
    const Eagle3::Output output = draft_->forward(batch, hidden, *ops_, pool_);
    for (int64_t r = 0; r < count; ++r)
      out.emplace_back(output.logits.row<const float>(r), output.logits.row<const float>(r) + output.logits.cols);
    return output.hidden;
  }

  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Model> target_;
  std::unique_ptr<Eagle3> draft_;
  Buffer memory_;
  PagePool pool_;
  std::vector<int32_t> tokens_;
};

void expect_golden(Drafted drafted, double bound) {
  const auto text = read_file("tests/golden/draft_llama.json", 16 << 20);
  ASSERT_TRUE(text.ok()) << text.error().message;
  const auto golden = parse_json(*text);
  ASSERT_TRUE(golden.ok()) << golden.error().message;
  const Json::Array& ids = golden->find("ids")->as_array();
  const std::vector<std::vector<float>> rows = drafted.rows();
  ASSERT_EQ(rows.size(), golden->find("logits")->as_array().size());
  double error = 0, norm = 0;
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t i = 0; i < ids.size(); ++i) {
      const double wanted = golden->find("logits")->as_array()[r].as_array()[i].as_double();
      const double off = static_cast<double>(rows[r][static_cast<size_t>(ids[i].as_int())]) - wanted;
      error += off * off;
      norm += wanted * wanted;
    }
  EXPECT_LE(std::sqrt(error / norm), bound);
}

TEST(GoldenDraft, Ref) {
  expect_golden(Drafted(make_ref_ops(), LatentFormat::kF32), 1e-5);
}

TEST(GoldenDraft, Cpu) {
  const auto drafted = [](LatentFormat cache) {
    auto ops = make_cpu_ops({.num_threads = 2, .isa = isa_under_test()});
    CHECK(ops.ok(), ops.error().message);
    return Drafted(std::move(*ops), cache);
  };
  expect_golden(drafted(LatentFormat::kBF16), 1e-2);
  expect_golden(drafted(LatentFormat::kF8E4M3), 5e-2);
}

}  // namespace
}  // namespace perigee
