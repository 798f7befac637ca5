// admission_bench: how many pages an admission should leave to those that run. Prints Markdown (ADR 0006).
//
// The real scheduler runs six load shapes, each on a tight and a roomy pool, against a worker that answers at once, two
// plans in flight. No model and no clock: time is counted in steps, and every run of the program prints the same.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/rng.h"
#include "control/scheduler.h"
#include "control/sequence.h"

namespace perigee {
namespace {

constexpr int32_t kStopId = 1;

int32_t growth(const Sequence& sequence) {  // pages that it may still need
  return sequence.max_blocks() - static_cast<int32_t>(sequence.running().pages.size());
}

template <int32_t kPages>
int32_t reserve_each(std::span<Sequence* const> running, int32_t /*num_pages*/) {
  int32_t sum = 0;
  for (const Sequence* sequence : running) sum += std::min(kPages, growth(*sequence));
  return sum;
}

template <int32_t kPercent>
int32_t reserve_of_pool(std::span<Sequence* const> running, int32_t num_pages) {
  return running.empty() ? 0 : num_pages * kPercent / 100;
}

// A part of what all could still need by their max_tokens.
template <int32_t kPercent>
int32_t reserve_of_growth(std::span<Sequence* const> running, int32_t /*num_pages*/) {
  int64_t sum = 0;
  for (const Sequence* sequence : running) sum += growth(*sequence);
  return static_cast<int32_t>(sum * kPercent / 100);
}

double g_mean_outputs = 0;  // of the requests that have finished

// What each would need if it gave as many outputs as those before it did on average, and half of that again.
int32_t reserve_observed(std::span<Sequence* const> running, int32_t /*num_pages*/) {
  int64_t sum = 0;
  for (const Sequence* sequence : running) {
    const double left = std::max(1.5 * g_mean_outputs - sequence->num_outputs(), double{kBlockTokens});
    sum += std::min(growth(*sequence), static_cast<int32_t>(std::ceil(left / kBlockTokens)));
  }
  return static_cast<int32_t>(sum);
}

struct Policy {
  const char* name;
  AdmissionReserve reserve;
};
constexpr Policy kPolicies[] = {
    {"none", reserve_each<0>},
    {"1 page each", reserve_page_each},  // what the scheduler does
    {"2 pages each", reserve_each<2>},
    {"4 pages each", reserve_each<4>},
    {"5 % of the pool", reserve_of_pool<5>},
    {"10 % of the pool", reserve_of_pool<10>},
    {"25 % of max_tokens", reserve_of_growth<25>},
    {"100 % of max_tokens", reserve_of_growth<100>},
    {"1.5 observed outputs", reserve_observed},
};

struct Job {
  int64_t arrival = 0;  // step
  int32_t num_prompt = 0, num_outputs = 0, max_tokens = 0;
  int32_t num_shared = 0;  // of the prompt, the same in all jobs
};

struct Shape {
  const char* name;
  int32_t tight_pages, roomy_pages;
  std::vector<Job> jobs;
};

// As many short as long ones on a logarithmic scale.
int32_t between(Rng& rng, double least, double most) {
  return static_cast<int32_t>(std::lround(least * std::pow(most / least, rng.unit())));
}

std::vector<Job> jobs_of(int32_t count, int64_t seed, const std::function<Job(int32_t, Rng&)>& draw) {
  Rng rng(static_cast<uint64_t>(seed));
  std::vector<Job> jobs;
  for (int32_t i = 0; i < count; ++i) jobs.push_back(draw(i, rng));
  return jobs;
}

std::vector<Shape> shapes() {
  return {
      {"512 in, 1,024 out", 1000, 2000,
       jobs_of(200, 1,
               [](int32_t, Rng&) {
                 return Job{0, 512, 1024, 1024, 0};
               })},
      {"8,192 in, 64 out", 1000, 6000,
       jobs_of(200, 2,
               [](int32_t i, Rng& rng) {
                 return Job{i * 2, between(rng, 4096, 12288), 64, 64, 0};
               })},
      {"chat: 64-4,096 in, 16-2,048 out of 4,096", 1500, 4000,
       jobs_of(400, 3,
               [](int32_t i, Rng& rng) {
                 const int32_t num_prompt = between(rng, 64, 4096);
                 return Job{i * 4, num_prompt, between(rng, 16, 2048), 4096, 0};
               })},
      {"bursts of 96: 256 in, 128-1,024 out", 700, 1500,
       jobs_of(480, 4,
               [](int32_t i, Rng& rng) {
                 return Job{i / 96 * 600, 256, between(rng, 128, 1024), 1024, 0};
               })},
      {"2,048 shared, 64-512 own, 128-1,024 out", 500, 1200,
       jobs_of(300, 5,
               [](int32_t i, Rng& rng) {
                 const int32_t own = between(rng, 64, 512);
                 return Job{i * 2, 2048 + own, between(rng, 128, 1024), 2048, 2048};
               })},
      {"one of 16k in, 4k out among small ones", 500, 1500,
       jobs_of(600, 6,
               [](int32_t i, Rng& rng) {
                 if (i % 100 == 50) return Job{i * 2, 16384, 4096, 4096, 0};
                 const int32_t num_prompt = between(rng, 64, 512);
                 return Job{i * 2, num_prompt, between(rng, 32, 512), 512, 0};
               })},
  };
}

struct Outcome {
  int64_t steps = 0, preemptions = 0, prefill = 0, recomputed = 0;
  double utilisation = 0, mean_first = 0, p99_first = 0;
  // In steps of decode rows alone, where a token of a prompt costs a 300th of one (60k tokens/s beside steps of 5 ms).
  double time() const { return static_cast<double>(steps) + static_cast<double>(prefill + recomputed) / 300; }
};

class Load {
 public:
  Load(const Shape& shape, int32_t num_pages, AdmissionReserve reserve)
      : shape_(shape), scheduler_(config(num_pages, reserve)), first_(shape.jobs.size(), -1), slots_(kSequences) {}

