// The limits of the control groups that this process is in: what a container or a service manager allows.
//
// Each is the lowest of the process's group and the groups above it, of cgroup v2 and v1; INT64_MAX where there is
// none, or none that can be read. `root` is put before /proc and /sys.
#pragma once

#include <cstdint>
#include <string>

namespace perigee {

int64_t cgroup_memory_bytes(const std::string& root = "");  // memory.max; v1: memory.limit_in_bytes

// Whole cores of cpu.max (v1: cpu.cfs_quota_us), at least 1: a thread more would stand still for a part of each period.
int64_t cgroup_cores(const std::string& root = "");

// Cores that threads of this process can use at once: of the machine, of its affinity mask, and of its groups.
int available_cores();

}  // namespace perigee
