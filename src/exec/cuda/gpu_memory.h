// What a rank takes on a GPU beside its weights and its page pool, from sizes alone: for plans, on any machine. An
// estimate: the rank itself measures it (CudaDevice::warm_up), and gives the pool what is left.
#pragma once

#include <cstdint>

#include "exec/rank_parts.h"
#include "model/config.h"

namespace perigee {

// The parts of a rank on a GPU that has loaded nothing; see size_parts().
Result<RankParts> size_gpu_parts(const RankConfig& config);

struct GpuWorkspace {
  int64_t context = 0;      // of the driver: kernels, the library's workspace
  int64_t arrays = 0;       // of slots, of a step's batch and of sampling
  int64_t temporaries = 0;  // of the largest step
  int64_t graphs = 0;       // of decode steps; made last, from what the share leaves to nobody
  int64_t total() const { return context + arrays + temporaries; }  // before the pool is made
};

// `model` with the ranks of `parts`.
GpuWorkspace estimate_gpu_workspace(const RankParts& parts, const ModelConfig& model, int compute_capability);

// What the page pool gets of a GPU's memory when `used` of it is taken: what was asked for, or what memory_share
// leaves.
inline int64_t gpu_pool_bytes(const RankConfig& config, int64_t total, int64_t used) {
  if (config.cache_bytes > 0) return config.cache_bytes;
  return static_cast<int64_t>(config.memory_share * static_cast<double>(total)) - used;
}

}  // namespace perigee
