#include "main/result_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace perigee {
namespace {

Error not_written(const std::string& path) {
  return bad_input(fmt::format("--save-result {} cannot be written: {}", path, std::strerror(errno)), "save-result");
}

}  // namespace

void add_result_flag(CommandLine& flags, std::string& path) {
  flags.add("--save-result", path, "write the figures as JSON to this file");
}

Status check_result_file(const std::string& path) {
  if (!path.empty() && !std::ofstream(path, std::ios::app)) return not_written(path);
  return {};
}

Status save_result(const std::string& path, const Json& figures) {
  if (path.empty()) return {};
  std::ofstream file(path);
  file << dump_json(figures, JsonStyle::kSpaced) << "\n";
  file.close();
  if (!file) return not_written(path);
  return {};
}

}  // namespace perigee
