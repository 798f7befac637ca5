// Goldens: log-probabilities of transformers' implementations (tools/goldens) against ours, weights by formula.
//
// Each tests/golden/NAME/{config.json, expected.json}: every position's 20 most likely tokens. Position 0 is left out:
// a softmax over one key hides most faults of attention.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iostream>
#include <span>
#include <thread>

#include "base/file.h"
#include "base/json.h"
#include "base/soak.h"
#include "comm/thread_comms.h"
#include "model/single_sequence.h"
#include "ops/cpu/test_isa.h"
#include "ops/cuda/cuda_ops.h"

namespace perigee {
namespace {

namespace fs = std::filesystem;

struct Differences {
  double sum = 0, max = 0;
  size_t count = 0;
  double mean() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

// Log-probabilities of the tokens that a golden lists, of all its prompts, once for each way of feeding them.
using Logprobs = std::vector<double>;

Differences differences(const Logprobs& a, const Logprobs& b) {
  CHECK(a.size() == b.size(), a.size(), " and ", b.size());
  Differences d{.count = a.size()};
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(a[i] - b[i]);
    d.sum += difference;
    d.max = std::isnan(difference) ? INFINITY : std::max(d.max, difference);
  }
  return d;
}

Json read_golden(const std::string& name) {
  const auto text = read_file("tests/golden/" + name + "/expected.json", 64u << 20);
  CHECK(text.ok(), text.error().message);
  auto json = parse_json(*text, {.max_bytes = 64u << 20});
  CHECK(json.ok(), json.error().message);
  return std::move(*json);
}

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("tests/golden"))
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

constexpr Feed kFeeds[] = {{MlaForm::kExpanded, 1000}, {MlaForm::kAbsorbed, 7}, {MlaForm::kAbsorbed, 5, true}};

void append_ours(const Json& position, const std::vector<float>& logits, Logprobs& out) {
  const double normalizer = log_sum_exp(logits);
  for (const Json& pair : position.find("top")->as_array())
    out.push_back(logits[static_cast<size_t>(pair.as_array()[0].as_int())] - normalizer);
}

void append_prompt(const Model& model, Ops& ops, LatentFormat cache, const Json& prompt, const Feed& feed,
                   Logprobs& out) {
  const std::vector<int32_t> ids = token_ids(*prompt.find("ids"));
  SingleSequence sequence(model, ops, cache, static_cast<int64_t>(ids.size()));
  const Json::Array& positions = prompt.find("positions")->as_array();
  ASSERT_EQ(positions.size(), ids.size());
  for (size_t at = 0; at < ids.size(); at += feed.chunk) {
    const std::vector<int32_t> piece(ids.begin() + at, ids.begin() + std::min(at + feed.chunk, ids.size()));
    const auto logits = feed.propose ? sequence.propose(piece, feed.form) : sequence.run(piece, feed.form);
    for (size_t i = 0; i < piece.size(); ++i)
      if (at + i > 0) append_ours(positions[at + i], logits[i], out);
  }
}

class GoldenModel {
 public:
  explicit GoldenModel(std::string name) : name_(std::move(name)), golden_(read_golden(name_)) {}

  Logprobs expected() const {
    Logprobs out;
    for (const Json& prompt : prompts_)
      for (size_t feed = 0; feed < std::size(kFeeds); ++feed)
        for (size_t i = 1; i < prompt.find("positions")->as_array().size(); ++i)
          for (const Json& pair : prompt.find("positions")->as_array()[i].find("top")->as_array())
            out.push_back(pair.as_array()[1].as_double());
    return out;
  }

  Logprobs ours(Ops& ops, LatentFormat cache) const {
    LoadOptions options;
    options.path = "tests/golden/" + name_;
    options.format = LoadFormat::kDummy;
    options.latent_norm_eps = golden_.find("latent_norm_eps")->as_double();
    options.ranks = {.rank = ops.comm().rank(), .size = ops.comm().size()};
    const auto model = load_model(options, ops);
    CHECK(model.ok(), model.error().message);
    Logprobs out;
    for (const Json& prompt : prompts_)
      for (const Feed& feed : kFeeds) append_prompt(**model, ops, cache, prompt, feed, out);
    const Status device = ops.status();
    CHECK(device.ok(), device.error().message);
    return out;
  }

  Differences from_golden(Ops& ops, LatentFormat cache) const { return compare(ops.name(), ours(ops, cache)); }

  // Of CPU ranks that each hold a share of the model.
  Differences from_golden(int32_t num_ranks, const std::function<std::unique_ptr<Ops>(Comm&)>& make_ops) const {
    const std::atomic<bool> abort{false};
    ThreadComms comms(num_ranks, abort);
    std::vector<Logprobs> all(static_cast<size_t>(num_ranks));
    std::string name;
    std::vector<std::jthread> ranks;
    for (int32_t rank = 0; rank < num_ranks; ++rank)
      ranks.emplace_back([&, rank] {
        const std::unique_ptr<Ops> ops = make_ops(comms.of(rank));
        all[static_cast<size_t>(rank)] = ours(*ops, latent_format(ops->activation_dtype()));
        if (rank == 0) name = fmt::format("{} ranks of {}", num_ranks, ops->name());
      });
    ranks.clear();
    for (const Logprobs& other : all) EXPECT_TRUE(other == all[0]);
    return compare(name, all[0]);
  }

  // Of 2, 4, 8 and 16 ranks those among which the model divides.
  std::vector<int32_t> numbers_of_ranks() const {
    std::vector<int32_t> numbers;
    for (const int32_t size : {2, 4, 8, 16})
      if (check_model_files({.path = "tests/golden/" + name_, .format = LoadFormat::kDummy, .ranks = {.size = size}})
              .ok())
        numbers.push_back(size);
    return numbers;
  }

  // With an e4m3 cache against the definition with one, as shares of how far the cache's own rounding takes these
  // made-up models. Both round the same latents, but roundings of 2^-9 upstream carry about every twentieth element
  // over the edge between two e4m3 numbers, 9 % apart: 0.5 to 0.7 where every operand is bf16, 0.1 to 0.45 with the f32
  // around attention that the CPU has. Bugs that were tried: a cache read with a scale off by a sixteenth 1.8 to 2.9,
  // one rounded towards zero 1.9 to 2.4, latents rounded to bf16 on their way to e4m3 0.7 to 0.8 on the CPU.
  void expect_near_defined(LatentFormat cache, Ops& ops, double share, double mean_bound) const {
    const Logprobs defined = ours(*make_ref_ops(), cache);
    const double rounding = differences(defined, expected()).mean();
    const Differences d = differences(ours(ops, cache), defined);
    std::cout << name_ << " on " << ops.name() << ", " << latent_format_name(cache) << " cache: |d logprob| mean "
              << d.mean() << " max " << d.max << " to the definition, whose distance to f32 is " << rounding
              << std::endl;
    EXPECT_LE(d.mean(), std::max(mean_bound, share * rounding));
  }

 private:
  Differences compare(const std::string& where, const Logprobs& ours) const {
    const Differences d = differences(ours, expected());
    std::cout << name_ << " on " << where << ": |d logprob| mean " << d.mean() << " max " << d.max << " over "
              << d.count << std::endl;
    EXPECT_GT(d.count, 0u);
    return d;
  }

  static std::span<const Json> some(std::span<const Json> prompts) {
    return gpu_sanitizer() ? prompts.first(1) : prompts;
  }

