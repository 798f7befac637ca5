#include "main/step_bench.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "main/engine_options.h"
#include "main/load.h"
#include "main/options.h"
#include "main/result_file.h"
#include "profile/step_recorder.h"

namespace perigee {
namespace {

constexpr int32_t kTracedSteps = 8;

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

void count_experts(const std::vector<OpCost>& costs, StepMeasurement& out) {
  for (const OpCost& cost : costs) {
    if (cost.num_experts == 0) continue;
    ++out.moe_layers;
    out.distinct_experts += cost.distinct_experts;
    out.num_experts = cost.num_experts;
  }
}

Status run_steps(StepDriver& driver, int32_t count, bool eager = false) {
  const auto seconds = driver.run(count, eager);
  return seconds.ok() ? Status() : Status(seconds.error());
}

// Clocks around the ops of a few steps; the table is of their mean.
Status trace_host(StepDriver& driver, StepRecorder& recorder, StepMeasurement& out) {
  recorder.set_mode(StepRecorder::Mode::kTimes);
  ASSIGN_OR_RETURN(const std::vector<double> seconds, driver.run(kTracedSteps));
  recorder.set_mode(StepRecorder::Mode::kOff);
  out.traced_us = sum(seconds) / kTracedSteps * 1e6;
  out.table = make_step_table(recorder.costs(), recorder.mean_pieces(driver.last_result_s()));
  return {};
}

// One step outside of graphs says which launch is whose; of steps as they are served, the one of median length counts.
Status trace_device(StepDriver& driver, StepRecorder& recorder, ActivityTrace& trace, StepMeasurement& out) {
  recorder.set_mode(StepRecorder::Mode::kMarks, &trace);
  RETURN_IF_ERROR(trace.start(true));
  RETURN_IF_ERROR(run_steps(driver, 1, true));
  ASSIGN_OR_RETURN(const std::vector<DeviceActivity> example, trace.stop());
  recorder.set_mode(StepRecorder::Mode::kOff);
  std::vector<LaunchPlace> places;
  for (const DeviceActivity& activity : example) places.push_back(recorder.marked(activity.mark));

  RETURN_IF_ERROR(trace.start(false));
  RETURN_IF_ERROR(run_steps(driver, kTracedSteps));
  ASSIGN_OR_RETURN(const std::vector<DeviceActivity> activities, trace.stop());
  const std::vector<std::vector<DeviceActivity>> steps = split_steps(activities);
  std::vector<std::pair<double, size_t>> lengths;  // the first step has none before it
  for (size_t i = 1; i < steps.size(); ++i)
    lengths.emplace_back(static_cast<double>(steps[i].back().end_ns - steps[i - 1].back().end_ns) * 1e-3, i);
  if (lengths.empty())
    return Error(
        Code::kUnavailable,
        str_cat("the GPU trace has ", activities.size(), " records in ", steps.size(), " steps: too few for a table"),
        "trace");
  const auto middle = lengths.begin() + std::ssize(lengths) / 2;
  std::nth_element(lengths.begin(), middle, lengths.end());
  out.traced_us = middle->first;
  const size_t chosen = middle->second;
  out.table =
      make_step_table(recorder.costs(), place_step(steps[chosen], steps[chosen - 1].back().end_ns, example, places));
  return {};
}

void print(const StepMeasurement& m, const StepLimits& limits) {
  const Summary step = summarise(m.step_us);
  std::printf("median step %.1f us (mean %.1f, p99 %.1f, of %zu), %.1f tok/s\n", step.median, step.mean, step.p99,
              m.step_us.size(), m.step_tokens / step.median * 1e6);
  if (m.moe_layers > 0)
    std::printf("distinct experts: %lld in %lld layers, %.1f of %lld a layer\n",
                static_cast<long long>(m.distinct_experts), static_cast<long long>(m.moe_layers),
                static_cast<double>(m.distinct_experts) / static_cast<double>(m.moe_layers),
                static_cast<long long>(m.num_experts));
  if (m.table.groups.empty()) return;
  const double sum_us = m.table.sum_us();
  std::printf(
      "\n%s\nThe rows add up to %.1f us; the traced step took %.1f us (%+.1f %%), untraced ones %.1f us (%+.1f %%)."
      "\n",
      print_step_table(m.table, limits).c_str(), sum_us, m.traced_us, 100 * (sum_us / m.traced_us - 1), step.median,
      100 * (sum_us / step.median - 1));
}

Json to_json(const StepMeasurement& m, const StepLimits& limits) {
  const Summary step = summarise(m.step_us);
  Json out;
  out.set("median_us", step.median);
  out.set("mean_us", step.mean);
  out.set("p99_us", step.p99);
  out.set("tokens_per_s", m.step_tokens / step.median * 1e6);
  out.set("moe_layers", m.moe_layers);
  out.set("distinct_experts", m.distinct_experts);
  if (m.table.groups.empty()) return out;
  out.set("traced_us", m.traced_us);
  out.set("table", step_table_json(m.table, limits));
  return out;
}

Result<StepRequest> read_request(const Options& options) {
  StepRequest request;
  const std::string& form = options.text("form");
  if (form != "decode" && form != "prefill")
    return bad_input(str_cat("--form must be decode or prefill, not \"", form, "\""), "form");
  request.shape.prefill = form == "prefill";
  request.trace = options.enabled("trace");
  ASSIGN_OR_RETURN(const double temperature, options.number("temperature", 0, 100));
  request.shape.temperature = static_cast<float>(temperature);
  const auto read = [&](const char* name, int64_t high, int32_t& to) -> Status {
    ASSIGN_OR_RETURN(const int64_t value, options.integer(name, 1, high));
    to = static_cast<int32_t>(value);
    return {};
  };
  RETURN_IF_ERROR(read("batch", 1 << 16, request.shape.batch));
  RETURN_IF_ERROR(read("context", 1 << 24, request.shape.context));
  RETURN_IF_ERROR(read("steps", 1 << 20, request.steps));
  RETURN_IF_ERROR(read("warm-steps", 1 << 20, request.warm_steps));
  return request;
}

}  // namespace

Result<StepMeasurement> measure_steps(RankConfig config, const StepRequest& request) {
  const bool device = config.device == Device::kCuda;
  std::unique_ptr<ActivityTrace> trace;
  if (device && request.trace) {
    ASSIGN_OR_RETURN(trace, ActivityTrace::create());
  }
  StepRecorder recorder;
  config.observer = &recorder;
  StepShape shape = request.shape;
  shape.max_steps = request.warm_steps + request.steps + kTracedSteps + 2;
  ASSIGN_OR_RETURN(const std::unique_ptr<StepDriver> driver, StepDriver::create(config, shape));

  StepMeasurement out{.step_tokens = driver->step_tokens()};
  RETURN_IF_ERROR(run_steps(*driver, request.warm_steps));
  ASSIGN_OR_RETURN(std::vector<double> seconds, driver->run(request.steps + 1));
  for (size_t i = 1; i < seconds.size(); ++i) out.step_us.push_back(seconds[i] * 1e6);  // the first fills the pipeline
  recorder.set_mode(StepRecorder::Mode::kCosts);
  RETURN_IF_ERROR(run_steps(*driver, 1, device));
  recorder.set_mode(StepRecorder::Mode::kOff);
  count_experts(recorder.costs(), out);
  if (request.trace)
    RETURN_IF_ERROR(device ? trace_device(*driver, recorder, *trace, out) : trace_host(*driver, recorder, out));
  return out;
}

Result<int> bench_step(const std::vector<std::string>& arguments) {
  Options options("perigee bench step",
                  "The time of a model's step, without a server, and with --trace where it goes.");
  add_engine_options(options);
  const char* group = "Measurement";
  options.add("batch", "1", "sequences of the step", group);
  options.add("context", "1024", "tokens: before the step (decode), or computed by it (prefill), of each", group);
  options.add("form", "decode", "decode: one token of each sequence; prefill: whole prompts in one step", group);
  options.add("temperature", "0", "of sampling; with made-up weights greedy sequences may come to look alike", group);
  options.add("steps", "50", "steps measured; the median counts", group);
  options.add("warm-steps", "10", "steps before those", group);
  options.add_switch("trace", false, "also a table of one step by op (on a GPU: by kernel, with CUPTI)", group);
  options.add("limit-gbs", "4540", "memory limit in GB/s for % of limit on a GPU (the default: reads of an H200)",
              group);
  options.add("limit-tflops", "790", "compute limit in TFLOP/s, likewise (bf16 products of an H200)", group);
  add_result_option(options, group);
  RETURN_IF_ERROR(options.parse(arguments));
  RETURN_IF_ERROR(check_result_file(options));
  ASSIGN_OR_RETURN(const StepRequest request, read_request(options));
  ASSIGN_OR_RETURN(const EngineConfig config, engine_config(options));
  const RankConfig& rank = config.rank;
  StepLimits limits;
  if (rank.device == Device::kCuda) {
    ASSIGN_OR_RETURN(limits.bytes_per_s, options.number("limit-gbs", 1, 1e6));
    ASSIGN_OR_RETURN(limits.flops_per_s, options.number("limit-tflops", 0.001, 1e6));
    limits.bytes_per_s *= 1e9;
    limits.flops_per_s *= 1e12;
  }
  ASSIGN_OR_RETURN(const StepMeasurement measured, measure_steps(rank, request));
  std::printf("%s, %s, %s, batch %d, context %d\n", options.text("model").c_str(), options.text("device").c_str(),
              options.text("form").c_str(), request.shape.batch, request.shape.context);
  print(measured, limits);
  RETURN_IF_ERROR(save_result(options, to_json(measured, limits)));
  return 0;
}

}  // namespace perigee
