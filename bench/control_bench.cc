// control_bench: host time of the brain, in µs a step.
//
// Rows: steady decode with two plans in flight (next_plan + apply + take_updates), which is on the critical path of
// each step; and admission of a long cached prompt. Prints the median and the 99th percentile.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "control/scheduler.h"

namespace {
int64_t g_num_allocations = 0;
}  // namespace

// Counts what the step path allocates.
void* operator new(size_t size) {
  ++g_num_allocations;
  if (void* memory = std::malloc(size)) return memory;
  std::abort();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace perigee {
namespace {

using BenchClock = std::chrono::steady_clock;

double microseconds_since(BenchClock::time_point start) {
  return std::chrono::duration<double, std::micro>(BenchClock::now() - start).count();
}

double percentile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(fraction * static_cast<double>(values.size() - 1))];
}

void fill_result(const StepPlan& plan, StepResult& result) {
  result.step = plan.step;
  result.rows.resize(plan.rows.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    result.rows[i].slot = plan.rows[i].slot;
    result.rows[i].sequence = plan.rows[i].sequence;
    result.rows[i].ids = plan.rows[i].samples() ? RowIds{7} : RowIds{};
    result.rows[i].checkpoints.clear();
    for (const CheckpointWrite& write : plan.checkpoints)
      if (write.slot == plan.rows[i].slot) result.rows[i].checkpoints.push_back(write.boundary());
  }
}

Submit make_submit(int64_t id, int32_t num_prompt, int32_t first_token, int32_t max_tokens) {
  auto prompt = std::make_shared<std::vector<int32_t>>();
  for (int32_t i = 0; i < num_prompt; ++i) prompt->push_back(first_token + i);
  auto sampling = std::make_shared<SamplingParams>();
  sampling->max_tokens = max_tokens;
  sampling->stop_ids = {1, 2, 3};
  Submit submit;
  submit.sequence = SequenceId(id);
  submit.prompt = std::move(prompt);
  submit.sampling = std::move(sampling);
  submit.arrival_s = static_cast<double>(id);
  return submit;
}

SchedulerConfig bench_config() {
  SchedulerConfig config;
  config.num_pages = 32768;
  config.max_sequences = 128;
  config.max_step_tokens = 8192;
  config.max_model_len = 262144;
  return config;
}

void bench_decode(int32_t num_sequences, int32_t num_prompt, int32_t state_pages) {
  constexpr int kWarmup = 200, kSteps = 4000;
  SchedulerConfig config = bench_config();
  config.state_pages = state_pages;
  Scheduler scheduler(config);
  for (int32_t i = 0; i < num_sequences; ++i) scheduler.submit(make_submit(i, num_prompt, i * 100, kSteps + 1000));
  StepResult result;
  while (scheduler.gauges().waiting > 0) {
    fill_result(*scheduler.next_plan(0), result);
    scheduler.apply(result);
  }
  StepPlan in_flight = *scheduler.next_plan(0);
  std::vector<double> times;
  std::vector<SequenceUpdate> updates;
  int64_t num_allocations = 0;
  for (int step = 0; step < kWarmup + kSteps; ++step) {
    fill_result(in_flight, result);
    const int64_t allocations_before = g_num_allocations;
    const auto start = BenchClock::now();
    std::optional<StepPlan> next = scheduler.next_plan(0);
    scheduler.apply(result);
    scheduler.take_updates(updates);
    scheduler.give_back(std::move(in_flight));
    const double time = microseconds_since(start);
    if (step >= kWarmup) {
      times.push_back(time);
      num_allocations += g_num_allocations - allocations_before;
    }
    in_flight = std::move(*next);
  }
  std::printf(
      "decode, %3d sequences, %6d tokens of context, states of %2d pages: median %6.2f us, mean %6.2f us, "
      "p99 %6.2f us, %.1f allocations a step\n",
      num_sequences, num_prompt, state_pages, percentile(times, 0.5),
      std::accumulate(times.begin(), times.end(), 0.0) / kSteps, percentile(times, 0.99),
      static_cast<double>(num_allocations) / kSteps);
}

void bench_admission(int32_t num_prompt) {
  Scheduler scheduler(bench_config());
  StepResult result;
  std::vector<double> times;
  for (int64_t i = 0; i < 20; ++i) {
    scheduler.submit(make_submit(i, num_prompt, 0, 1));
    const auto start = BenchClock::now();
    std::optional<StepPlan> plan = scheduler.next_plan(0);
    if (i > 0) times.push_back(microseconds_since(start));
    for (; plan; plan = scheduler.next_plan(0)) {
      fill_result(*plan, result);
      scheduler.apply(result);
    }
  }
  std::printf("admission of a cached prompt of %6d tokens: median %6.1f us\n", num_prompt, percentile(times, 0.5));
}

// The books of an idle engine, all of whose pages are cached.
void bench_checks(int32_t num_pages) {
  SchedulerConfig config = bench_config();
  config.num_pages = num_pages;
  config.max_model_len = 1 << 20;
  Scheduler scheduler(config);
  StepResult result;
  for (int64_t i = 0; scheduler.gauges().free_pages > 5000; ++i) {
    scheduler.submit(make_submit(i, 250000, static_cast<int32_t>(i) * 300000, 1));
    for (std::optional<StepPlan> plan = scheduler.next_plan(0); plan; plan = scheduler.next_plan(0)) {
      fill_result(*plan, result);
      scheduler.apply(result);
    }
  }
  std::vector<double> all, some;
  for (int i = 0; i < 50; ++i) {
    auto start = BenchClock::now();
    scheduler.check_integrity();
    all.push_back(microseconds_since(start));
    start = BenchClock::now();
    scheduler.check_some(2048);
    some.push_back(microseconds_since(start));
  }
  std::printf("checking %6d pages: median %6.1f us for all, %5.1f us for 2,048 of them\n", num_pages,
              percentile(all, 0.5), percentile(some, 0.5));
}

}  // namespace
}  // namespace perigee

int main() {
  for (const int32_t num_sequences : {1, 8, 64, 128}) perigee::bench_decode(num_sequences, 1000, 0);
  perigee::bench_decode(64, 16000, 0);
  for (const int32_t state_pages : {12, 92}) perigee::bench_decode(64, 1000, state_pages);  // Kimi-Linear at TP 8 and 1
  for (const int32_t num_prompt : {1000, 10000, 100000}) perigee::bench_admission(num_prompt);
  for (const int32_t num_pages : {32768, 250000}) perigee::bench_checks(num_pages);
  return 0;
}
