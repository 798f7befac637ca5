// `perigee bench context MODEL [flags]`: the time of a decode step by batch and context, in this process, by graphs and
// without; with --decode-context-parallel-size what sharing the cache costs and saves.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "exec/rank_config.h"

namespace perigee {

// Medians in microseconds; or why there are none.
struct ContextCell {
  int32_t batch = 0, context = 0;
  double step_us = 0, eager_us = 0;
  std::string why_none = {};
};

struct ContextRequest {
  std::vector<int64_t> batches = {1, 8, 32}, contexts = {8192, 32768, 131072};
  int32_t warm_steps = 5, steps = 30;
  std::function<void(const ContextCell&)> on_cell = {};  // called after each
};

// What caches hold is not computed. Errors: those of the ranks; a batch or context that does not fit is a cell's.
Result<std::vector<ContextCell>> measure_contexts(RankConfig config, const ContextRequest& request);

// The command; returns the exit code.
Result<int> bench_context(const std::vector<std::string>& arguments);

}  // namespace perigee
