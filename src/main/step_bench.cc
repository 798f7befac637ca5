#include "main/step_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "main/engine_flags.h"
#include "main/load.h"
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

// Of each rank.
using Recorders = std::vector<std::unique_ptr<StepRecorder>>;

void set_mode(const Recorders& recorders, StepRecorder::Mode mode) {
  for (const auto& recorder : recorders) recorder->set_mode(mode);
}

// Clocks around the ops of a few steps; the tables are of their mean.
Status trace_host(StepDriver& driver, const Recorders& recorders, StepMeasurement& out) {
  set_mode(recorders, StepRecorder::Mode::kTimes);
  ASSIGN_OR_RETURN(const std::vector<double> seconds, driver.run(kTracedSteps));
  set_mode(recorders, StepRecorder::Mode::kOff);
  for (const auto& recorder : recorders) {
    out.traced_us.push_back(sum(seconds) / kTracedSteps * 1e6);
    out.tables.push_back(make_step_table(recorder->costs(), recorder->mean_pieces(driver.last_result_s())));
  }
  return {};
}

std::vector<DeviceActivity> of_gpu(const std::vector<DeviceActivity>& all, int32_t gpu) {
  std::vector<DeviceActivity> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out), [gpu](const auto& one) { return one.gpu == gpu; });
  return out;
}

using Steps = std::vector<std::vector<DeviceActivity>>;

// The first step has none before it.
double step_us(const Steps& steps, size_t i) {
  return static_cast<double>(steps[i].back().end_ns - steps[i - 1].back().end_ns) * 1e-3;
}

// Which step is of median length.
size_t median_step(const Steps& steps) {
  std::vector<std::pair<double, size_t>> lengths;
  for (size_t i = 1; i < steps.size(); ++i) lengths.emplace_back(step_us(steps, i), i);
  const auto middle = lengths.begin() + std::ssize(lengths) / 2;
  std::nth_element(lengths.begin(), middle, lengths.end());
  return middle->second;
}

// A step without graphs tells which op made each launch.
std::vector<StepPiece> place(const Steps& steps, size_t chosen, const std::vector<DeviceActivity>& example,
                             const StepRecorder& recorder) {
  std::vector<LaunchPlace> places;
  for (const DeviceActivity& activity : example) places.push_back(recorder.marked(activity.mark));
  return place_step(steps[chosen], steps[chosen - 1].back().end_ns, example, places);
}

// Rank r runs on GPU r.
Status trace_device(StepDriver& driver, const Recorders& recorders, ActivityTrace& trace, StepMeasurement& out) {
  for (const auto& recorder : recorders) recorder->set_mode(StepRecorder::Mode::kMarks, &trace);
  RETURN_IF_ERROR(trace.start(true));
  RETURN_IF_ERROR(run_steps(driver, 2, true));
  ASSIGN_OR_RETURN(const std::vector<DeviceActivity> example, trace.stop());
  set_mode(recorders, StepRecorder::Mode::kOff);
  RETURN_IF_ERROR(trace.start(false));
  RETURN_IF_ERROR(run_steps(driver, kTracedSteps));
  ASSIGN_OR_RETURN(const std::vector<DeviceActivity> activities, trace.stop());
  size_t chosen = 0;  // of steps as they are served, the one that takes the first rank median time
  std::vector<std::vector<StepPiece>> pieces;
  for (size_t r = 0; r < recorders.size(); ++r) {
    const auto gpu = static_cast<int32_t>(r);
    const Steps steps = split_steps(of_gpu(activities, gpu));
    if (r == 0 && steps.size() > 1) chosen = median_step(steps);
    if (chosen == 0 || chosen >= steps.size())
      return Error(Code::kUnavailable,
                   fmt::format("the trace of GPU {} has {} records in {} steps: too few for a table", r,
                               activities.size(), steps.size()),
                   "trace");
    out.traced_us.push_back(step_us(steps, chosen));
    const Steps examples = split_steps(of_gpu(example, gpu));  // the first lacks the drafts that end in the next
    if (examples.size() < 2) return Error(Code::kUnavailable, "the trace has no whole step outside of graphs", "trace");
    pieces.push_back(place(steps, chosen, examples[1], *recorders[r]));
  }
  split_waits(pieces);
  for (size_t r = 0; r < recorders.size(); ++r) out.tables.push_back(make_step_table(recorders[r]->costs(), pieces[r]));
  return {};
}

