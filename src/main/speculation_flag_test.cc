#include "main/speculation_flag.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/temp_folder.h"

namespace perigee {
namespace {

RankConfig read(const std::string& text) {
  RankConfig rank;
  const Status status = read_speculative_config(text, rank);
  EXPECT_TRUE(status.ok()) << status.error().message;
  return rank;
}

TEST(SpeculationFlag, NgramWithItsBounds) {
  EXPECT_EQ(read("").limits.num_drafts, 0);
  const RankConfig plain = read(R"({"method": "ngram", "num_speculative_tokens": 3})");
  EXPECT_EQ(plain.limits.num_drafts, 3);
  EXPECT_EQ(plain.ngram.least, 5);
  EXPECT_EQ(plain.ngram.most, 5);
  const RankConfig bounds = read(
      R"({"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
          "rejection_sample_method": "probabilistic"})");
  EXPECT_EQ(bounds.limits.num_drafts, 7);
  EXPECT_EQ(bounds.ngram.least, 2);
  EXPECT_EQ(bounds.ngram.most, 4);
  EXPECT_EQ(read(R"({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 3})").ngram.least, 3);
  EXPECT_EQ(read(R"({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 9})").ngram.most, 9);
}

TEST(SpeculationFlag, ADraftModelWithTheKeysOfItsRecipes) {
  const RankConfig rank = read(
      R"({"method": "eagle3", "model": "drafts/a", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1,
          "draft_attention_backend": "FLASH_ATTN", "draft_kv_cache_dtype": "bfloat16",
          "rejection_sample_method": "probabilistic", "use_local_argmax_reduction": true})");
  EXPECT_EQ(rank.draft_model, "drafts/a");
  EXPECT_EQ(rank.draft_cache, LatentFormat::kBF16);
  EXPECT_EQ(rank.limits.num_drafts, 3);
}

TEST(SpeculationFlag, ADraftIsDividedAsItsTargetOrWhole) {
  const auto layer_of = [](int ranks) {
    RankConfig rank;
    rank.layout = RankLayout::kTensorParallel;
    rank.size = 4;
    const std::string text =
        R"({"method": "eagle3", "model": "x", "num_speculative_tokens": 1, "draft_tensor_parallel_size": )";
    const Status status = read_speculative_config(text + std::to_string(ranks) + "}", rank);
    return status.ok() ? std::optional(rank.draft_layer) : std::nullopt;
  };
  EXPECT_EQ(layer_of(4), Eagle3::Layer::kDivided);
  EXPECT_EQ(layer_of(1), Eagle3::Layer::kWhole);
  EXPECT_EQ(layer_of(2), std::nullopt);
}

// The rates of a place count rows; a rank asks for those among rows that came so far.
TEST(SpeculationFlag, SyntheticRates) {
  const RankConfig rank = read(
      R"({"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic",
          "synthetic_acceptance_rates": [0.8, 0.4, 0, 0]})");
  EXPECT_EQ(rank.synthetic_rates, (std::vector<float>{0.8f, 0.5f, 0, 0}));
  EXPECT_TRUE(read(R"({"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "block"})")
                  .synthetic_rates.empty());
}

TEST(SpeculationFlag, ErrorsNameTheKey) {
  const auto error = [](const std::string& text, Device device = Device::kCpu) -> std::string {
    RankConfig rank;
    rank.device = device;
    const Status status = read_speculative_config(text, rank);
    if (status.ok()) return "none";
    EXPECT_EQ(status.error().field, "speculative-config");
    EXPECT_EQ(status.error().message.rfind("--speculative-config", 0), 0u) << status.error().message;
    EXPECT_EQ(rank.limits.num_drafts, 0);
    return status.error().message;
  };
  const auto names = [&](const std::string& text, const std::string& part) {
    const std::string message = error(text);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  names("{", "invalid JSON");
  names("[]", "must be a JSON object");
  names("{}", "method is missing");
  names(R"({"method": "medusa", "num_speculative_tokens": 3})", "method must be one of");
  names(R"({"method": "eagle3", "num_speculative_tokens": 3})", "model is missing");
  names(R"({"method": "eagle3", "num_speculative_tokens": 3, "model": "x", "prompt_lookup_min": 2})",
        "prompt_lookup_min");
  names(R"({"method": "eagle3", "num_speculative_tokens": 3, "model": "x", "draft_kv_cache_dtype": "int8"})",
        "draft_kv_cache_dtype must be one of");
  names(R"({"method": "eagle3", "num_speculative_tokens": 3, "model": "x", "draft_tensor_parallel_size": 2})",
        "draft_tensor_parallel_size is 2");
  names(R"({"method": "ngram"})", "num_speculative_tokens is missing");
  names(R"({"method": "ngram", "num_speculative_tokens": 8})", "between 1 and 7");
  names(R"({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "tree"})",
        "rejection_sample_method must be one of");
  for (const char* rates :
       {"", R"(, "synthetic_acceptance_rates": [0.7, 0.5])", R"(, "synthetic_acceptance_rates": [0.5, 0.7, 0.3])",
        R"(, "synthetic_acceptance_rates": [1.1, 0.7, 0.3])", R"(, "synthetic_acceptance_rates": [0.5, "x", 0.3])"})
    names(R"({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic")" +
              std::string(rates) + "}",
          "synthetic_acceptance_rates must be 3 numbers");
  names(R"({"method": "ngram", "num_speculative_tokens": 1, "synthetic_acceptance_rates": [0.5]})",
        "synthetic_acceptance_rates");
  names(R"({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2})",
        "over prompt_lookup_max");
  names(R"({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_maximum": 2})", "prompt_lookup_maximum");
}

TEST(SpeculationFlag, ADraftThatIsNotThereIsToldByTheFlag) {
  const TempFolder folder;
  const std::string file = folder.path() + "/file";
  std::ofstream(file) << "x";
  const auto expect_told = [](const std::string& path, const std::string& what) {
    const Status status = check_draft_folder(path);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().field, "speculative-config");
    for (const std::string& part : {std::string("--speculative-config: \"model\" is ") + path, what})
      EXPECT_NE(status.error().message.find(part), std::string::npos) << status.error().message;
  };
  expect_told(folder.path() + "/none", "does not exist: give the folder");
  expect_told(folder.path(), "without config.json");
  expect_told(file, "which is a file");
  EXPECT_TRUE(check_draft_folder("").ok());
  std::ofstream(folder.path() + "/config.json") << "{}";
  EXPECT_TRUE(check_draft_folder(folder.path()).ok());
}

}  // namespace
}  // namespace perigee
