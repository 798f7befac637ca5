// Results as JSON in a file that a flag names: --save-result of the benchmarks, --output of calibrate.
#pragma once

#include <string>

#include "base/json.h"
#include "base/result.h"
#include "main/command_line.h"

namespace perigee {

void add_result_flag(CommandLine& flags, std::string& path);

// Whether the file, if one is asked for, can be written: to be known before minutes are measured. Leaves what it holds.
Status check_result_file(const std::string& path, const char* flag = "save-result");

// Nothing where no file is asked for.
Status save_result(const std::string& path, const Json& figures, const char* flag = "save-result");

}  // namespace perigee
