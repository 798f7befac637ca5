// Latent attention of outputs where each rank of a group holds some heads and the whole cache: the sequences are dealt
// out, and each rank attends for its own with the heads of all ranks. So the ranks together read each cached row once,
// not once each. A row's result has the same bits either way. For backends on the host that implement mla_absorb,
// attend_latents and mla_project.
#pragma once

#include <optional>

#include "ops/ops.h"

namespace perigee {

// What mla_attend returns. Nothing if dealing would not pay: fewer sequences than ranks, one that is expanded, short
// contexts, or lengths that do not divide evenly. All ranks decide alike, and then no collective was called.
std::optional<Tensor> attend_dealt(Ops& ops, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape,
                                   const Batch& batch, const LatentLayer& cache);

}  // namespace perigee
