// Engine: the place that joins the brain (control) and the hands (exec), on a thread of its own.
//
// Thread-safe: submit, cancel, stats and shutdown may be called from any thread. Outputs arrive through the sink given
// at submission, called on the engine thread; a sink must not block (it posts to its own executor).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "control/plan.h"
#include "control/sampling.h"
#include "control/scheduler.h"
#include "engine/executor.h"
#include "engine/lag_watch.h"
#include "exec/rank_config.h"

namespace perigee {

using RequestId = Id<struct RequestTag, int64_t>;

struct EngineConfig {
  RankConfig rank;  // of each; rank.size of them
  RankTimeouts rank_timeouts;
  int32_t max_sequences = 128;     // --max-num-seqs
  int32_t max_step_tokens = 2048;  // --max-num-batched-tokens
  int32_t max_model_len = 0;       // 0: the model's limit, or what fits the cache when that is less
  int32_t max_waiting = 4096;      // --max-waiting-seqs
  int32_t max_choices() const { return max_waiting + max_sequences; }  // that run and wait at once
  bool prefix_caching = true;
  int32_t checkpoint_interval_blocks = SchedulerConfig().checkpoint_interval_blocks;  // recurrent models
  int32_t checkpoint_turn_blocks = SchedulerConfig().checkpoint_turn_blocks;
  AdmissionReserve admission_reserve = SchedulerConfig().admission_reserve;
  bool deterministic = false;
  bool selfcheck = false;  // after every step: check_integrity(), and that all ranks have sampled the same
  // Called on the engine thread when a device is lost and every choice has got an error. Nothing can be submitted after
  // that; the process should end with code 70.
  std::function<void(const std::string& why)> on_device_lost = {};
};

struct EngineRequest {
  std::shared_ptr<const std::vector<int32_t>> prompt;
  SamplingParams sampling;  // choice i of n samples with seed + i
  int32_t n = 1;
  int32_t priority = 0;
  double timeout_s = 0;  // 0: none
  std::string cache_salt;
};

// What one choice of a request gained. The last chunk of a choice has `finish`.
struct OutputChunk {
  int32_t choice = 0;
  std::vector<int32_t> ids;  // includes the stop id that ended the choice, as its last
  std::vector<TokenLogprobs> logprobs;
  std::vector<TokenLogprobs> prompt_logprobs;
  std::optional<FinishReason> finish;
  int32_t stop_id = -1;
  int32_t num_cached_tokens = 0;
  int32_t num_preemptions = 0;  // so far: these ids were sampled after so many
  double scheduled_s = 0;       // engine clock, when the request's first choice was first planned; 0: never
  std::string error;
};
using OutputSink = std::function<void(OutputChunk&&)>;

// Tokens of a step, by bucket: at most kStepTokenBounds[i] and more than the bound before; the last bucket has no
// bound.
inline constexpr std::array<int32_t, 13> kStepTokenBounds = {1,   8,    16,   32,   64,   128,  256,
                                                             512, 1024, 2048, 4096, 8192, 16384};
struct StepTokens {
  std::array<int64_t, kStepTokenBounds.size() + 1> steps{};
  int64_t tokens = 0;
};

// Request timings in seconds for metrics: buckets are the server's business, the engine keeps none.
struct EngineStats {
  SchedulerGauges scheduler;
  double kv_usage = 0;     // used / total pages
  double last_step_s = 0;  // when the newest step ended, engine clock
  double stalled_s = 0;    // choices are in flight, and for so long no step has been planned or finished
  StepTokens step_tokens;
  double now_s = 0;
  int64_t steps = 0;
  double host_step_us = 0;  // scheduler + batch building, mean of the last 64 steps
  bool lost = false;        // a device: nothing is served any more
};

// With the engine's limits in config.rank.
using MakeExecutor = std::function<Result<std::unique_ptr<Executor>>(const EngineConfig& config,
                                                                     std::function<void(StepResult&&)> on_result)>;

class Engine {
 public:
  // Loads the model, reserves all memory and starts the threads. Errors say what is wrong and what to change.
  static Result<std::unique_ptr<Engine>> create(const EngineConfig& config);
  // The same with hands of another make: tests.
  static Result<std::unique_ptr<Engine>> create(const EngineConfig& config, const MakeExecutor& make_executor);
  ~Engine();

  // kExhausted: the queue is full. kBadInput: can never fit, its tokens or its n choices (message has the numbers).
  // kDeviceLost. The sink is called until every choice has finished, also after cancel(), and never after that.
  Result<RequestId> submit(EngineRequest request, OutputSink sink);

  // Ends one choice (kStop: the server saw a stop string) or all of them (choice -1). Unknown ids are ignored.
  void cancel(RequestId request, int32_t choice = -1, FinishReason reason = FinishReason::kCancelled);

  EngineStats stats() const;
  const ModelInfo& model() const;
  int32_t max_model_len() const;
  int32_t max_choices() const;  // EngineConfig::max_choices(): what one request can have
  int32_t num_pages() const;
  int32_t state_pages() const;  // of those, what a sequence's recurrent state takes; 0: the model has none

  // Ends every request with an error and stops the threads. The server drains first by not submitting and waiting.
  void shutdown();

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee
