// Test only: small engines with made-up weights, and what their sinks are told.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/eventually.h"
#include "engine/engine.h"

namespace perigee {

// A page holds 64 tokens; the pool has 8 MB, which are some tens of pages.
inline EngineConfig small_config(const char* golden = "heads16") {
  EngineConfig config;
  config.rank.device = Device::kCpu;  // under a sanitizer tens of times faster than ref
  config.rank.load.num_threads = 1;
  config.rank.load.path = std::string("tests/golden/") + golden;
  config.rank.load.format = LoadFormat::kDummy;
  config.rank.cache_bytes = 8 << 20;
  config.rank.limits.max_sequences = 4;
  config.rank.limits.max_step_tokens = 64;
  return config;
}

inline std::unique_ptr<Engine> make_engine(const EngineConfig& config) {
  auto engine = Engine::create(config);
  CHECK(engine.ok(), engine.error().message);
  return std::move(*engine);
}

// Greedy, without an end of sequence id.
inline EngineRequest request_of(int32_t num_prompt, int32_t max_tokens, int32_t n = 1) {
  EngineRequest request;
  request.prompt = std::make_shared<const std::vector<int32_t>>(static_cast<size_t>(num_prompt), 7);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  request.n = n;
  return request;
}

// All that one choice got.
struct Reply {
  std::vector<int32_t> ids;
  std::optional<FinishReason> finish;
  int32_t stop_id = -1;
  int32_t num_cached_tokens = 0;
  std::vector<double> scheduled_s;  // of each chunk
  std::string error;
};

// The replies of one request, by choice.
class Replies {
 public:
  OutputSink sink() {
    return [this](OutputChunk&& chunk) {
      const std::lock_guard lock(mutex_);
      Reply& reply = replies_[chunk.choice];
      reply.ids.insert(reply.ids.end(), chunk.ids.begin(), chunk.ids.end());
      reply.scheduled_s.push_back(chunk.scheduled_s);
      reply.num_cached_tokens = chunk.num_cached_tokens;
      if (!chunk.finish) return;
      CHECK(!reply.finish, "choice ", chunk.choice, " ends twice");
      reply.finish = chunk.finish;
      reply.stop_id = chunk.stop_id;
      reply.error = chunk.error;
      ++num_finished_;
      changed_.notify_all();
    };
  }
  // What they are once so many choices have ended.
  std::map<int32_t, Reply> wait(int num_finished = 1) {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, kHangLimit, [&] { return num_finished_ >= num_finished; }), num_finished_, " of ",
          num_finished, " choices have ended");
    return replies_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int32_t, Reply> replies_;
  int num_finished_ = 0;
};

// Submits and waits for every choice.
inline std::map<int32_t, Reply> run(Engine& engine, const EngineRequest& request) {
  Replies replies;
  const auto id = engine.submit(request, replies.sink());
  CHECK(id.ok(), id.error().message);
  return replies.wait(request.n);
}

}  // namespace perigee
