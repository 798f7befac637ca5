#include "base/cgroup.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

namespace perigee {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// A controller's name, and its limit as the files of one group's folder say it.
struct Controller {
  std::string name;
  int64_t (*v2)(const fs::path& folder);
  int64_t (*v1)(const fs::path& folder);
};

std::string first_line(const fs::path& file) {
  std::string line;
  std::getline(std::ifstream(file), line);
  return line;
}

// "max", or anything else that is not a positive number, means no limit.
int64_t parse_limit(const std::string& text) {
  const bool digits = !text.empty() && text.size() <= 19 &&
                      std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  const uint64_t value = digits ? std::stoull(text) : 0;
  return value > 0 && value <= static_cast<uint64_t>(kNone) ? static_cast<int64_t>(value) : kNone;
}

int64_t whole_cores(const std::string& quota, const std::string& period) {
  const int64_t quota_us = parse_limit(quota), period_us = parse_limit(period);
  return quota_us == kNone || period_us == kNone ? kNone : std::max<int64_t>(1, quota_us / period_us);
}

const Controller kMemory{
    .name = "memory",
    .v2 = [](const fs::path& folder) { return parse_limit(first_line(folder / "memory.max")); },
    .v1 = [](const fs::path& folder) { return parse_limit(first_line(folder / "memory.limit_in_bytes")); },
};

const Controller kCpu{
    .name = "cpu",
    .v2 =
        [](const fs::path& folder) {
          const std::string line = first_line(folder / "cpu.max");  // "QUOTA PERIOD", in microseconds
          const size_t space = line.find(' ');
          return space == std::string::npos ? kNone : whole_cores(line.substr(0, space), line.substr(space + 1));
        },
    .v1 =
        [](const fs::path& folder) {
          return whole_cores(first_line(folder / "cpu.cfs_quota_us"), first_line(folder / "cpu.cfs_period_us"));
        },
};

// Of `group` and those above it. A container may see its own group as the top, under whatever name the host has for it:
// folders that are not there are passed over.
int64_t lowest_limit(const fs::path& top, const std::string& group, int64_t (*limit)(const fs::path& folder)) {
  int64_t lowest = limit(top);
  for (fs::path at = fs::path(group).lexically_normal(); at.has_relative_path(); at = at.parent_path())
    lowest = std::min(lowest, limit(top / at.relative_path()));
  return lowest;
}

// Whether a list as "cpu,memory" has the name.
bool contains(const std::string& list, const std::string& name) {
  return ("," + list + ",").find("," + name + ",") != std::string::npos;
}

int64_t limit_of(const Controller& controller, const std::string& root) {
  const fs::path top = root + "/sys/fs/cgroup", top_v1 = top / controller.name;
  int64_t lowest = std::min(controller.v2(top), controller.v1(top_v1));
  // Lines "ID:CONTROLLERS:GROUP"; of v2 one with no controllers.
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (controllers.empty())
      lowest = std::min(lowest, lowest_limit(top, group, controller.v2));
    else if (contains(controllers, controller.name))
      lowest = std::min(lowest, lowest_limit(top_v1, group, controller.v1));
  }
  return lowest;
}

}  // namespace

int64_t cgroup_memory_bytes(const std::string& root) {
  return limit_of(kMemory, root);
}

int64_t cgroup_cores(const std::string& root) {
  return limit_of(kCpu, root);
}

int available_cores() {
  const auto cores = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));  // of the affinity mask
  return static_cast<int>(std::min(cores, cgroup_cores()));
}

}  // namespace perigee
