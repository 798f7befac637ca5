#include "main/context_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "main/engine_flags.h"
#include "main/result_file.h"
#include "profile/step_driver.h"

namespace perigee {
namespace {

Result<double> median_us(StepDriver& driver, const ContextRequest& request, bool eager) {
  ASSIGN_OR_RETURN(const std::vector<double> warm, driver.run(request.warm_steps, eager));
  ASSIGN_OR_RETURN(std::vector<double> seconds, driver.run(request.steps + 1, eager));
  const auto middle = seconds.begin() + 1 + request.steps / 2;  // the first fills the pipeline
  std::nth_element(seconds.begin() + 1, middle, seconds.end());
  return *middle * 1e6;
}

Status measure(StepDriver& driver, const ContextRequest& request, ContextCell& cell) {
  if (const Status status = driver.restart(cell.batch, cell.context); !status.ok()) {
    if (status.error().code != Code::kBadInput) return status.error();
    cell.why_none = status.error().message;
    return {};
  }
  ASSIGN_OR_RETURN(cell.step_us, median_us(driver, request, false));
  ASSIGN_OR_RETURN(cell.eager_us, median_us(driver, request, true));
  return {};
}

// At once, so that who reads the table knows when a cell has been measured.
void print(const ContextCell& cell) {
  if (cell.why_none.empty())
    fmt::print("| {} | {} | {:.1f} | {:.1f} |\n", cell.batch, cell.context, cell.step_us, cell.eager_us);
  else
    fmt::print("| {} | {} | - | {} |\n", cell.batch, cell.context, cell.why_none);
  std::fflush(stdout);
}

Json to_json(const std::vector<ContextCell>& cells) {
  Json::Array rows;
  for (const ContextCell& cell : cells) {
    Json row;
    row.set("batch", cell.batch);
    row.set("context", cell.context);
    if (cell.why_none.empty()) {
      row.set("step_us", cell.step_us);
      row.set("eager_us", cell.eager_us);
    } else {
      row.set("why_none", cell.why_none);
    }
    rows.push_back(std::move(row));
  }
  Json out;
  out.set("cells", std::move(rows));
  return out;
}

}  // namespace

Result<std::vector<ContextCell>> measure_contexts(RankConfig config, const ContextRequest& request) {
  const StepShape shape{.batch = static_cast<int32_t>(std::ranges::max(request.batches)),
                        .context = 1,
                        .max_steps = 2 * (request.warm_steps + request.steps + 2)};
  ASSIGN_OR_RETURN(const std::unique_ptr<StepDriver> driver, StepDriver::create(std::move(config), shape));
  std::vector<ContextCell> cells;
  for (const int64_t batch : request.batches)
    for (const int64_t context : request.contexts) {
      ContextCell& cell = cells.emplace_back(
          ContextCell{.batch = static_cast<int32_t>(batch), .context = static_cast<int32_t>(context)});
      RETURN_IF_ERROR(measure(*driver, request, cell));
      if (request.on_cell) request.on_cell(cell);
    }
  return cells;
}

Result<int> bench_context(const std::vector<std::string>& words) {
  CommandLine flags("perigee bench context",
                    "The time of a decode step by batch and context, without a server. Caches are taken as filled.");
  EngineFlags engine;
  ContextRequest request;
  std::string result_path;
  add_engine_flags(flags, engine);
  flags.group("Measurement");
  flags.add("--batches", request.batches, Counts(), "sequences of a step");
  flags.add("--contexts", request.contexts, Counts(), "tokens of each sequence before the step");
  flags.add("--routing", engine.config.rank.load.uniform_routing, OneOf<bool>{{{"model", false}, {"uniform", true}}},
            "experts of a token: the model's choice, or drawn at random for each token");
  flags.add("--steps", request.steps, Whole{1, 1 << 20}, "steps measured in each cell; the median counts");
  flags.add("--warm-steps", request.warm_steps, Whole{1, 1 << 20}, "steps before those");
  add_result_flag(flags, result_path);
  RETURN_IF_ERROR(flags.parse(words));
  RETURN_IF_ERROR(check_result_file(result_path));
  ASSIGN_OR_RETURN(const EngineConfig config, settle(flags, std::move(engine)));
  fmt::print("| batch | context | step, us | without graphs, us |\n|---|---|---|---|\n");
  request.on_cell = print;
  ASSIGN_OR_RETURN(const std::vector<ContextCell> cells, measure_contexts(config.rank, request));
  RETURN_IF_ERROR(save_result(result_path, to_json(cells)));
  return 0;
}

}  // namespace perigee
