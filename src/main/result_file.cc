#include "main/result_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace perigee {
namespace {

Error not_written(const std::string& path, const char* flag) {
  return bad_input(fmt::format("--{} {} cannot be written: {}", flag, path, std::strerror(errno)), flag);
}

}  // namespace

void add_result_flag(CommandLine& flags, std::string& path) {
  flags.add("--save-result", path, "write the figures as JSON to this file");
}

Status check_result_file(const std::string& path, const char* flag) {
  if (!path.empty() && !std::ofstream(path, std::ios::app)) return not_written(path, flag);
  return {};
}

Status save_result(const std::string& path, const Json& figures, const char* flag) {
  if (path.empty()) return {};
  std::ofstream file(path);
  file << dump_json(figures, JsonStyle::kSpaced) << "\n";
  file.close();
  if (!file) return not_written(path, flag);
  return {};
}

}  // namespace perigee
