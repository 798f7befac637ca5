#include "engine/rank_group.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/log.h"
#include "comm/cuda/peer_comms.h"
#include "comm/thread_comms.h"
#include "exec/cuda/cuda_device.h"
#include "exec/host_device.h"
#include "exec/observed_comm.h"
#include "kv/cuda/gpu_pages.h"
#include "tensor/cuda/gpus.h"

namespace perigee {
namespace {

using SteadyClock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Once, and before any rank reads weights: each of them would find the same.
Status check_shards_of(const RankConfig& rank) {
  const int64_t size = rank.shard().size;
  if (size == 1 || rank.make_model) return {};
  if (rank.device == Device::kCuda) RETURN_IF_ERROR(check_gpus(list_gpus(), rank.size));
  LoadOptions load = rank.load;
  load.ranks.size = size;
  return check_model_files(load);
}

Result<std::unique_ptr<RankDevice>> make_rank_device(const RankConfig& config) {
  return config.device == Device::kCuda ? make_cuda_device(config) : make_host_device(config);
}

}  // namespace

// Shared with the threads, so that one that is left behind still has what it uses.
struct RankGroup::State {
  struct Member {
    std::unique_ptr<RankPort> port;
    std::vector<std::unique_ptr<Comm>> observed_comms;  // with an observer
    std::thread thread;
    // The rest under the mutex.
    std::unique_ptr<Rank> rank;    // from its load to its end; in an aborted group as long as the state
    const char* phase = "";        // of its start
    int64_t signs_of_life = 0;     // in its start
    bool waits = false;            // for the others, in its start
    std::optional<Error> failure;  // of its start
    int64_t num_reported = 0;      // steps
    bool ended = false;            // the thread is about to return
  };
  struct Flight {
    StepPlan plan;
    std::vector<StepResult> results;  // of each rank; before that only memory
    int32_t num_reported = 0;         // ranks
  };

  State(const RankGroupConfig& the_config, OnStep the_on_step, MakeDevice the_make_device);

  // The owner's thread.
  Status start(const std::shared_ptr<State>& self);
  void submit(Step&& step);
  void end();
  // A rank's thread.
  void run_rank(int32_t r);
  Status start_rank(int32_t r);
  void show_life(int32_t r, const char* phase);
  bool meet(int32_t r);
  void report(int32_t r, StepResult& result);
  // Any thread, under the mutex.
  void join(Flight& flight);
  void take_logprobs(Flight& flight) const;
  void lose(StepId step, std::string why);
  void stop();
  bool all_ended() const;
  RankProgress progress_of(const Member& member) const;
  // The owner's thread, then the watch's.
  void wait_for_start(std::unique_lock<std::mutex>& lock);
  void watch();
  template <typename Done, typename Progress, typename Target>
  std::optional<int32_t> watch_until(std::unique_lock<std::mutex>& lock, LagWatch& lag, double period_s, Done done,
                                     Progress progress, Target target);

  RankConfig config_of(int32_t r);
  int32_t size() const { return static_cast<int32_t>(members.size()); }
  Flight& flight_at(int64_t n) { return flights[static_cast<size_t>(n % kMaxPlansInFlight)]; }

  const RankGroupConfig config;
  const OnStep on_step;
  const MakeDevice make_device;
  std::atomic<bool> abort{false};     // the abort word: set once, and nothing is reported after that
  std::unique_ptr<ShardComms> comms;  // of ranks with shards, on the CPU
  std::unique_ptr<PeerComms> peers;   // the same on GPUs
  std::vector<Member> members;        // never resized
  std::thread watcher;

