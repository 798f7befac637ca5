// Goldens: log-probabilities of transformers' implementations (tools/goldens) against ours, weights by formula.
//
// Each tests/golden/NAME/{config.json, expected.json}: every position's 20 most likely tokens. Position 0 is left out:
// a softmax over one key hides most faults of attention.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <iostream>

#include "base/file.h"
#include "base/json.h"
#include "base/soak.h"
#include "model/single_sequence.h"
#include "ops/cuda/cuda_ops.h"

namespace perigee {
namespace {

namespace fs = std::filesystem;

struct Differences {
  double sum = 0, max = 0;
  int64_t count = 0;
  double mean() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

Json read_golden(const std::string& name) {
  const auto text = read_file(PERIGEE_SOURCE_DIR "/tests/golden/" + name + "/expected.json", 64u << 20);
  CHECK(text.ok(), text.error().message);
  auto json = parse_json(*text, {.max_bytes = 64u << 20});
  CHECK(json.ok(), json.error().message);
  return std::move(*json);
}

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(PERIGEE_SOURCE_DIR "/tests/golden"))
    if (fs::exists(entry.path() / "expected.json")) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

double log_sum_exp(const std::vector<float>& x) {
  const double largest = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += std::exp(v - largest);
  return largest + std::log(sum);
}

void compare(const Json& position, const std::vector<float>& logits, Differences& d) {
  const double normalizer = log_sum_exp(logits);
  for (const Json& pair : position.find("top")->as_array()) {
    const double ours = logits[pair.as_array()[0].as_int()] - normalizer;
    const double difference = std::fabs(ours - pair.as_array()[1].as_double());
    d.sum += difference;
    d.max = std::isnan(difference) ? INFINITY : std::max(d.max, difference);
    ++d.count;
  }
}

std::vector<int32_t> token_ids(const Json& list) {
  std::vector<int32_t> out;
  for (const Json& id : list.as_array()) out.push_back(static_cast<int32_t>(id.as_int()));
  return out;
}

// How a prompt is fed: in pieces of `chunk` tokens, as prefill or as decode and verify steps.
struct Feed {
  MlaForm form;
  size_t chunk;
  bool propose = false;
};

void compare_prompt(const Model& model, Ops& ops, DType cache, const Json& prompt, const Feed& feed, Differences& d) {
  const std::vector<int32_t> ids = token_ids(*prompt.find("ids"));
  SingleSequence sequence(model, ops, cache, static_cast<int64_t>(ids.size()));
  const Json::Array& positions = prompt.find("positions")->as_array();
  ASSERT_EQ(positions.size(), ids.size());
  for (size_t at = 0; at < ids.size(); at += feed.chunk) {
    const std::vector<int32_t> piece(ids.begin() + at, ids.begin() + std::min(at + feed.chunk, ids.size()));
    const auto logits = feed.propose ? sequence.propose(piece, feed.form) : sequence.run(piece, feed.form);
    for (size_t i = 0; i < piece.size(); ++i)
      if (at + i > 0) compare(positions[at + i], logits[i], d);
  }
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  // The differences over all prompts, both forms, whole, in pieces and as decode steps.
  Differences run(Ops& ops, DType cache) {
    const Json expected = read_golden(GetParam());
    LoadOptions options;
    options.path = PERIGEE_SOURCE_DIR "/tests/golden/" + GetParam();
    options.format = LoadFormat::kDummy;
    options.latent_norm_eps = expected.find("latent_norm_eps")->as_double();
    const auto model = load_model(options, ops);
    Differences d;
    if (!model.ok()) {
      ADD_FAILURE() << model.error().message;
      return d;
    }
    for (const Json& prompt : expected.find("prompts")->as_array()) {
      compare_prompt(**model, ops, cache, prompt, {MlaForm::kExpanded, 1000}, d);
      compare_prompt(**model, ops, cache, prompt, {MlaForm::kAbsorbed, 7}, d);
      compare_prompt(**model, ops, cache, prompt, {MlaForm::kAbsorbed, 5, true}, d);
      if (gpu_sanitizer()) break;
    }
    std::cout << GetParam() << " on " << ops.name() << ": |d logprob| mean " << d.mean() << " max " << d.max << " over "
              << d.count << std::endl;
    return d;
  }
};

TEST_P(Golden, Ref) {
  const auto ops = make_ref_ops();
  const Differences d = run(*ops, DType::kF32);
  EXPECT_GT(d.count, 0);
  EXPECT_LE(d.max, 1e-4);
}

TEST_P(Golden, Cpu) {
  const CpuOptions paths[] = {{}, {.allow_amx = false}, {.allow_amx = false, .allow_avx512 = false}};
  for (const CpuOptions& path : paths) {
    const auto ops = make_cpu_ops(path);
    if (!ops.ok()) GTEST_SKIP() << ops.error().message;
    const Differences d = run(**ops, DType::kBF16);
    EXPECT_GT(d.count, 0);
    EXPECT_LE(d.mean(), 0.01) << (*ops)->name();
    EXPECT_LE(d.max, 0.08) << (*ops)->name();
  }
}

TEST_P(Golden, Cuda) {
  const auto ops = make_cuda_ops({.separate_arrays = gpu_sanitizer(), .no_library = gpu_sanitizer_of_own_kernels()});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  const Differences d = run(**ops, DType::kBF16);
  const Status device = (*ops)->status();
  ASSERT_TRUE(device.ok()) << device.error().message;
  EXPECT_GT(d.count, 0);
  EXPECT_LE(d.mean(), 0.015);
  EXPECT_LE(d.max, 0.12);
}

// Rounding the cache moves these made-up models far; the definition with such a cache says how far.
TEST_P(Golden, CudaFp8Cache) {
  const auto ops = make_cuda_ops({});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  const Differences d = run(**ops, DType::kF8E4M3), defined = run(*make_ref_ops(), DType::kF8E4M3);
  const Status device = (*ops)->status();
  ASSERT_TRUE(device.ok()) << device.error().message;
  EXPECT_GT(d.count, 0);
  EXPECT_NEAR(d.mean(), defined.mean(), 0.015);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Golden);
INSTANTIATE_TEST_SUITE_P(All, Golden, ::testing::ValuesIn(golden_names()), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace perigee