const char* routing_name(bool uniform) {
  return uniform ? "uniform" : "model";
}

void print(const StepMeasurement& m, const StepLimits& limits) {
  const Summary step = summarise(m.step_us);
  fmt::print("median step {:.1f} us (mean {:.1f}, p99 {:.1f}, of {}), {:.1f} tok/s\n", step.median, step.mean, step.p99,
             m.step_us.size(), m.step_tokens / step.median * 1e6);
  if (m.row_tokens > 1) fmt::print("{:.2f} tokens kept of a row\n", m.row_tokens);
  if (m.moe_layers > 0)
    fmt::print("distinct experts: {} in {} layers, {:.1f} of {} a layer, {} routing\n", m.distinct_experts,
               m.moe_layers, static_cast<double>(m.distinct_experts) / static_cast<double>(m.moe_layers), m.num_experts,
               routing_name(m.uniform_routing));
  for (size_t r = 0; r < m.tables.size(); ++r) {
    const double sum_us = m.tables[r].sum_us(), traced_us = m.traced_us[r];
    fmt::print(
        "\n{}{}\nThe rows add up to {:.1f} us; the traced step took {:.1f} us ({:+.1f} %), untraced ones {:.1f} us "
        "({:+.1f} "
        "%).\n",
        m.tables.size() > 1 ? fmt::format("Rank {}:\n\n", r) : "", print_step_table(m.tables[r], limits), sum_us,
        traced_us, 100 * (sum_us / traced_us - 1), step.median, 100 * (sum_us / step.median - 1));
  }
}

Json to_json(const StepMeasurement& m, const StepLimits& limits) {
  const Summary step = summarise(m.step_us);
  Json out;
  out.set("median_us", step.median);
  out.set("mean_us", step.mean);
  out.set("p99_us", step.p99);
  out.set("tokens_per_s", m.step_tokens / step.median * 1e6);
  if (m.row_tokens > 0) out.set("tokens_per_row", m.row_tokens);
  out.set("moe_layers", m.moe_layers);
  out.set("distinct_experts", m.distinct_experts);
  out.set("num_experts", m.num_experts);
  out.set("routing", routing_name(m.uniform_routing));
  if (m.tables.empty()) return out;
  out.set("traced_us", m.traced_us[0]);
  out.set("table", step_table_json(m.tables[0], limits));
  if (m.tables.size() == 1) return out;
  Json::Array ranks;
  for (const StepTable& table : m.tables) ranks.push_back(step_table_json(table, limits));
  out.set("rank_tables", std::move(ranks));
  return out;
}

struct StepFlags {
  EngineFlags engine;
  StepRequest request;
  double limit_gbs = 4540, limit_tflops = 790;
  std::string result_path;
};

void add_step_flags(CommandLine& flags, StepFlags& to) {
  StepShape& shape = to.request.shape;
  flags.group("Measurement");
  flags.add("--batch", shape.batch, Whole{1, 1 << 16}, "sequences of the step");
  flags.add("--context", shape.context, Whole{1, 1 << 24},
            "tokens: before the step (decode), or computed by it (prefill), of each");
  flags.add("--form", shape.prefill, OneOf<bool>{{{"decode", false}, {"prefill", true}}},
            "decode: one token of each sequence; prefill: whole prompts in one step");
  flags.add("--routing", to.engine.config.rank.load.uniform_routing, OneOf<bool>{{{"model", false}, {"uniform", true}}},
            "experts of a token: the model's choice (made-up weights send most tokens to the same few), or uniform: "
            "drawn at random for each token");
  flags.add("--temperature", shape.temperature, Number{0, 100},
            "of sampling; with made-up weights greedy sequences may come to look alike");
  flags.add("--steps", to.request.steps, Whole{1, 1 << 20}, "steps measured; the median counts");
  flags.add("--warm-steps", to.request.warm_steps, Whole{1, 1 << 20}, "steps before those");
  flags.add_switch("--trace", to.request.trace, "also a table of one step by op (on a GPU: by kernel, with CUPTI)");
  flags.add("--limit-gbs", to.limit_gbs, Number{1, 1e6},
            "memory limit in GB/s for % of limit on a GPU (the default: reads of an H200)");
  flags.add("--limit-tflops", to.limit_tflops, Number{0.001, 1e6},
            "compute limit in TFLOP/s, likewise (bf16 products of an H200)");
  add_result_flag(flags, to.result_path);
}

}  // namespace

