// SchedulerRules: a configuration and what follows from it, worked out once for all parts of the scheduler.
#pragma once

#include <cstdint>

#include "control/checkpoint_policy.h"
#include "control/scheduler.h"

namespace perigee {

struct SchedulerRules {
  explicit SchedulerRules(const SchedulerConfig& config);  // CHECKs validate()

  bool is_recurrent() const { return config.state_pages > 0; }
  // Full blocks that a node may take from another of a prompt of so many tokens: one token is left to compute.
  int32_t handover_blocks(int32_t num_prompt) const {
    return (num_prompt - 1) / kBlockTokens / hit_blocks * hit_blocks;
  }
  // With the tail: all but that one token. In deterministic mode there is none, since it would end a chunk where one
  // node ends none.
  int32_t handover_tokens(int32_t num_prompt) const {
    const int32_t num_blocks = handover_blocks(num_prompt);
    return config.deterministic || num_blocks == 0 ? num_blocks * kBlockTokens : num_prompt - 1;
  }
  bool keeps_checkpoints() const { return is_recurrent() && config.prefix_caching; }

  const SchedulerConfig config;
  const int32_t hit_blocks;     // prefix hits are multiples of this many blocks
  const bool strict_alignment;  // no chunk ends elsewhere but where its input does
  const int32_t num_slots;      // how many sequences run at most
  const CheckpointPolicy checkpoints;
};

}  // namespace perigee
