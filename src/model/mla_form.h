// Which form of latent attention serves a sequence (DESIGN D3): a pure choice of speed, equal in exact arithmetic.
#pragma once

#include <cstdint>

#include "ops/batch.h"
#include "ops/weights.h"

namespace perigee {

// Up to here the form follows from what a token is: prompts are expanded, outputs absorbed. So neither a prefix hit nor
// a preemption changes a bit, at the cost of expanding a short turn's cached context (ADR 0005).
inline constexpr int64_t kOneFormTokens = 2048;

// The form of a sequence that was admitted with `new_tokens` to compute (a prompt's, or outputs that a preemption threw
// away) after `context` cached ones; a decode row is always absorbed. Beyond kOneFormTokens the cheaper form: expanding
// costs 2 L (dn + dv) flops for each cached token and head, once; it then saves 2 (2 L + dr) - 2 (dn + dr + dv) flops
// for each (query, key) pair. New tokens cost the same in both forms: one up-projection each.
MlaForm choose_mla_form(const MlaShape& shape, TokenKind kind, int64_t new_tokens, int64_t context);

}  // namespace perigee
