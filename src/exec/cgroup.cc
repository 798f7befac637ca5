#include "exec/cgroup.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <limits>

namespace perigee {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// "max" and whatever else is no positive number of bytes is no limit.
int64_t read_limit(const fs::path& file) {
  std::string line;
  if (!std::getline(std::ifstream(file), line)) return kNone;
  int64_t bytes = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), bytes);
  return error == std::errc() && end == line.data() + line.size() && bytes > 0 ? bytes : kNone;
}

// Of `group` and those above it. A container may see its own group as the top, under whatever name the host has for it:
// folders that are not there are passed over.
int64_t lowest_limit(const fs::path& top, const std::string& group, const char* file) {
  int64_t lowest = kNone;
  for (fs::path at = fs::path(group).lexically_normal(); at.has_relative_path(); at = at.parent_path())
    lowest = std::min(lowest, read_limit(top / at.relative_path() / file));
  return std::min(lowest, read_limit(top / file));
}

// Whether a list as "cpu,memory" has the memory controller.
bool has_memory(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

}  // namespace

int64_t cgroup_memory_bytes(const std::string& root) {
  const fs::path top = root + "/sys/fs/cgroup";
  int64_t lowest =
      std::min(lowest_limit(top, "/", "memory.max"), lowest_limit(top / "memory", "/", "memory.limit_in_bytes"));
  // Lines "ID:CONTROLLERS:GROUP"; of v2 one with no controllers.
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (controllers.empty())
      lowest = std::min(lowest, lowest_limit(top, group, "memory.max"));
    else if (has_memory(controllers))
      lowest = std::min(lowest, lowest_limit(top / "memory", group, "memory.limit_in_bytes"));
  }
  return lowest;
}

}  // namespace perigee
