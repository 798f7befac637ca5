// MemoryPlan: what each rank takes and what fits beside it, before any weight is read. `perigee plan` prints it, and
// `perigee serve` is refused by it. Weights, pages and rings are laid out by the functions that a rank reserves them by
// (size_model, RankParts); a GPU's workspace is estimated (exec/cuda/gpu_memory.h).
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "control/cache_size.h"
#include "engine/engine.h"
#include "exec/cuda/gpu_memory.h"
#include "tensor/cuda/gpus.h"

namespace perigee {

// What the ranks run on.
struct Machine {
  std::string name;            // "4 x H200", "this machine"
  int64_t bytes = 0;           // of a GPU; of a host, for all ranks together
  int compute_capability = 0;  // of GPUs

  static Machine of_gpus(std::span<const Gpu> gpus);  // which are alike
};

// This machine, for the ranks of `config`. Errors: too few GPUs, or unlike ones.
Result<Machine> this_machine(const RankConfig& config);

// Of one rank, in bytes.
struct MemoryPlan {
  Device device = Device::kCpu;
  int32_t ranks = 1;
  int32_t dcp_size = 1;  // of these share the blocks of a sequence
  Dealing dealing = Dealing::kFewest;
  Machine machine;
  int64_t limit = 0;  // what a rank may take of it before its graphs are made
  int64_t weights = 0;
  GpuWorkspace workspace;  // nothing on a host, where it grows with the steps
  int64_t ring = 0;        // of recurrent models, beside the pool; on a GPU a part of workspace.arrays
  int64_t transfers = 0;   // of caches from and to other nodes, on a GPU
  CacheLayout layout;
  int64_t pool = 0;           // the page pool; under 0: what lacks
  int64_t least_pages = 0;    // for any work
  int64_t max_model_len = 0;  // that was asked for, or the model's
  bool length_asked = false;
  int32_t max_sequences = 0;  // that run at once

  int64_t fixed() const { return weights + workspace.total() + ring + transfers; }  // beside the pool
  int64_t pages() const { return std::max<int64_t>(pool, 0) / layout.bytes_per_page(); }
  CacheSize cache_size() const {  // of all ranks
    return {.pages = pages(), .state_pages = layout.state_pages(), .dcp_size = dcp_size, .dealing = dealing};
  }
  // Pages without which nothing is served.
  int64_t needed_pages() const {
    return std::max(least_pages, length_asked ? cache_size().pages_of(max_model_len) : 0);
  }
  bool fits() const { return fixed() + pool <= limit && pages() >= needed_pages(); }
};

// Errors: those of the model's files, and ranks among which it does not divide. What does not fit is no error here.
Result<MemoryPlan> plan_memory(const EngineConfig& config, const Machine& machine);

// Whether the plan fits. The error says what lacks, and names three ways out.
Status check_fits(const EngineConfig& config, const MemoryPlan& plan);

std::string plan_text(const MemoryPlan& plan);
Json plan_json(const MemoryPlan& plan);

}  // namespace perigee
