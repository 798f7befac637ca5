#include "main/result_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>

namespace perigee {
namespace {

constexpr const char* kOption = "save-result";

Error not_written(const std::string& path) {
  return bad_input(str_cat("--", kOption, " ", path, " cannot be written: ", std::strerror(errno)), kOption);
}

}  // namespace

void add_result_option(Options& options, const std::string& group) {
  options.add(kOption, "", "write the figures as JSON to this file", group);
}

Status check_result_file(const Options& options) {
  const std::string& path = options.text(kOption);
  if (!path.empty() && !std::ofstream(path, std::ios::app)) return not_written(path);
  return {};
}

Status save_result(const Options& options, const Json& figures) {
  const std::string& path = options.text(kOption);
  if (path.empty()) return {};
  std::ofstream file(path);
  file << dump_json(figures, JsonStyle::kSpaced) << "\n";
  file.close();
  if (!file) return not_written(path);
  return {};
}

}  // namespace perigee
