// A GPU as a rank's device: plans become device arrays, decode steps run as graphs, ids are sampled where they are
// needed. No CUDA header here.
#pragma once

#include "exec/rank_device.h"

namespace perigee {

// Why there is no GPU to use, with the way out.
inline Error without_gpu(Error why) {
  why.message += "; --device cpu needs none, and --device auto takes one only where there is one";
  return why;
}

// GPU config.rank, for the calling thread. kUnavailable: built without a toolkit, or no such GPU.
Result<std::unique_ptr<RankDevice>> make_cuda_device(const RankConfig& config);

}  // namespace perigee
