// What the equality suites share: jobs, their replies from an engine, and the bundled models they run on.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/soak.h"
#include "engine/engine.h"
#include "ops/cpu/test_isa.h"
#include "tensor/cuda/device.h"
#include "tie_rule.h"

namespace perigee {

inline constexpr int32_t kVocab = 2048;  // both models; ordinary tokens

inline constexpr std::array<LatentFormat, 3> kCaches = {LatentFormat::kBF16, LatentFormat::kF8E4M3,
                                                        LatentFormat::kF8Tiles};

struct Reply : GreedyReply {
  std::vector<TokenLogprobs> prompt_logprobs;
  std::vector<int32_t> preemptions;  // one per id: how often the sequence had been preempted before it
  int32_t cached = 0;
  std::optional<FinishReason> finish;
};

struct Job {
  std::vector<int32_t> prompt;
  int32_t max_tokens = 16;
  float temperature = 0;
  int32_t prompt_logprobs = -1;
  bool penalties = false;
  std::vector<int32_t> stop_ids = {};
  std::string cache_salt = {};
  std::shared_ptr<const Constraint> constraint = nullptr;
};

inline void add(OutputChunk&& chunk, Reply& reply) {
  reply.ids.insert(reply.ids.end(), chunk.ids.begin(), chunk.ids.end());
  reply.preemptions.resize(reply.ids.size(), chunk.num_preemptions);
  std::move(chunk.logprobs.begin(), chunk.logprobs.end(), std::back_inserter(reply.logprobs));
  std::move(chunk.prompt_logprobs.begin(), chunk.prompt_logprobs.end(), std::back_inserter(reply.prompt_logprobs));
  reply.cached = std::max(reply.cached, chunk.num_cached_tokens);
  reply.error += chunk.error;
  if (chunk.finish) reply.finish = chunk.finish;
}

// Collects the replies of several requests and waits for all of them.
class Collector {
 public:
  OutputSink sink(size_t index) {
    return [this, index](OutputChunk&& chunk) {
      std::lock_guard lock(mutex_);
      const bool last = chunk.finish.has_value();
      add(std::move(chunk), replies_[index]);
      if (!last) return;
      ++finished_;
      done_.notify_all();
    };
  }
  // A test that would hang ends here instead, with what it waited for.
  std::vector<Reply> wait(size_t count) {
    std::unique_lock lock(mutex_);
    const int minutes = soak_requested() ? 300 : 20;  // of 72,000 tokens each is multiplied with all before it
    const bool all = done_.wait_for(lock, std::chrono::minutes(minutes), [&] { return finished_ == count; });
    CHECK(all, "after ", minutes, " minutes ", finished_, " of ", count, " requests have ended");
    std::vector<Reply> out;
    for (size_t i = 0; i < count; ++i) out.push_back(replies_[i]);
    return out;
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  std::map<size_t, Reply> replies_;
  size_t finished_ = 0;
};

struct TestModel {
  const char* name;
  std::string folder;
  // Step budgets. A hybrid's must have room for an aligned chunk beside all decode rows.
  std::vector<int32_t> budgets = {80, 128, 333};
  Device device = Device::kCpu;
  std::optional<LatentFormat> cache = {};  // none: bf16
  int32_t tp = 1, dcp = 1;
  std::string draft = {};                        // where a suite drafts: the model's folder; empty: by prompt lookup
  std::optional<LatentFormat> draft_cache = {};  // of its keys and values by head
};

inline TestModel tiny_k2() {
  return {.name = "TinyK2", .folder = "models/tiny-k2", .budgets = {16, 64, 333}};
}

// Delta attention and latent attention in turn.
inline TestModel hybrid_model() {
  return {.name = "Hybrid", .folder = "models/tiny-kimi-linear"};
}

inline TestModel on_gpu(TestModel model, const char* name) {
  model.device = Device::kCuda;
  model.name = name;
  return model;
}

inline std::vector<TestModel> on_all_devices() {
  std::vector<TestModel> models = {tiny_k2(), hybrid_model()};
  if (select_device(0).ok()) {
    models.push_back(on_gpu(tiny_k2(), "TinyK2Cuda"));
    models.push_back(on_gpu(hybrid_model(), "HybridCuda"));
  }
  return models;
}

inline std::string name_of(const testing::TestParamInfo<TestModel>& info) {
  return info.param.name;
}

inline EngineConfig base_config(const TestModel& model) {
  EngineConfig config;
  config.rank.load.path = model.folder;
  config.rank.device = model.device;
  if (model.device == Device::kCpu) config.rank.isa = isa_under_test();
  config.rank.load.cache = model.cache;
  config.rank.size = model.tp;
  config.rank.limits.dcp_size = model.dcp;
  if (model.tp > 1) config.rank.layout = RankLayout::kTensorParallel;
  if (model.tp > 1) config.rank_timeouts.behind_s = 1e6;
  config.rank.load.num_threads = kSanitized ? 2 : 1;  // two processes share the cores; a sanitizer is to see the pool
  config.rank.cache_bytes = 96 << 20;
  config.rank.limits.max_sequences = 16;
  config.scheduling.prefix_caching = false;
  config.selfcheck = true;
  config.scheduling.admission_reserve = nullptr;  // a tight cache is to preempt
  return config;
}

inline std::unique_ptr<Engine> make_engine(const EngineConfig& config) {
  auto engine = Engine::create(config);
  CHECK(engine.ok(), engine.error().message);
  return std::move(engine).value();
}

// A cache of so many pages of latents, which dcp groups divide, beside the recurrent states of two sequences, which
// ranks with shards divide. `like`: an engine of one rank with the same pages.
inline EngineConfig with_cache_of(EngineConfig config, const Engine& like, int32_t num_pages) {
  const int64_t page_bytes = config.rank.cache_bytes / like.num_pages(), shares = config.rank.shard().size;
  CHECK(num_pages % config.rank.limits.dcp_size == 0);
  config.rank.cache_bytes =
      (page_bytes + 1) * (num_pages / config.rank.limits.dcp_size + 2 * ((like.state_pages() + shares - 1) / shares));
  config.scheduling.max_model_len = 64 * num_pages;
  return config;
}

inline EngineRequest request_of(const Job& job) {
  EngineRequest request;
  request.prompt = std::make_shared<const std::vector<int32_t>>(job.prompt);
  request.sampling.temperature = job.temperature;
  request.sampling.max_tokens = job.max_tokens;
  request.sampling.stop_ids = job.stop_ids;
  request.sampling.seed = fnv1a("equality") + job.prompt.size();
  request.sampling.logprobs = 2;
  request.sampling.prompt_logprobs = job.prompt_logprobs;
  if (job.penalties) {
    request.sampling.presence_penalty = 0.7f;
    request.sampling.frequency_penalty = 0.4f;
    request.sampling.repetition_penalty = 1.15f;
  }
  request.cache_salt = job.cache_salt;
  request.constraint = job.constraint;
  return request;
}

inline std::vector<Reply> run(Engine& engine, const std::vector<Job>& jobs, bool together) {
  std::vector<Reply> replies;
  if (together) {
    Collector collector;
    for (size_t i = 0; i < jobs.size(); ++i) CHECK(engine.submit(request_of(jobs[i]), collector.sink(i)).ok());
    return collector.wait(jobs.size());
  }
  for (const Job& job : jobs) replies.push_back(run(engine, {job}, true)[0]);
  return replies;
}

inline std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace perigee
