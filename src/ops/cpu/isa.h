// Which instruction set the CPU backend runs on, found once at start.
#pragma once

#include <optional>

#include "base/result.h"
#include "ops/ops.h"

namespace perigee {

// The wanted one, or without a wish the best one that processor and kernel have. Unavailable where they lack it. Asks
// Linux for permission to use AMX tile data (arch_prctl), which holds for all threads of the process.
Result<Isa> detect_isa(std::optional<Isa> wanted = {});

}  // namespace perigee