  std::mutex mutex;                 // guards what follows; held while on_step runs
  std::condition_variable changed;  // meetings, ends
  int32_t num_met = 0;              // ranks at meetings, of all meetings together
  int32_t num_pages = INT32_MAX;
  std::array<Flight, kMaxPlansInFlight> flights;  // step n of this group at n % kMaxPlansInFlight
  int64_t num_submitted = 0, num_joined = 0;
  bool silent = false;              // on_step is not called any more
  SteadyClock::time_point give_up;  // once aborted: how long ranks may take to end
};

RankGroup::State::State(const RankGroupConfig& the_config, OnStep the_on_step, MakeDevice the_make_device)
    : config(the_config),
      on_step(std::move(the_on_step)),
      make_device(std::move(the_make_device)),
      members(static_cast<size_t>(the_config.rank.size)) {
  const int32_t dcp_size = config.rank.limits.dcp_size, num_shards = static_cast<int32_t>(config.rank.shard().size);
  CHECK(num_shards % dcp_size == 0, num_shards, " shards in dcp groups of ", dcp_size);
  if (num_shards > 1 && config.rank.device == Device::kCuda)
    peers = std::make_unique<PeerComms>(num_shards, dcp_size, config.rank.collectives);
  else if (num_shards > 1)
    comms = std::make_unique<ShardComms>(num_shards, dcp_size, abort);
  for (int32_t r = 0; r < size(); ++r)
    members[static_cast<size_t>(r)].port =
        std::make_unique<RankPort>(abort, [this, r](StepResult& result) { report(r, result); });
  for (Flight& flight : flights) flight.results.resize(members.size());
}

RankConfig RankGroup::State::config_of(int32_t r) {
  RankConfig out = config.rank;
  out.rank = r;
  out.peers = peers.get();
  if (r < std::ssize(config.observers)) out.observer = config.observers[static_cast<size_t>(r)];
  if (comms) {
    const auto observed = [&](Comm& comm) {
      if (out.observer == nullptr || comm.size() == 1) return &comm;
      return members[static_cast<size_t>(r)].observed_comms.emplace_back(observe_comm(comm, *out.observer)).get();
    };
    out.comm = observed(comms->of(r));
    out.dcp_comm = observed(comms->dcp_of(r));
  }
  if (r > 0) out.load.progress = nullptr;  // one voice is enough
  out.load.progress = [this, r, show = out.load.progress](const char* phase, int64_t done, int64_t total) {
    show_life(r, done < total ? "loading its weights" : "warming up");
    if (show) show(phase, done, total);
  };
  return out;
}

Status RankGroup::State::start(const std::shared_ptr<State>& self) {
  for (int32_t r = 0; r < size(); ++r)
    members[static_cast<size_t>(r)].thread = std::thread([self, r] { self->run_rank(r); });
  std::unique_lock lock(mutex);
  wait_for_start(lock);
  if (!abort) {
    if (size() > 1 || config.timeouts.step_s > 0) watcher = std::thread([self] { self->watch(); });
    return {};
  }
  changed.wait_until(lock, give_up, [&] { return all_ended(); });
  for (const Member& member : members)
    if (member.failure) return *member.failure;
  CHECK(false, "a group that did not start, and no rank has failed");
}

void RankGroup::State::run_rank(int32_t r) {
  const Status started = start_rank(r);
  Member& member = members[static_cast<size_t>(r)];
  if (started.ok() && !abort) member.rank->run(*member.port);
  std::unique_lock lock(mutex);
  if (!started.ok()) {
    member.failure = started.error();
    if (size() > 1) member.failure->message = fmt::format("rank {}: {}", r, member.failure->message);
    stop();
  }
  if (!abort) {
    std::unique_ptr<Rank> rank = std::move(member.rank);
    lock.unlock();
    rank.reset();  // by the thread that made it
    lock.lock();
  }
  member.ended = true;
  changed.notify_all();
}

// Success may also mean that another rank has failed.
Status RankGroup::State::start_rank(int32_t r) {
  const RankConfig own = config_of(r);
  show_life(r, "making its device");
  ASSIGN_OR_RETURN(auto device, make_device(own));
  show_life(r, "loading its weights");
  ASSIGN_OR_RETURN(auto loaded, Rank::load(own, std::move(device)));
  Rank& rank = *loaded;
  {
    const std::lock_guard lock(mutex);
    members[static_cast<size_t>(r)].rank = std::move(loaded);
    num_pages = std::min(num_pages, rank.max_pages());
  }
  if (!meet(r)) return {};
  show_life(r, "reserving its memory");
  RETURN_IF_ERROR(rank.reserve(num_pages));
  meet(r);
  return {};
}

void RankGroup::State::show_life(int32_t r, const char* phase) {
  const std::lock_guard lock(mutex);
  Member& member = members[static_cast<size_t>(r)];
  member.phase = phase;
  ++member.signs_of_life;
}

// Waits until every rank is at this meeting. False: one has failed.
bool RankGroup::State::meet(int32_t r) {
  std::unique_lock lock(mutex);
  const int32_t all = (num_met / size() + 1) * size();
  ++num_met;
  members[static_cast<size_t>(r)].waits = true;
  changed.notify_all();
  changed.wait(lock, [&] { return abort || num_met >= all; });
  members[static_cast<size_t>(r)].waits = false;
  return !abort;
}

void RankGroup::State::submit(Step&& step) {
  const StepPlan* to_send = nullptr;
  {
    const std::lock_guard lock(mutex);
    CHECK(num_submitted - num_joined < kMaxPlansInFlight || abort, "more than ", kMaxPlansInFlight, " plans in flight");
    if (abort) return;
    Flight& flight = flight_at(num_submitted++);
    flight.num_reported = 0;
    flight.plan = std::move(step.plan);
    flight.results[0] = std::move(step.result);
    to_send = &flight.plan;
  }
  for (Member& member : members) member.port->send(*to_send);  // refused where the group has been lost meanwhile
}

void RankGroup::State::report(int32_t r, StepResult& result) {
  const std::lock_guard lock(mutex);
  if (abort) return;
  if (!result.device_lost.empty()) return lose(result.step, std::move(result.device_lost));
  Member& member = members[static_cast<size_t>(r)];
  CHECK(member.num_reported < num_submitted, "rank ", r, " reports step ", result.step, ", which it was not given");
  Flight& flight = flight_at(member.num_reported++);
  CHECK(result.step == flight.plan.step, "rank ", r, " reports step ", result.step, " in place of ", flight.plan.step);
  std::swap(flight.results[static_cast<size_t>(r)], result);
  if (++flight.num_reported == size()) join(flight);
}

void RankGroup::State::join(Flight& flight) {
  ++num_joined;
  if (config.compare)
    for (int32_t r = 1; r < size(); ++r)
      for (size_t i = 0; i < flight.plan.rows.size(); ++i) {
        const RowResult &own = flight.results[static_cast<size_t>(r)].rows[i], &first = flight.results[0].rows[i];
        CHECK(own.sequence == first.sequence && own.ids == first.ids && own.finite == first.finite, "row ", i,
              " of step ", flight.plan.step, " differs between rank 0 and rank ", r);
      }
  if (comms || peers) take_logprobs(flight);
  on_step({.plan = std::move(flight.plan), .result = std::move(flight.results[0])});
}

// Log-probabilities are with the rank that samples a slot; rank 0's result gets them all.
void RankGroup::State::take_logprobs(Flight& flight) const {
  for (size_t i = 0; i < flight.plan.rows.size(); ++i) {
    RowResult& to = flight.results[0].rows[i];
    RowResult& from = flight.results[static_cast<size_t>(rank_of_slot(to.slot, size()))].rows[i];
    if (&to == &from) continue;
    std::swap(to.logprobs, from.logprobs);
    std::swap(to.prompt_logprobs, from.prompt_logprobs);
  }
}

void RankGroup::State::lose(StepId step, std::string why) {
  stop();
  on_step({.plan = {}, .result = {.step = step, .rows = {}, .device_lost = std::move(why)}});
}

void RankGroup::State::stop() {
  if (!abort.exchange(true))
    give_up = SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(Seconds(config.timeouts.end_s));
  if (peers) peers->abort();
  for (Member& member : members) member.port->close();
  changed.notify_all();
}

bool RankGroup::State::all_ended() const {
  return std::all_of(members.begin(), members.end(), [](const Member& member) { return member.ended; });
}

RankProgress RankGroup::State::progress_of(const Member& member) const {
  const auto rank = static_cast<int32_t>(&member - members.data());
  return {.steps = member.num_reported,
          .meetings = comms   ? comms->num_meetings(rank)
                      : peers ? peers->num_meetings(rank)
                              : 0};
}

// Looks at the ranks every so often: at progress(member), of target(). Which of them is lost; none once done() holds.
// Time counts only while this thread is awake now and then: not when the whole process is stopped.
template <typename Done, typename Progress, typename Target>
std::optional<int32_t> RankGroup::State::watch_until(std::unique_lock<std::mutex>& lock, LagWatch& lag, double period_s,
                                                     Done done, Progress progress, Target target) {
  std::vector<RankProgress> so_far(members.size());
  double last_s = config.timeouts.clock->now_s();
  while (!changed.wait_for(lock, Seconds(period_s), done)) {
    const double now_s = config.timeouts.clock->now_s();
    std::transform(members.begin(), members.end(), so_far.begin(), progress);
    const auto lost = lag.look(so_far, target(), std::min(now_s - last_s, 2 * period_s));
    if (lost) return lost;
    last_s = now_s;
  }
  return std::nullopt;
}

// Until every rank has started or one has failed.
void RankGroup::State::wait_for_start(std::unique_lock<std::mutex>& lock) {
  constexpr int64_t kNothingToDo = INT64_MAX;
  const auto done = [&] { return abort || num_met == 2 * size(); };
  const double limit_s = config.timeouts.start_s;
  if (limit_s <= 0) return changed.wait(lock, done);
  LagWatch lag(size(), {.behind_s = limit_s, .step_s = limit_s});
  const auto signs = [](const Member& member) {
    return RankProgress{.steps = member.waits ? kNothingToDo : member.signs_of_life};
  };
  const auto lost =
      watch_until(lock, lag, std::clamp(limit_s / 10, 0.001, 0.25), done, signs, [] { return kNothingToDo; });
  if (!lost) return;
  Member& member = members[static_cast<size_t>(*lost)];
  member.failure =
      Error(Code::kUnavailable,
            fmt::format("rank {}: no sign of life for {:g} s while {}; --start-timeout-seconds sets the limit", *lost,
                        limit_s, member.phase));
  stop();
}

void RankGroup::State::watch() {
  double shortest_s = size() > 1 ? config.timeouts.behind_s : config.timeouts.step_s;
  if (config.timeouts.step_s > 0) shortest_s = std::min(shortest_s, config.timeouts.step_s);
  LagWatch lag(size(), config.timeouts);
  std::unique_lock lock(mutex);
  const auto lost = watch_until(
      lock, lag, std::clamp(shortest_s / 10, 0.001, 0.25), [&] { return abort || all_ended(); },
      [&](const Member& member) { return progress_of(member); }, [&] { return num_submitted; });
  if (!lost) return;
  const StepId step = flight_at(members[static_cast<size_t>(*lost)].num_reported).plan.step;
  lose(step, lost_in_step(fmt::format("no answer for {:g} s", lag.silent_s(*lost)), step, *lost));
}

void RankGroup::State::end() {
  std::unique_lock lock(mutex);
  for (Member& member : members) member.port->close();
  changed.wait(lock, [&] { return abort || all_ended(); });  // the watch sets `abort` where one hangs
  changed.wait_until(lock, give_up, [&] { return all_ended(); });
  for (Member& member : members) {
    if (!member.ended) {
      log_warning("rank ", &member - members.data(), " does not end: it is left behind");
      member.thread.detach();
      continue;
    }
    lock.unlock();
    member.thread.join();
    lock.lock();
  }
  lock.unlock();
  if (watcher.joinable()) watcher.join();
}

Result<std::unique_ptr<Executor>> RankGroup::create(const RankGroupConfig& config, OnStep on_step) {
  RETURN_IF_ERROR(check_shards_of(config.rank));
  return create(config, std::move(on_step), make_rank_device);
}

Result<std::unique_ptr<Executor>> RankGroup::create(const RankGroupConfig& config, OnStep on_step,
                                                    MakeDevice make_device) {
  CHECK(config.rank.size >= 1, "a group of ", config.rank.size, " ranks");
  std::unique_ptr<RankGroup> group(
      new RankGroup(std::make_shared<State>(config, std::move(on_step), std::move(make_device))));
  RETURN_IF_ERROR(group->state_->start(group->state_));
  return std::unique_ptr<Executor>(std::move(group));
}

RankGroup::RankGroup(std::shared_ptr<State> state) : state_(std::move(state)) {}

RankGroup::~RankGroup() {
  state_->end();
}

void RankGroup::submit(Step step) {
  state_->submit(std::move(step));
}

void RankGroup::set_masks(StepMasks masks) {
  const auto shared = std::make_shared<const StepMasks>(std::move(masks));
  for (State::Member& member : state_->members) member.port->send(shared);
}

const ModelInfo& RankGroup::model() const {
  return state_->members[0].rank->parts().model->info();
}

int64_t RankGroup::weight_bytes() const {
  return state_->members[0].rank->parts().weight_bytes();
}

int32_t RankGroup::num_pages() const {
  return state_->num_pages;
}

int32_t RankGroup::state_pages() const {
  return state_->members[0].rank->parts().state_pages();
}

Result<std::vector<RankPages>> RankGroup::pages(const AreaUse& areas) const {
  std::vector<RankPages> pages;
  for (const auto& member : state_->members) {
    const RankParts& parts = member.rank->parts();
    const TensorParallel shard = parts.config.shard();
    std::shared_ptr<PageMemory> memory = host_memory();
    if (parts.config.device == Device::kCuda) {
      const int64_t block_bytes =
          std::max(parts.layout.latent().least_page_bytes(), parts.layout.draft().least_page_bytes());
      ASSIGN_OR_RETURN(memory,
                       make_gpu_pages({.gpu = parts.config.rank,
                                       .most_unit_bytes = std::max(block_bytes, parts.layout.state().unit_bytes),
                                       .areas = areas}));
    }
    pages.push_back({.base = member.rank->pages(),
                     .draft_base = member.rank->pages() + parts.num_pages * parts.layout.page_bytes(),
                     .memory = std::move(memory),
                     .layout = parts.layout,
                     .shard = static_cast<int32_t>(shard.rank),
                     .num_shards = static_cast<int32_t>(shard.size),
                     .dcp_index = parts.config.dcp_index()});
  }
  return pages;
}

double RankGroup::last_build_us() const {
  return state_->members[0].rank->last_build_us();
}

}  // namespace perigee
