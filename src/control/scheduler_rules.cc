#include "control/scheduler_rules.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace perigee {
namespace {

const SchedulerConfig& checked(const SchedulerConfig& config) {
  const Status status = validate(config);
  CHECK(status.ok(), status.error().field, ": ", status.error().message);
  return config;
}

int32_t hit_granularity_blocks(const SchedulerConfig& config) {
  return config.deterministic ? std::lcm(config.attention_alignment, kBlockTokens) / kBlockTokens : 1;
}

// Where a chunk of a recurrent model ends can change the last bits of its state. So that its company does not decide
// that, chunks keep to the alignment wherever the budget has room for one beside all decode rows.
bool keeps_alignment(const SchedulerConfig& config) {
  const int64_t enough = config.attention_alignment + int64_t{1 + config.num_drafts} * config.max_sequences;
  return config.deterministic || (config.state_pages > 0 && config.max_step_tokens >= enough);
}

// With a row for each sequence but one, the budget still has room for that one's smallest chunk. So the first prefill
// in order of service moves in every step, however many decode beside it.
int32_t max_running(const SchedulerConfig& config) {
  const int32_t smallest_chunk = keeps_alignment(config) ? config.attention_alignment : 1;
  return std::min(config.max_sequences, (config.max_step_tokens - smallest_chunk) / (1 + config.num_drafts) + 1);
}

CheckpointPolicy checkpoint_policy(const SchedulerConfig& config) {
  const int32_t granularity = hit_granularity_blocks(config);
  const auto tokens = [&](int32_t blocks) {
    return (blocks + granularity - 1) / granularity * granularity * kBlockTokens;
  };
  return {.granularity_tokens = granularity * kBlockTokens,
          .interval_tokens = tokens(config.checkpoint_interval_blocks),
          .rolling_tokens = tokens(config.checkpoint_rolling_blocks)};
}

}  // namespace

SchedulerRules::SchedulerRules(const SchedulerConfig& config_in)
    : config(checked(config_in)),
      hit_blocks(hit_granularity_blocks(config)),
      strict_alignment(keeps_alignment(config)),
      num_slots(max_running(config)),
      checkpoints(checkpoint_policy(config)) {}

Status validate(const SchedulerConfig& config) {
  if (config.dcp_size < 1 || config.dcp_size > kMaxDcpSize)
    return bad_input(fmt::format("must be in [1, {}]", kMaxDcpSize), "dcp_size");
  if (config.num_pages < 1) return bad_input("the pool has no page", "num_pages");
  if (config.num_pages > std::numeric_limits<int32_t>::max() / config.dcp_size)
    return bad_input(fmt::format("more than 2^31 pages at {} indices", config.dcp_size), "num_pages");
  if (config.max_sequences < 1) return bad_input("at least one sequence must run", "max_sequences");
  if (config.max_model_len < 2)
    return bad_input(fmt::format("a context of {} has no room for a prompt and an output: raise --max-model-len",
                                 config.max_model_len),
                     "max_model_len");
  if (config.num_drafts < 0 || config.num_drafts > kMaxDrafts)
    return bad_input(fmt::format("must be in [0, {}]", kMaxDrafts), "num_drafts");
  if (config.attention_alignment < 1) return bad_input("must be positive", "attention_alignment");
  if (config.long_prefill_tokens < 0) return bad_input("must not be negative", "long_prefill_tokens");
  if (config.state_pages < 0 || config.state_pages >= config.num_pages)
    return bad_input("must leave pages for the blocks of a sequence", "state_pages");
  if (config.checkpoint_interval_blocks < 0) return bad_input("must not be negative", "checkpoint_interval_blocks");
  if (config.checkpoint_rolling_blocks < 0) return bad_input("must not be negative", "checkpoint_rolling_blocks");
  if (config.hash_bits < 1 || config.hash_bits > 128) return bad_input("must be in [1, 128]", "hash_bits");
  const int32_t least = config.deterministic ? config.attention_alignment : 1;
  if (config.max_step_tokens < least)
    return bad_input(fmt::format("must be at least {}, the smallest prefill chunk", least), "max_step_tokens");
  if (config.attention_alignment > kPromptLogprobTokens)
    return bad_input(
        fmt::format("must be at most {}, the tokens of a chunk under prompt_logprobs", kPromptLogprobTokens),
        "attention_alignment");
  return {};
}

}  // namespace perigee
