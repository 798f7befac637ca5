// hybrid_cache_bench: what the prefix cache of a hybrid model saves, and what its pages cost. Prints Markdown.
//
// The real scheduler replays conversations of an agent against a worker that answers at once, in virtual time: all
// share a system prompt; each turn adds a message and gets an output; some turns go back and branch off an earlier one.
// The same turns run under several checkpoint policies and, as the bound, on a model without recurrent state, where
// every block boundary is a hit. The pool is that of Kimi-Linear-48B: a page is a block of 64 tokens of its seven
// latent layers, seven units of its state.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "control/scheduler.h"

namespace perigee {
namespace {

constexpr int64_t kLatentLayers = 7, kLatentRowBytes = 1152;  // bf16 [512 | 64]
constexpr int64_t kPageBytes = kLatentLayers * kBlockTokens * kLatentRowBytes;
constexpr int64_t kStateLayers = 20, kHeads = 32;
constexpr int64_t kUnitBytes = 128 * 128 * 4 + 3 * 3 * 128 * 4;  // S, and the tails of three convolutions, f32
constexpr int64_t kUnitsPerPage = kPageBytes / kUnitBytes;

int64_t units(int64_t tp) {
  return kStateLayers * kHeads / tp;
}
int64_t state_pages(int64_t tp) {
  return (units(tp) + kUnitsPerPage - 1) / kUnitsPerPage;
}

void print_sizes() {
  std::printf("| TP | units | pages a state | MB a state | as KV tokens | waste |\n|---|---|---|---|---|---|\n");
  for (const int64_t tp : {1, 2, 4, 8}) {
    const double held = static_cast<double>(state_pages(tp) * kPageBytes);
    const double used = static_cast<double>(units(tp) * kUnitBytes);
    std::printf("| %lld | %lld | %lld | %.1f | %lld | %.1f %% |\n", static_cast<long long>(tp),
                static_cast<long long>(units(tp)), static_cast<long long>(state_pages(tp)), held / 1e6,
                static_cast<long long>(state_pages(tp) * kBlockTokens), 100 * (1 - used / held));
  }
}

struct Workload {
  int32_t conversations = 64;
  int32_t turns = 12;
  int32_t system_tokens = 3000;
  double branch_chance = 0.1;
  double think_s = 20;
};

// Lengths between `least` and `most`, as many short as long ones on a logarithmic scale.
int32_t draw_length(Rng& rng, double least, double most) {
  return static_cast<int32_t>(least * std::pow(most / least, rng.unit()));
}

struct Conversation {
  Rng rng{0};  // its own, so that every policy meets the same turns
  std::vector<int32_t> history;
  std::vector<size_t> ends;  // of the turns so far
  int32_t turns_left = 0;
  double ready_s = 0;
  int32_t num_outputs = 0;  // of the turn that runs
};

class Replay {
 public:
  Replay(const SchedulerConfig& config, const Workload& workload)
      : workload_(workload), scheduler_(config), conversations_(workload.conversations) {
    uint64_t num_seeded = 0;
    for (Conversation& conversation : conversations_) {
      conversation.rng = Rng(++num_seeded);
      for (int32_t i = 0; i < workload.system_tokens; ++i) conversation.history.push_back(i % 1000);
      conversation.turns_left = workload.turns;
      conversation.ready_s = conversation.rng.unit() * workload.think_s * 2;
    }
  }

  SchedulerGauges run() {
    while (step()) {
    }
    SchedulerGauges gauges = scheduler_.gauges();
    gauges.checkpoint_pages = most_checkpoint_pages_;
    return gauges;
  }

 private:
  bool step() {
    bool waiting = false;
    for (size_t i = 0; i < conversations_.size(); ++i) {
      Conversation& conversation = conversations_[i];
      if (conversation.turns_left == 0 || conversation.num_outputs > 0) continue;
      waiting = true;
      if (conversation.ready_s <= now_s_) submit(conversation, static_cast<int64_t>(i));
    }
    while (std::optional<StepPlan> plan = scheduler_.next_plan(now_s_)) flights_.push_back(std::move(*plan));
    if (flights_.empty()) {
      now_s_ += 0.1;
      return waiting;
    }
    answer(flights_.front());
    flights_.pop_front();
    for (SequenceUpdate& update : scheduler_.take_updates()) take(update);
    most_checkpoint_pages_ = std::max(most_checkpoint_pages_, scheduler_.gauges().checkpoint_pages);
    return true;
  }

  // A branch takes back between one and three turns before it adds its message.
  void submit(Conversation& conversation, int64_t index) {
    Rng& rng = conversation.rng;
    std::vector<size_t>& ends = conversation.ends;
    if (ends.size() > 3 && rng.chance(workload_.branch_chance)) {
      ends.resize(ends.size() - rng.below(3) - 1);
      conversation.history.resize(ends.back());
    }
    for (int32_t i = draw_length(rng, 30, 3000); i > 0; --i)
      conversation.history.push_back(static_cast<int32_t>(rng.below(100000)));
    conversation.num_outputs = draw_length(rng, 30, 2000);
    auto sampling = std::make_shared<SamplingParams>();
    sampling->max_tokens = conversation.num_outputs;
    Submit submit;
    submit.sequence = SequenceId(next_sequence_++);
    submit.prompt = std::make_shared<const std::vector<int32_t>>(conversation.history);
    submit.sampling = std::move(sampling);
    submit.arrival_s = now_s_;
    owners_[submit.sequence] = static_cast<size_t>(index);
    scheduler_.submit(std::move(submit));
  }

