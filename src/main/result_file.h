// --save-result of the benchmarks: figures as JSON in a file.
#pragma once

#include "base/json.h"
#include "main/options.h"

namespace perigee {

void add_result_option(Options& options, const std::string& group = "General");

// Whether the file, if one is asked for, can be written: to be known before minutes are measured. Leaves what it holds.
Status check_result_file(const Options& options);

// Nothing without --save-result.
Status save_result(const Options& options, const Json& figures);

}  // namespace perigee
