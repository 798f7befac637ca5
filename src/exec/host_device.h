// The host as a rank's device, with the CPU backend's ops or the reference's: each phase is complete when it returns.
#pragma once

#include "exec/rank_device.h"

namespace perigee {

// Devices: kCpu, kRef. kBadInput: a cache beyond the memory that this process may have.
Result<std::unique_ptr<RankDevice>> make_host_device(const RankConfig& config);

}  // namespace perigee
