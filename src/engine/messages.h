// What an engine is told and what it tells: requests in, chunks of output and statistics out. Plain data; the server
// includes this and knows nothing of what is behind it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control/constraint.h"
#include "control/plan.h"
#include "control/sampling.h"
#include "control/scheduler.h"
#include "kv/counts.h"

namespace perigee {

using RequestId = Id<struct RequestTag, int64_t>;

struct EngineRequest {
  std::shared_ptr<const std::vector<int32_t>> prompt;
  SamplingParams sampling;  // choice i of n samples with seed + i
  int32_t n = 1;
  int32_t priority = 0;
  double timeout_s = 0;  // 0: none
  std::string cache_salt;
  LeaseWish lease = LeaseWish::kNone;    // of the prompt's cache entries, by another node: EngineConfig::handover
  std::optional<RemotePrefix> remote;    // of the prompt, held by another node
  int32_t speculation_max_context = -1;  // tokens up to which drafts are verified; 0: any, < 0: as the engine has it
  std::shared_ptr<const Constraint> constraint = nullptr;  // that each choice's ids obey; null: none
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
  int32_t num_drafts = 0;       // that were verified for these ids,
  int32_t num_accepted = 0;     // and how many of the ids they are
  double scheduled_s = 0;       // engine clock, when the request's first choice was first planned; 0: never
  std::string error;
  // What is held for another node: of the last chunk, or of one without ids when the prompt's computation begins.
  std::optional<RemotePrefix> lease;
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
  double stalled_s = 0;    // choices are in flight, and for so long no step ended and no other node was waited for
  StepTokens step_tokens;
  double now_s = 0;
  int64_t steps = 0;
  double host_step_us = 0;                       // scheduler + batch building, mean of the last 64 steps
  bool lost = false;                             // a device: nothing is served any more
  std::optional<HandoverCounts> handovers = {};  // of an engine that shares its cache with others
};

}  // namespace perigee
