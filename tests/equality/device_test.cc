// The GPU gives the CPU's answers: greedy replies to the task prompts of the bundled models, up to the tie rule of
// DESIGN D10, whatever runs beside them. Skipped where there is no GPU.
#include "tensor/cuda/device.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <mutex>

#include "base/json.h"
#include "engine/engine.h"
#include "text/tokenizer.h"
#include "tie_rule.h"

namespace perigee {
namespace {

using Reply = GreedyReply;

// Both round to bf16, in different places.
constexpr float kMostApartFromTheCpu = 0.25f;

std::vector<std::vector<int32_t>> task_prompts(const Tokenizer& tokenizer, size_t count) {
  std::vector<std::vector<int32_t>> prompts;
  for (const char* name : {"gsm_0shot", "gsm_5shot_a", "gsm_0shot_held_out"}) {
    std::ifstream file(str_cat("tests/data/tiny_tasks/", name, ".jsonl"));
    for (std::string line; std::getline(file, line) && prompts.size() < count;) {
      const auto json = parse_json(line, {});
      CHECK(json.ok());
      prompts.push_back(tokenizer.encode(json->find("prompt")->as_string(), SpecialsIn::kPlainText));
    }
  }
  return prompts;
}

std::string folder_of(const std::string& model) {
  return "models/" + model;
}

EngineConfig config_for(const std::string& model, Device device, bool deterministic) {
  EngineConfig config;
  config.rank.device = device;
  config.rank.load.path = folder_of(model);
  config.rank.cache_bytes = 512 << 20;
  config.rank.limits.max_sequences = 64;
  config.rank.limits.deterministic = deterministic;
  return config;
}

std::vector<Reply> answers(const EngineConfig& config, const std::vector<std::vector<int32_t>>& prompts,
                           bool together = true) {
  auto engine = Engine::create(config);
  CHECK(engine.ok(), engine.error().message);
  std::mutex mutex;
  std::condition_variable done;
  std::vector<Reply> replies(prompts.size());
  size_t finished = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    EngineRequest request;
    request.prompt = std::make_shared<const std::vector<int32_t>>(prompts[i]);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 48;
    request.sampling.stop_ids = (*engine)->model().eos_ids;
    request.sampling.logprobs = 2;
    const auto sink = [&, i](OutputChunk&& chunk) {
      std::lock_guard lock(mutex);
      replies[i].ids.insert(replies[i].ids.end(), chunk.ids.begin(), chunk.ids.end());
      std::move(chunk.logprobs.begin(), chunk.logprobs.end(), std::back_inserter(replies[i].logprobs));
      replies[i].error += chunk.error;
      finished += chunk.finish.has_value();
      done.notify_all();
    };
    CHECK((*engine)->submit(request, sink).ok());
    std::unique_lock lock(mutex);
    if (!together) done.wait(lock, [&] { return finished == i + 1; });
  }
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return finished == prompts.size(); });
  return replies;
}

// Replies to the same prompts that part at a near tie, at most one in ten; any other difference is a failure.
void expect_alike(const char* what, const std::vector<Reply>& cpu, const std::vector<Reply>& gpu) {
  size_t flips = 0;
  float most_apart = 0;
  for (size_t i = 0; i < cpu.size(); ++i) {
    SCOPED_TRACE(str_cat("prompt ", i));
    const Likeness likeness = compare_greedy(cpu[i], gpu[i], kMostApartFromTheCpu);
    flips += likeness.parts ? 1 : 0;
    most_apart = std::max(most_apart, likeness.most_apart);
  }
  std::printf(
      "%s: %zu of %zu greedy replies leave the CPU's path at a near tie; the others' tokens are at most %.4f apart\n",
      what, flips, cpu.size(), static_cast<double>(most_apart));
  EXPECT_LE(flips, cpu.size() / 10);
}

class DeviceEquality : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const Status gpu = select_device(0); !gpu.ok()) GTEST_SKIP() << gpu.error().message;
  }
};

TEST_P(DeviceEquality, TaskReplies) {
  const auto tokenizer = Tokenizer::load(folder_of(GetParam()));
  ASSERT_TRUE(tokenizer.ok());
  const auto prompts = task_prompts(**tokenizer, 520);
  ASSERT_EQ(prompts.size(), 520u);
  const std::vector<Reply> cpu = answers(config_for(GetParam(), Device::kCpu, false), prompts);
  expect_alike("default", cpu, answers(config_for(GetParam(), Device::kCuda, false), prompts));
  expect_alike("deterministic", cpu, answers(config_for(GetParam(), Device::kCuda, true), prompts));
}

TEST_P(DeviceEquality, DeterministicRepliesDoNotDependOnWhoRunsBeside) {
  const auto tokenizer = Tokenizer::load(folder_of(GetParam()));
  ASSERT_TRUE(tokenizer.ok());
  const auto prompts = task_prompts(**tokenizer, 512);
  std::vector<size_t> which(4 * prompts.size());  // each prompt four times, beside others every time
  for (size_t i = 0; i < which.size(); ++i) which[i] = i * (1 + 2 * (i / prompts.size())) % prompts.size();
  std::vector<std::vector<int32_t>> requests;
  for (const size_t i : which) requests.push_back(prompts[i]);
  EngineConfig config = config_for(GetParam(), Device::kCuda, true);
  config.rank.limits.max_sequences = 256;
  const std::vector<Reply> alone = answers(config, prompts, false), beside = answers(config, requests);
  int64_t tokens = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    const Reply &wanted = alone[which[r]], &got = beside[r];
    ASSERT_EQ(wanted.error + got.error, "") << "request " << r;
    ASSERT_EQ(wanted.ids, got.ids) << "request " << r;
    tokens += std::ssize(got.ids);
    ASSERT_EQ(wanted.logprobs.size(), got.logprobs.size()) << "request " << r;
    for (size_t t = 0; t < wanted.logprobs.size(); ++t)
      ASSERT_EQ(wanted.logprobs[t].logprob, got.logprobs[t].logprob) << "request " << r << " token " << t;
  }
  ASSERT_GT(tokens, 30 * std::ssize(requests)) << "hardly any token came: the test says nothing";
  std::printf("%lld tokens of %zu requests, 256 at once, all as alone\n", static_cast<long long>(tokens),
              requests.size());
}

INSTANTIATE_TEST_SUITE_P(, DeviceEquality, testing::Values("tiny-k2", "tiny-kimi-linear"), [](const auto& info) {
  std::string name = info.param;
  std::erase(name, '-');
  return name;
});

}  // namespace
}  // namespace perigee