  const std::string name_;
  const Json golden_;
  const std::span<const Json> prompts_ = some(golden_.find("prompts")->as_array());
};

class Golden : public testing::TestWithParam<std::string> {
 protected:
  const GoldenModel model_{GetParam()};
};

class GoldenCpu : public testing::TestWithParam<std::tuple<std::string, Isa>> {
 protected:
  void SetUp() override {
    const Isa isa = std::get<Isa>(GetParam());
    if (const std::string why = why_not_on(isa); !why.empty()) GTEST_SKIP() << why;
    auto ops = make_cpu_ops({.num_threads = 1, .isa = isa});
    ASSERT_TRUE(ops.ok()) << ops.error().message;
    ops_ = std::move(*ops);
  }
  const GoldenModel model_{std::get<std::string>(GetParam())};
  std::unique_ptr<Ops> ops_;
};

TEST_P(Golden, Ref) {
  EXPECT_LE(model_.from_golden(*make_ref_ops(), LatentFormat::kF32).max, 1e-4);
}

constexpr double kCpuMean = 0.01, kCudaMean = 0.015;

// In a soak on any number of ranks, else on the most.
TEST_P(Golden, Ranks) {
  std::vector<int32_t> numbers = model_.numbers_of_ranks();
  if (!soak_requested() && !numbers.empty()) numbers = {numbers.back()};
  for (const int32_t size : numbers) {
    EXPECT_LE(model_.from_golden(size, [](Comm& comm) { return make_ref_ops(comm); }).max, 1e-4);
    const Differences d = model_.from_golden(size, [](Comm& comm) {
      return std::move(*make_cpu_ops({.num_threads = 1, .isa = isa_under_test(), .comm = comm}));
    });
    EXPECT_LE(d.mean(), kCpuMean);
    EXPECT_LE(d.max, 0.08);
  }
}

TEST_P(GoldenCpu, Bf16Cache) {
  const Differences d = model_.from_golden(*ops_, LatentFormat::kBF16);
  EXPECT_LE(d.mean(), kCpuMean);
  EXPECT_LE(d.max, 0.08);
}

TEST_P(Golden, Cuda) {
  const auto ops = make_cuda_ops({.separate_arrays = gpu_sanitizer(), .no_library = gpu_sanitizer_of_own_kernels()});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  const Differences d = model_.from_golden(**ops, LatentFormat::kBF16);
  EXPECT_LE(d.mean(), kCudaMean);
  EXPECT_LE(d.max, 0.12);
}

TEST_P(GoldenCpu, Fp8Cache) {
  model_.expect_near_defined(LatentFormat::kF8E4M3, *ops_, 0.5, kCpuMean);
}

TEST_P(GoldenCpu, RecordsWithScalesOfTheirOwn) {
  model_.expect_near_defined(LatentFormat::kF8Tiles, *ops_, 0.5, kCpuMean);
}

TEST_P(Golden, CudaFp8Cache) {
  const auto ops = make_cuda_ops({.separate_arrays = gpu_sanitizer(), .no_library = gpu_sanitizer_of_own_kernels()});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  model_.expect_near_defined(LatentFormat::kF8E4M3, **ops, 0.8, kCudaMean);
}

// The names, so that a golden that is lost is a failure.
TEST(Goldens, DivideAmongRanks) {
  EXPECT_EQ(GoldenModel("heads16").numbers_of_ranks(), (std::vector<int32_t>{2, 4, 8, 16}));
  EXPECT_EQ(GoldenModel("kimi_linear").numbers_of_ranks(), (std::vector<int32_t>{2}));
  EXPECT_TRUE(GoldenModel("glm4_flash").numbers_of_ranks().empty()) << "5 heads";
}

TEST(Goldens, AreAllThere) {
  const std::vector<std::string> all = {"fp8_block", "glm4_flash",  "heads16", "int4",
                                        "k2_yarn",   "kimi_linear", "v2_lite", "v3_groups"};
  EXPECT_EQ(golden_names(), all);
}

INSTANTIATE_TEST_SUITE_P(All, Golden, testing::ValuesIn(golden_names()), [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(All, GoldenCpu,
                         testing::Combine(testing::ValuesIn(golden_names()), testing::ValuesIn(kAllIsas)),
                         [](const auto& info) {
                           return std::get<std::string>(info.param) + "_" + isa_name(std::get<Isa>(info.param));
                         });

}  // namespace
}  // namespace perigee
