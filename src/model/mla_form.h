// Which form of latent attention serves a sequence (DESIGN D3): a pure choice of speed, equal in exact arithmetic.
#pragma once

#include <cstdint>

#include "ops/batch.h"
#include "ops/weights.h"

namespace perigee {

// n new tokens after `context` cached ones. Expanding costs 2 L (dn + dv) flops for each cached token and head, once;
// it then saves 2 (2 L + dr) - 2 (dn + dr + dv) flops for each (query, key) pair. New tokens cost the same in both
// forms: one up-projection each. One token, or a deterministic run, is always absorbed.
MlaForm choose_mla_form(const MlaShape& shape, int64_t new_tokens, int64_t context, bool deterministic);

}  // namespace perigee