  Outcome run() {
    g_mean_outputs = 0;
    while (num_finished_ < shape_.jobs.size()) step();
    return outcome();
  }

 private:
  static constexpr int32_t kSequences = 128;

  struct SlotState {
    int64_t sequence = -1;
    int32_t num_outputs = 0;
    bool resumed = false;
  };

  static SchedulerConfig config(int32_t num_pages, AdmissionReserve reserve) {
    SchedulerConfig config;
    config.num_pages = num_pages;
    config.max_sequences = kSequences;
    config.max_step_tokens = 2048;
    config.max_model_len = 32768;
    config.admission_reserve = reserve;
    return config;
  }

  void submit(int64_t index) {
    const Job& job = shape_.jobs[static_cast<size_t>(index)];
    auto prompt = std::make_shared<std::vector<int32_t>>();
    for (int32_t i = 0; i < job.num_prompt; ++i)
      prompt->push_back(100 + (i < job.num_shared ? i : static_cast<int32_t>(index) * 40000 + i));
    auto sampling = std::make_shared<SamplingParams>();
    sampling->max_tokens = job.max_tokens;
    sampling->stop_ids = {kStopId};
    Submit submit;
    submit.sequence = SequenceId(index);
    submit.prompt = std::move(prompt);
    submit.sampling = std::move(sampling);
    submit.arrival_s = static_cast<double>(job.arrival);
    scheduler_.submit(std::move(submit));
  }

  void step() {
    while (next_ < shape_.jobs.size() && shape_.jobs[next_].arrival <= now_) submit(static_cast<int64_t>(next_++));
    const std::optional<StepPlan> plan = scheduler_.next_plan(0);
    if (plan) in_flight_.push_back(answer(*plan));
    if (plan || in_flight_.empty()) {  // else pages are waited for, which takes no step of its own
      ++now_;
      used_ += scheduler_.gauges().used_pages;
    }
    if (!in_flight_.empty() && (!plan || in_flight_.size() == kMaxPlansInFlight)) {
      scheduler_.apply(in_flight_.front());
      in_flight_.pop_front();
    }
    for (const SequenceUpdate& update : scheduler_.take_updates()) take(update);
  }

