// RankConfig: what a rank is told before it loads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/collective_options.h"
#include "comm/comm.h"
#include "control/plan_limits.h"
#include "exec/ngram_match.h"
#include "model/eagle3.h"

namespace perigee {

class OpObserver;
class PeerComms;

enum class Device { kCpu, kRef, kCuda };

// For tests: what happens to one rank in one step.
struct RankFault {
  enum class Mode {
    kError,  // its device is lost
    kHang,   // its thread stops for ever, whatever the abort word says
  };
  int32_t rank = 0;
  int64_t step = -1;  // < 0: never
  Mode mode = Mode::kError;
};

enum class RankLayout : uint8_t {
  kReplicated,      // each rank holds the whole model: for tests
  kTensorParallel,  // each holds its shards (model/shard.h)
};

struct RankConfig {
  int32_t rank = 0, size = 1;  // this rank of so many
  RankLayout layout = RankLayout::kReplicated;
  bool whole_experts = false;       // kTensorParallel: TensorParallel::whole_experts
  Comm* comm = &Comm::alone();      // with the ranks that hold the other shards; outlives the rank
  Comm* dcp_comm = &Comm::alone();  // with those of its dcp group: ranks of consecutive shards, limits.dcp_size of them
  PeerComms* peers = nullptr;       // of GPUs in place of those two: where the rank gets both; outlives it
  CollectiveOptions collectives;    // of those
  Device device = Device::kCpu;
  LoadOptions load;               // its num_threads also compute on a CPU; 0: the cores, divided among the ranks
  int64_t cache_bytes = 1 << 30;  // page pool of a rank; on a GPU 0: what memory_share leaves beside the rest
  double memory_share = 0.9;      // of the GPU's memory, with what others have of it
  PlanLimits limits;
  // Others read and write pages that no step has: a result means that all that its step writes there is written.
  bool shared_pages = false;
  int64_t transfer_bytes = 0;  // of a GPU's memory, reserved for that after the page pool
  std::string draft_model;     // where limits.num_drafts > 0: the folder of an Eagle3; empty: prompt lookup
  Eagle3::Layer draft_layer = Eagle3::Layer::kDivided;
  // None: latents as the target's, keys and values by head as e4m3. By head, on ref always f32.
  std::optional<LatentFormat> draft_cache;
  // Measurements with made-up weights: of a draft at each place, given those before; empty: what the model accepts.
  std::vector<float> synthetic_rates;
  NgramMatch ngram;        // of prompt lookup
  std::optional<Isa> isa;  // of the CPU backend; none: the best one of this machine
  OnlineQuantization quantization = OnlineQuantization::kNone;  // of the CPU backend
  RankFault fault;                                              // tests
  OpObserver* observer = nullptr;  // of the model's ops (ops/observed_ops.h); none costs nothing
  std::function<std::unique_ptr<Model>(Ops&)> make_model;  // tests: the model, in place of load

  TensorParallel shard() const {
    if (layout == RankLayout::kReplicated) return {};
    return {.rank = rank, .size = size, .whole_experts = whole_experts};
  }
  int32_t dcp_index() const { return rank % limits.dcp_size; }
};

}  // namespace perigee
