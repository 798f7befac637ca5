// What size_model() says of a model is what load_model() then has.
#include <gtest/gtest.h>

#include <filesystem>

#include "base/soak.h"
#include "model/model.h"
#include "ops/cpu/test_isa.h"

namespace perigee {
namespace {

void expect_sizes_are_those_of(const LoadOptions& options, Ops& ops) {
  SCOPED_TRACE(options.path + " on " + ops.name() + ", " + std::to_string(options.ranks.size) + " ranks");
  const auto sized = size_model(options, *ops.sizes());
  const auto loaded = load_model(options, ops);
  ASSERT_TRUE(sized.ok()) << sized.error().message;
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  const ModelInfo &want = (*loaded)->info(), &info = (*sized)->info();
  EXPECT_EQ(info.weight_bytes, want.weight_bytes);
  EXPECT_EQ(info.has_cache_scales, want.has_cache_scales);
  for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF8E4M3}) {
    const CacheLayout a = (*sized)->cache_layout(format), b = (*loaded)->cache_layout(format);
    EXPECT_EQ(a.page_bytes(), b.page_bytes());
    EXPECT_EQ(a.state_pages(), b.state_pages());
  }
}

void expect_sizes_on_every_backend(const LoadOptions& options) {
  expect_sizes_are_those_of(options, *make_ref_ops());
  auto cpu = make_cpu_ops({.num_threads = 1, .isa = isa_under_test()});
  ASSERT_TRUE(cpu.ok()) << cpu.error().message;
  expect_sizes_are_those_of(options, **cpu);
  auto int8 =
      make_cpu_ops({.num_threads = 1, .isa = isa_under_test(), .quantization = OnlineQuantization::kInt8PerChannel});
  ASSERT_TRUE(int8.ok()) << int8.error().message;
  expect_sizes_are_those_of(options, **int8);
}

TEST(SizeModel, OfTheBundledModels) {
  for (const char* folder : {"models/tiny-k2", "models/tiny-kimi-linear"})
    for (const int64_t size : {1, 2})
      expect_sizes_on_every_backend({.path = folder, .ranks = {.rank = size - 1, .size = size}});
}

// Among them FP8, INT4, q_lora or not, KDA.
TEST(SizeModel, OfEveryGoldenFamily) {
  int num_folders = 0;
  for (const auto& entry : std::filesystem::directory_iterator("tests/golden")) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    ++num_folders;
    for (const int64_t size : ends_if_sanitized<int64_t>({1, 5, 2})) {
      const LoadOptions options{.path = entry.path(), .format = LoadFormat::kDummy, .ranks = {0, size}};
      if (check_model_files(options).ok()) expect_sizes_on_every_backend(options);  // else it does not divide
    }
  }
  EXPECT_GE(num_folders, 8);
}

TEST(SizeModel, RefusesWhatLoadingRefuses) {
  const auto ops = make_ref_ops();
  EXPECT_FALSE(size_model({.path = "models/none"}, *ops->sizes()).ok());
  const auto cut = size_model({.path = "models/tiny-k2", .ranks = {.rank = 0, .size = 3}}, *ops->sizes());
  ASSERT_FALSE(cut.ok());
  EXPECT_NE(cut.error().message.find("divide"), std::string::npos) << cut.error().message;
}

}  // namespace
}  // namespace perigee