  void answer(const StepPlan& plan) {
    StepResult result;
    result.step = plan.step;
    for (const PlanRow& row : plan.rows) {
      RowResult& added = result.rows.emplace_back();
      added.slot = row.slot;
      added.sequence = row.sequence;
      for (const CheckpointWrite& write : plan.checkpoints)
        if (write.slot == row.slot) added.checkpoints.push_back(write.boundary());
      if (row.samples())
        added.ids = {static_cast<int32_t>(mix64(row.sequence.value * 100000 + row.position.least) % 100000)};
    }
    now_s_ += 0.01 + 20e-6 * plan.num_tokens();
    scheduler_.apply(result);
  }

  void take(SequenceUpdate& update) {
    Conversation& conversation = conversations_[owners_[update.sequence]];
    conversation.history.insert(conversation.history.end(), update.ids.begin(), update.ids.end());
    if (!update.finish) return;
    conversation.ends.push_back(conversation.history.size());
    conversation.num_outputs = 0;
    --conversation.turns_left;
    conversation.ready_s = now_s_ + conversation.rng.unit() * 2 * workload_.think_s;
  }

  const Workload workload_;
  Scheduler scheduler_;
  std::vector<Conversation> conversations_;
  std::map<SequenceId, size_t> owners_;
  std::deque<StepPlan> flights_;
  double now_s_ = 0;
  int64_t next_sequence_ = 0;
  int32_t most_checkpoint_pages_ = 0;
};

struct Policy {
  const char* name;
  bool recurrent;
  int32_t interval_blocks, rolling_blocks;
};

void print_replay(int64_t tp, int32_t num_pages, const Workload& workload) {
  constexpr Policy kPolicies[] = {
      {"attention alone (bound)", false, 0, 0}, {"end of prompt, junctions", true, 0, 0},
      {"and every 4,096 tokens", true, 64, 0},  {"**and turns every 256 (default)**", true, 64, 4},
      {"and turns every 64", true, 64, 1},      {"every block, no turns", true, 1, 0}};
  std::printf("\n%d conversations, TP %lld, %d pages (%.1f GB a GPU), state %lld pages:\n\n", workload.conversations,
              static_cast<long long>(tp), num_pages, static_cast<double>(num_pages) * kPageBytes / 1e9,
              static_cast<long long>(state_pages(tp)));
  std::printf(
      "| checkpoints at | hit rate | of the bound | computed a turn | written | evicted | skipped | most pages |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  double bound = 0;
  for (const Policy& policy : kPolicies) {
    SchedulerConfig config;
    config.num_pages = num_pages;
    config.max_sequences = 128;
    config.max_step_tokens = 4096;
    config.max_model_len = 131072;
    config.attention_alignment = policy.recurrent ? 64 : 1;
    config.state_pages = policy.recurrent ? static_cast<int32_t>(state_pages(tp)) : 0;
    config.checkpoint_interval_blocks = policy.interval_blocks;
    config.checkpoint_rolling_blocks = policy.rolling_blocks;
    const SchedulerGauges g = Replay(config, workload).run();
    const double rate = static_cast<double>(g.prefix_hits) / static_cast<double>(g.prefix_queries);
    if (bound == 0) bound = rate;
    std::printf("| %s | %.1f %% | %.1f %% | %.0f | %lld | %lld | %lld | %d |\n", policy.name, 100 * rate,
                100 * rate / bound,
                static_cast<double>(g.prefix_queries - g.prefix_hits) / (workload.conversations * workload.turns),
                static_cast<long long>(g.checkpoint_writes), static_cast<long long>(g.checkpoint_evictions),
                static_cast<long long>(g.checkpoint_skips), g.checkpoint_pages);
  }
}

// Copying a checkpoint's pages into a state's, as a worker does on a hit, on one thread. The pages are spread over a
// pool that no cache holds.
void print_copies() {
  constexpr int64_t kPool = 2048;
  std::vector<uint8_t> pool(static_cast<size_t>(kPool * kPageBytes), uint8_t{1});
  Rng rng(7);
  std::printf("\n| TP | MB a copy | ms a copy | GB/s read and written |\n|---|---|---|---|\n");
  for (const int64_t tp : {1, 2, 4, 8}) {
    std::vector<double> seconds;
    for (int run = 0; run < 21; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < state_pages(tp); ++i) {
        const auto from = static_cast<int64_t>(rng.below(kPool / 2)), to = kPool / 2 + i;
        std::memcpy(pool.data() + to * kPageBytes, pool.data() + from * kPageBytes, static_cast<size_t>(kPageBytes));
      }
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    std::nth_element(seconds.begin(), seconds.begin() + 10, seconds.end());
    const auto bytes = static_cast<double>(state_pages(tp) * kPageBytes);
    std::printf("| %lld | %.1f | %.2f | %.1f |\n", static_cast<long long>(tp), bytes / 1e6, seconds[10] * 1e3,
                2 * bytes / seconds[10] / 1e9);
  }
}

}  // namespace
}  // namespace perigee

int main() {
  using perigee::print_replay;
  perigee::print_sizes();
  perigee::print_copies();
  print_replay(1, 65536, {.conversations = 64});
  print_replay(1, 65536, {.conversations = 192});
  print_replay(8, 65536, {.conversations = 64});
  print_replay(8, 65536, {.conversations = 192});
  return 0;
}
