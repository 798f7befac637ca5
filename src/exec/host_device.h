// The host as a rank's device, with the CPU backend's ops or the reference's: each phase is complete when it returns.
#pragma once

#include "exec/rank_device.h"

namespace perigee {

// Devices: kCpu, kRef. kBadInput: a cache beyond the memory that this process may have.
Result<std::unique_ptr<RankDevice>> make_host_device(const RankConfig& config);

// The parts of such a rank that has loaded nothing; see size_parts().
Result<RankParts> size_host_parts(const RankConfig& config);

// What this process may have: the machine's memory, or less where a container or a shell says so.
int64_t host_memory_bytes();

}  // namespace perigee