  StepResult answer(const StepPlan& plan) {
    for (const SequenceStart& start : plan.starts) {
      SlotState& slot = slots_[static_cast<size_t>(start.slot.value)];
      slot.sequence = start.sequence.value;
      slot.num_outputs = static_cast<int32_t>(start.tokens->size()) - start.num_prompt_tokens;
      slot.resumed = !started_.emplace(start.sequence.value, true).second;
    }
    StepResult result{.step = plan.step, .rows = {}};
    for (const PlanRow& row : plan.rows) {
      SlotState& slot = slots_[static_cast<size_t>(row.slot.value)];
      if (row.prefill() != nullptr) (slot.resumed ? outcome_.recomputed : outcome_.prefill) += row.num_tokens();
      RowResult& added = result.rows.emplace_back(RowResult{.slot = row.slot, .sequence = row.sequence});
      if (!row.samples()) continue;
      const bool last = ++slot.num_outputs == shape_.jobs[static_cast<size_t>(row.sequence.value)].num_outputs;
      added.ids.push_back(last ? kStopId : 2 + static_cast<int32_t>(row.sequence.value) * 3000 + slot.num_outputs);
    }
    return result;
  }

  void take(const SequenceUpdate& update) {
    int64_t& first = first_[static_cast<size_t>(update.sequence.value)];
    if (first < 0 && !update.ids.empty()) first = now_;
    if (!update.finish) return;
    const int32_t num_outputs = shape_.jobs[static_cast<size_t>(update.sequence.value)].num_outputs;
    g_mean_outputs += (num_outputs - g_mean_outputs) / static_cast<double>(++num_finished_);
  }

  Outcome outcome() {
    std::vector<double> waits;
    for (size_t i = 0; i < first_.size(); ++i) waits.push_back(static_cast<double>(first_[i] - shape_.jobs[i].arrival));
    std::sort(waits.begin(), waits.end());
    for (const double wait : waits) outcome_.mean_first += wait / static_cast<double>(waits.size());
    outcome_.p99_first = waits[waits.size() * 99 / 100];
    outcome_.steps = now_;
    outcome_.preemptions = scheduler_.gauges().preemptions;
    outcome_.utilisation = used_ / static_cast<double>(now_) / scheduler_.gauges().total_pages;
    return outcome_;
  }

  const Shape& shape_;
  Scheduler scheduler_;
  std::vector<int64_t> first_;  // the step of each job's first output
  std::vector<SlotState> slots_;
  std::unordered_map<int64_t, bool> started_;
  std::deque<StepResult> in_flight_;
  size_t next_ = 0, num_finished_ = 0;
  int64_t now_ = 0;
  double used_ = 0;
  Outcome outcome_;
};

void run_all() {
  for (const Shape& shape : shapes()) {
    for (const int32_t num_pages : {shape.tight_pages, shape.roomy_pages}) {
      std::printf("\n%s; %d pages\n\n", shape.name, num_pages);
      std::printf("| kept back | prefill again | preemptions | steps | time | first token, mean | p99 | pool used |\n");
      std::printf("|---|---|---|---|---|---|---|---|\n");
      for (const Policy& policy : kPolicies) {
        const Outcome o = Load(shape, num_pages, policy.reserve).run();
        std::printf("| %s | %.1f %% | %lld | %lld | %.0f | %.0f | %.0f | %.0f %% |\n", policy.name,
                    100.0 * static_cast<double>(o.recomputed) / static_cast<double>(o.prefill),
                    static_cast<long long>(o.preemptions), static_cast<long long>(o.steps), o.time(), o.mean_first,
                    o.p99_first, 100 * o.utilisation);
      }
    }
  }
}

}  // namespace
}  // namespace perigee

int main() {
  perigee::run_all();
  return 0;
}
