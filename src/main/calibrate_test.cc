#include "main/calibrate.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "model/dummy.h"
#include "model/registry.h"
#include "model/single_sequence.h"
#include "model/test_weights.h"

namespace perigee {
namespace {

Result<TokenPrompts> prompts_of(const std::string& text, int64_t max_tokens = 100) {
  const TempFolder folder;
  folder.write("prompts.jsonl", text);
  return read_prompts(folder.path() + "/prompts.jsonl", nullptr, 96, max_tokens);
}

TEST(Calibrate, ReadsPromptsLineByLine) {
  const auto prompts =
      prompts_of("{\"prompt\": [1, 2, 3]}\n\n  \r\n{\"id\": 7, \"prompt\": [95]}\n{\"prompt\": []}", 2);
  ASSERT_TRUE(prompts.ok()) << prompts.error().message;
  EXPECT_EQ(*prompts, (TokenPrompts{{1, 2}, {95}}));
  const auto tokenizer = Tokenizer::load("models/tiny-k2");
  ASSERT_TRUE(tokenizer.ok());
  const TempFolder folder;
  folder.write("prompts.jsonl", R"({"prompt": "two and two"})");
  const auto text = read_prompts(folder.path() + "/prompts.jsonl", tokenizer->get(), 2304, 100);
  ASSERT_TRUE(text.ok()) << text.error().message;
  EXPECT_EQ((*text)[0], (*tokenizer)->encode("two and two", SpecialsIn::kRecognised));
}

TEST(Calibrate, RefusesPromptsByLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "no prompt in it"},
      {"{\"prompt\": [1]}\n{\"prompt\": [96]}", "line 2: prompt: expected token ids from 0 to 95"},
      {"{\"prompt\": [-1]}", "line 1: prompt: expected token ids"},
      {"{\"prompt\": [1.5]}", "line 1: prompt: expected token ids"},
      {"{\"prompt\": \"text\"}", "line 1: prompt: the model folder has no tokenizer"},
      {"{\"prompt\": 3}", "line 1: prompt: expected text or a list"},
      {"[1, 2]", "line 1: prompt: expected text or a list"},
      {"{\"prompt\": [1]}\n{\"prompt\"", "line 2: "}};
  for (const auto& [text, message] : cases) {
    const auto prompts = prompts_of(text);
    ASSERT_FALSE(prompts.ok()) << text;
    EXPECT_EQ(prompts.error().field, "prompts");
    EXPECT_NE(prompts.error().message.find(message), std::string::npos) << prompts.error().message;
  }
}

// A folder with weights whose latents are `factor` times as large, and whose up-projections make up for it: with an
// exact cache the same network. `factor` is a power of two.
void write_model(const TempFolder& folder, float factor) {
  const auto config = parse_config(tiny_config(), Json());
  CHECK(config.ok(), config.error().message);
  const auto source = make_dummy_source(1);
  const std::vector<TensorSpec> specs = find_family(config->architecture)->tensors(*config);
  CHECK(source->verify(specs, *config).ok());
  std::vector<StoredTensor> tensors = stored_tensors(*source, specs);
  for (StoredTensor& tensor : tensors) {
    const auto scale_all = [&](auto bits, auto&& scaled) {
      for (size_t at = 0; at < tensor.bytes.size(); at += sizeof(bits)) {
        std::memcpy(&bits, tensor.bytes.data() + at, sizeof(bits));
        bits = scaled(bits);
        std::memcpy(tensor.bytes.data() + at, &bits, sizeof(bits));
      }
    };
    if (tensor.name.ends_with("kv_a_layernorm.weight")) scale_all(0.0f, [&](float x) { return x * factor; });
    if (tensor.name.ends_with("kv_b_proj.weight"))
      scale_all(uint16_t{0}, [&](uint16_t x) { return f32_to_bf16(bf16_to_f32(x) / factor); });
  }
  folder.write("config.json", dump_json(tiny_config()));
  folder.write("model.safetensors", safetensors_bytes(tensors));
}

std::unique_ptr<Model> load(const std::string& folder, Ops& ops, const std::string& scales = "") {
  LoadOptions options{.path = folder, .cache = LatentFormat::kF8E4M3, .kv_scale_file = scales};
  auto model = load_model(options, ops);
  CHECK(model.ok(), model.error().message);
  return std::move(*model);
}

std::vector<int32_t> tokens(int32_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) out[static_cast<size_t>(i)] = (i * i + 7 * i) % 96;
  return out;
}

TEST(Calibrate, FindsTheLargestLatentOfEachLayer) {
  const TempFolder plain, large;
  write_model(plain, 1);
  write_model(large, 1024);
  const auto ops = make_ref_ops();
  const auto model = load(plain.path(), *ops);
  int64_t reported = 0;
  const auto of_both = largest_latents(*model, *ops, {tokens(70), {5}}, [&](int64_t done, int64_t total) {
    EXPECT_LE(done, total);
    EXPECT_EQ(total, 71);
    reported = done;
  });
  ASSERT_TRUE(of_both.ok()) << of_both.error().message;
  EXPECT_EQ(reported, 71);
  ASSERT_EQ(of_both->size(), 3u);
  const auto of_one = largest_latents(*model, *ops, {tokens(70)}), of_other = largest_latents(*model, *ops, {{5}});
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ((*of_both)[i], std::max((*of_one)[i], (*of_other)[i])) << i;
  const auto of_large = largest_latents(*load(large.path(), *ops), *ops, {tokens(70)});
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_GT((*of_large)[i], 1024) << i;
    EXPECT_LT((*of_large)[i], 1024 * 8) << i;
  }
  const CacheScales scales = scales_for({"a", "b", "c"}, {44.8f, 0, 448}, 2);
  EXPECT_EQ(scales, (CacheScales{{"a", 0.2f}, {"b", 1}, {"c", 2}}));
}

double distance(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < a[i].size(); ++j) sum += std::fabs(static_cast<double>(a[i][j]) - b[i][j]);
  return sum / static_cast<double>(a.size() * a[0].size());
}

// Latents that a scale of 1 clamps, and others that it rounds to few numbers.
TEST(Calibrate, CalibratedScalesComeCloserWhereMagnitudesAskForIt) {
  for (const float factor : {1024.0f, 1.0f / 1024}) {
    SCOPED_TRACE(factor);
    const TempFolder folder;
    write_model(folder, factor);
    const auto ops = make_ref_ops();
    const auto model = load(folder.path(), *ops);
    const auto largest = largest_latents(*model, *ops, {tokens(100)});
    ASSERT_TRUE(largest.ok());
    const std::vector<std::string> names = latent_attentions(*read_config(folder.path()));
    folder.write("scales.json", dump_json(cache_scales_json(scales_for(names, *largest, 1.5), Json())));
    const auto logits = [&](const Model& of, LatentFormat cache) {
      return SingleSequence(of, *ops, cache, 100).run(tokens(100), MlaForm::kExpanded);
    };
    const auto exact = logits(*model, LatentFormat::kF32);
    const double uncalibrated = distance(logits(*model, LatentFormat::kF8E4M3), exact);
    const double calibrated =
        distance(logits(*load(folder.path(), *ops, folder.path() + "/scales.json"), LatentFormat::kF8E4M3), exact);
    std::printf("latents times %g: %.3g from the exact logits with a scale of 1, %.3g calibrated\n",
                static_cast<double>(factor), uncalibrated, calibrated);
    EXPECT_LT(calibrated, uncalibrated / 2);
  }
}

}  // namespace
}  // namespace perigee
