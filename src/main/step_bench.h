// `perigee bench step MODEL [flags]`: the time of one step of a model, in this process, and where it goes.
#pragma once

#include <string>
#include <vector>

#include "exec/rank_config.h"
#include "profile/step_driver.h"
#include "profile/step_table.h"

namespace perigee {

struct StepMeasurement {
  std::vector<double> step_us;  // untraced, in order
  double step_tokens = 0;       // of one, on average: those of prompts, or the ids that decode rows kept
  double row_tokens = 0;        // decode: of one row; more than 1 where drafts were accepted
  bool uniform_routing = false;
  int64_t moe_layers = 0, distinct_experts = 0, num_experts = 0;  // of one step on rank 0; num_experts of a layer
  std::vector<StepTable> tables;                                  // of each rank; none unless traced
  std::vector<double> traced_us;  // of each table its step, by the rank's results (host) or the device's clock
};

struct StepRequest {
  StepShape shape;
  int32_t warm_steps = 10, steps = 50;
  bool trace = false;
};

Result<StepMeasurement> measure_steps(RankConfig config, const StepRequest& request);

// The command; returns the exit code.
Result<int> bench_step(const std::vector<std::string>& arguments);

}  // namespace perigee