Result<StepMeasurement> measure_steps(RankConfig config, const StepRequest& request) {
  const bool device = config.device == Device::kCuda;
  std::unique_ptr<ActivityTrace> trace;
  if (device && request.trace) {
    ASSIGN_OR_RETURN(trace, ActivityTrace::create());
  }
  Recorders recorders;
  std::vector<OpObserver*> observers;
  for (int32_t r = 0; r < config.size; ++r)
    observers.push_back(recorders.emplace_back(std::make_unique<StepRecorder>()).get());
  const bool drafts = config.limits.num_drafts > 0;
  StepShape shape = request.shape;
  shape.max_steps = request.warm_steps + request.steps + 2 * kTracedSteps + 4;
  ASSIGN_OR_RETURN(const std::unique_ptr<StepDriver> driver, StepDriver::create(config, shape, std::move(observers)));

  StepMeasurement out{.uniform_routing = config.load.uniform_routing};
  RETURN_IF_ERROR(run_steps(*driver, request.warm_steps));
  ASSIGN_OR_RETURN(std::vector<double> seconds, driver->run(request.steps + 1));
  out.step_tokens = static_cast<double>(driver->run_tokens()) / (request.steps + 1);
  out.row_tokens = shape.prefill ? 0 : out.step_tokens / shape.batch;
  for (size_t i = 1; i < seconds.size(); ++i) out.step_us.push_back(seconds[i] * 1e6);  // the first fills the pipeline
  set_mode(recorders, StepRecorder::Mode::kCosts);
  RETURN_IF_ERROR(run_steps(*driver, drafts ? kTracedSteps : 1, device));
  set_mode(recorders, StepRecorder::Mode::kOff);
  count_experts(recorders[0]->costs(), out);
  if (request.trace)
    RETURN_IF_ERROR(device ? trace_device(*driver, recorders, *trace, out) : trace_host(*driver, recorders, out));
  return out;
}

Result<int> bench_step(const std::vector<std::string>& words) {
  CommandLine flags("perigee bench step",
                    "The time of a model's step, without a server, and with --trace where it goes.");
  StepFlags read;
  add_engine_flags(flags, read.engine);
  add_step_flags(flags, read);
  RETURN_IF_ERROR(flags.parse(words));
  RETURN_IF_ERROR(check_result_file(read.result_path));
  ASSIGN_OR_RETURN(const EngineConfig config, settle(flags, std::move(read.engine)));
  StepLimits limits;
  if (config.rank.device == Device::kCuda)
    limits = {.bytes_per_s = read.limit_gbs * 1e9, .flops_per_s = read.limit_tflops * 1e12};
  ASSIGN_OR_RETURN(const StepMeasurement measured, measure_steps(config.rank, read.request));
  const StepShape& shape = read.request.shape;
  constexpr const char* kDevices[] = {"cpu", "ref", "cuda"};  // as Device has them
  fmt::print("{}, {}, {}, batch {}, context {}\n", config.rank.load.path,
             kDevices[static_cast<int>(config.rank.device)], shape.prefill ? "prefill" : "decode", shape.batch,
             shape.context);
  print(measured, limits);
  RETURN_IF_ERROR(save_result(read.result_path, to_json(measured, limits)));
  return 0;
}

}  // namespace perigee
