// The memory limit of the control groups that this process is in: what a container or a service manager allows.
#pragma once

#include <cstdint>
#include <string>

namespace perigee {

// The lowest limit of the process's group and the groups above it, of cgroup v2 (memory.max) and v1
// (memory.limit_in_bytes); INT64_MAX where there is none, or none that can be read. `root` is put before /proc and
// /sys.
int64_t cgroup_memory_bytes(const std::string& root = "");

}  // namespace perigee
