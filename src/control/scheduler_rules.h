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
  bool keeps_checkpoints() const { return is_recurrent() && config.prefix_caching; }

  const SchedulerConfig config;
  const int32_t hit_blocks;     // prefix hits are multiples of this many blocks
  const bool strict_alignment;  // no chunk ends elsewhere but where its input does
  const int32_t num_slots;      // how many sequences run at most
  const CheckpointPolicy checkpoints;
};

}  // namespace perigee
