#include "engine/engine.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>
#include <unordered_map>
#include <variant>

#include "base/clock.h"
#include "base/queue.h"
#include "base/rng.h"
#include "engine/handovers.h"
#include "engine/mask_maker.h"
#include "engine/rank_group.h"
#include "model/config.h"

namespace perigee {
namespace {

struct SubmitMessage {
  RequestId request;
  EngineRequest body;
  OutputSink sink;
  double arrival_s = 0;
};
struct CancelMessage {
  RequestId request;
  int32_t choice = -1;
  FinishReason reason = FinishReason::kCancelled;
};
struct StopMessage {};
using Message = std::variant<SubmitMessage, CancelMessage, Step, StopMessage, LeaseOver, ImportOver>;

struct LiveRequest {
  RequestId id;
  OutputSink sink;
  SequenceId first_sequence;  // choice i is sequence first + i
  int32_t n = 1;
  int32_t live_choices = 1;
  double scheduled_s = 0;  // 0: not yet
};

constexpr double kIdleWaitS = 1.0;
constexpr double kBusyWaitS = 0.05;       // how late a deadline of a waiting sequence may be noticed
constexpr int32_t kPagesPerCheck = 2048;  // whenever there is nothing to run: a request that comes then waits for it

Error shutting_down() {
  return Error(Code::kUnavailable, "the engine is shutting down");
}

// The mean of the newest values.
class RecentMean {
 public:
  void add(double value) { values_[count_++ % values_.size()] = value; }
  double mean() const {
    const size_t n = std::min(count_, values_.size());
    return n == 0 ? 0 : std::accumulate(values_.data(), values_.data() + n, 0.0) / static_cast<double>(n);
  }

 private:
  std::array<double, 64> values_ = {};
  size_t count_ = 0;
};

// Choices that a submission has taken, and gives back unless it keeps them.
class TakenChoices {
 public:
  TakenChoices(std::atomic<int64_t>& live, int32_t n) : live_(live), n_(n), live_before_(live.fetch_add(n)) {}
  TakenChoices(const TakenChoices&) = delete;
  TakenChoices& operator=(const TakenChoices&) = delete;
  ~TakenChoices() {
    if (!kept_) live_.fetch_sub(n_);
  }
  int64_t live() const { return live_before_ + n_; }  // with them
  void keep() { kept_ = true; }

 private:
  std::atomic<int64_t>& live_;
  const int32_t n_;
  const int64_t live_before_;
  bool kept_ = false;
};

}  // namespace

struct Engine::Impl {
  EngineConfig config;
  int32_t max_model_len = 0;
  CacheSize cache_size;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<Scheduler> scheduler;
  std::unique_ptr<Handovers> handovers;  // null without prefill/decode separation
  BoundedQueue<Message> mailbox{1 << 16};
  std::atomic<int64_t> next_request{0};
  std::atomic<int64_t> live_choices{0};
  std::atomic<bool> stopping{false};
  std::atomic<bool> lost{false};  // the device
  std::thread thread;

  // Engine thread only.
  std::unordered_map<RequestId, LiveRequest> requests;
  std::unordered_map<SequenceId, LiveRequest*> owners;
  int64_t next_sequence = 0;
  RecentMean host_us;
  StepTokens step_tokens;
  // Memory that serves again, so that a step allocates nothing.
  std::vector<StepResult> spare_results;
  std::vector<SequenceUpdate> updates;
  OutputChunk chunk;  // but for what a sink has taken out of it
  MaskMaker mask_maker;
  std::vector<MaskJob> mask_jobs;
  std::vector<SequenceId> stuck;

  mutable std::mutex stats_mutex;
  EngineStats stats;
  double progress_s = 0;  // the newest step, or the last time that there was nothing to do

  Result<RequestId> accept(EngineRequest request, OutputSink sink);
  void run();
  void handle(Message&& message);
  void finish(Step&& step);
  void submit(SubmitMessage&& message);
  void cancel(const CancelMessage& message);
  void emit_plans();
  void grow_leases();
  void send_masks();
  void note_plan(const StepPlan& plan);
  void dispatch_updates();
  void deliver(SequenceUpdate&& update);
  void end_all(const std::string& why);
  void lose_device(const std::string& why);
  void publish_stats(double host_s, bool stepped);
};

Status check_positions(const EngineConfig& config) {
  const int32_t length = config.scheduling.max_model_len;
  if (length == 0) return {};
  if (length < 2)
    return bad_input(
        fmt::format("--max-model-len {} has no room for a prompt and an output: raise it, or leave it out", length),
        "max-model-len");
  ASSIGN_OR_RETURN(const ModelConfig model, read_config(config.rank.load.path));
  if (length > model.max_positions)
    return bad_input(fmt::format("--max-model-len {} is over the model's {} positions: lower it, or leave it out",
                                 length, model.max_positions),
                     "max-model-len");
  return {};
}

Result<std::unique_ptr<Engine>> Engine::create(const EngineConfig& config) {
  RETURN_IF_ERROR(check_positions(config));
  RETURN_IF_ERROR(Handovers::check_config(config));
  return create(config, [](const EngineConfig& same, OnStep on_step) {
    RankGroupConfig group{.rank = same.rank, .timeouts = same.rank_timeouts, .compare = same.selfcheck};
    group.rank.shared_pages = same.handover.any();
    group.rank.transfer_bytes = Handovers::gpu_bytes(same.handover);
    return RankGroup::create(group, std::move(on_step));
  });
}

Result<std::unique_ptr<Engine>> Engine::create(const EngineConfig& config, const MakeExecutor& make_executor) {
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  Impl* p = impl.get();
  ASSIGN_OR_RETURN(impl->executor,
                   make_executor(config, [p](Step&& step) { p->mailbox.push_reserved(Message(std::move(step))); }));
  const ModelInfo& info = impl->executor->model();
  const int32_t state_pages = impl->executor->state_pages();
  SchedulerConfig scheduling{config.rank.limits, config.scheduling};
  scheduling.num_pages = impl->executor->num_pages();
  scheduling.state_pages = state_pages;
  impl->cache_size = scheduling.cache_size();
  const int64_t cache_tokens = impl->cache_size.max_tokens();
  if (scheduling.max_model_len > cache_tokens)
    return bad_input(
        fmt::format(
            "--max-model-len {} does not fit the cache of {} tokens: lower it, or raise --kv-cache-memory-bytes",
            scheduling.max_model_len, cache_tokens),
        "max-model-len");
  if (scheduling.max_model_len == 0)
    scheduling.max_model_len = static_cast<int32_t>(std::min<int64_t>(info.max_positions, cache_tokens));
  scheduling.attention_alignment = state_pages > 0 ? kBlockTokens : 1;
  scheduling.hash_seed = mix64(static_cast<uint64_t>(wall_time_s() * 1e6));
  impl->max_model_len = scheduling.max_model_len;
  RETURN_IF_ERROR(validate(scheduling));
  impl->scheduler = std::make_unique<Scheduler>(scheduling);
  const HandoverPosts posts{.lease = [p](LeaseOver over) { p->mailbox.push_reserved(Message(over)); },
                            .import = [p](ImportOver over) { p->mailbox.push_reserved(Message(std::move(over))); }};
  ASSIGN_OR_RETURN(impl->handovers, Handovers::create(config, *impl->executor, posts));
  impl->updates = impl->scheduler->take_updates();  // room for as many as may come at once
  impl->spare_results.reserve(kMaxPlansInFlight);
  impl->publish_stats(0, false);
  impl->thread = std::thread([p] { p->run(); });
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() {
  shutdown();
}

void Engine::shutdown() {
  if (impl_->stopping.exchange(true)) return;
  impl_->mailbox.push_reserved(Message(StopMessage{}));
  impl_->thread.join();
}

Result<RequestId> Engine::submit(EngineRequest request, OutputSink sink) {
  if (!impl_->handovers && request.lease == LeaseWish::kNone && !request.remote)
    return impl_->accept(std::move(request), std::move(sink));
  if (!impl_->handovers)
    return bad_input("kv_transfer_params: this server shares no caches with others: start it with --kv-transfer-config",
                     "kv_transfer_params");
  const std::optional<RemotePrefix> remote = request.remote;
  const Status status = impl_->handovers->check(request);
  auto id = status.ok() ? impl_->accept(std::move(request), std::move(sink)) : Result<RequestId>(status.error());
  if (!id.ok() && remote) release(*remote);
  return id;
}

void Engine::release(const RemotePrefix& remote) {
  if (impl_->handovers) impl_->handovers->release(remote);
}

Result<RequestId> Engine::Impl::accept(EngineRequest request, OutputSink sink) {
  CHECK(request.n >= 1 && request.prompt != nullptr && !request.prompt->empty(), "an unvalidated request");
  if (stopping) return shutting_down();
  if (lost) return Error(Code::kDeviceLost, "the device is lost");
  const auto num_prompt = static_cast<int64_t>(request.prompt->size());
  if (!scheduler->fits(num_prompt, request.sampling.max_tokens))
    return bad_input(fmt::format("a prompt of {} tokens and max_tokens {} are over the limit of {} tokens together",
                                 num_prompt, request.sampling.max_tokens, max_model_len),
                     "max_tokens");
  const int32_t limit = config.max_choices();
  if (request.n > limit)
    return bad_input(fmt::format("n {} is over the {} sequences that run and wait at once", request.n, limit), "n");
  if (request.constraint && !config.rank.synthetic_rates.empty())
    return bad_input(
        "drafts are accepted at given rates here, whatever they say: no reply can be held to a constraint");
  TakenChoices taken(live_choices, request.n);
  if (taken.live() > limit)
    return Error(Code::kExhausted, fmt::format("the queue is full ({} sequences): try again later", limit));
  const RequestId id(next_request.fetch_add(1));
  SubmitMessage message{
      .request = id, .body = std::move(request), .sink = std::move(sink), .arrival_s = system_clock().now_s()};
  // Closed since the look at `stopping`: nobody reads the mailbox any more.
  if (!mailbox.push_reserved(Message(std::move(message)))) return shutting_down();
  taken.keep();
  return id;
}

void Engine::cancel(RequestId request, int32_t choice, FinishReason reason) {
  impl_->mailbox.push_reserved(Message(CancelMessage{.request = request, .choice = choice, .reason = reason}));
}

EngineStats Engine::stats() const {
  std::lock_guard lock(impl_->stats_mutex);
  EngineStats copy = impl_->stats;
  copy.now_s = system_clock().now_s();
  copy.lost = impl_->lost;
  if (impl_->handovers) copy.handovers = impl_->handovers->counts();
  // Counted at submission, so that an engine thread that hangs before it sees a request counts as stalled too.
  if (impl_->live_choices > 0) copy.stalled_s = std::max(0.0, copy.now_s - impl_->progress_s);
  return copy;
}

const ModelInfo& Engine::model() const {
  return impl_->executor->model();
}
int64_t Engine::weight_bytes() const {
  return impl_->executor->weight_bytes();
}
int32_t Engine::max_model_len() const {
  return impl_->max_model_len;
}
int32_t Engine::max_choices() const {
  return impl_->config.max_choices();
}
int32_t Engine::num_pages() const {
  return impl_->executor->num_pages();
}
int32_t Engine::state_pages() const {
  return impl_->executor->state_pages();
}
bool Engine::takes_leases() const {
  return impl_->config.handover.connect != nullptr;
}

LeaseTable* Engine::leases() {
  return impl_->handovers ? impl_->handovers->leases() : nullptr;
}
int32_t Engine::num_drafts() const {
  return impl_->config.rank.limits.num_drafts;
}
CacheSize Engine::cache_size() const {
  return impl_->cache_size;
}

void Engine::Impl::run() {
  std::vector<Message> messages;
  messages.reserve(2 * kMaxPlansInFlight);
  while (!stopping) {
    messages.clear();
    mailbox.drain(messages, scheduler->idle() ? kIdleWaitS : kBusyWaitS);
    const double begin = system_clock().now_s();
    const int64_t steps_before = scheduler->gauges().steps;
    for (Message& message : messages) handle(std::move(message));
    send_masks();  // first: a device may wait for them
    emit_plans();
    send_masks();
    if (handovers) grow_leases();
    const bool stepped = scheduler->gauges().steps != steps_before;
    publish_stats(system_clock().now_s() - begin, stepped);
    dispatch_updates();
    if (config.selfcheck)
      scheduler->check_integrity();
    else if (scheduler->idle())
      scheduler->check_some(kPagesPerCheck);
  }
  messages.clear();
  mailbox.close();  // what comes later is refused where it is submitted ...
  mailbox.drain(messages, 0);
  for (Message& message : messages) handle(std::move(message));  // ... and what came before is answered below
  if (handovers) grow_leases();
  dispatch_updates();
  end_all(shutting_down().message);
  if (handovers) handovers->close();
  executor.reset();  // joins its threads: no result arrives after this
}

void Engine::Impl::handle(Message&& message) {
  if (auto* step = std::get_if<Step>(&message)) {
    finish(std::move(*step));
  } else if (auto* submitted = std::get_if<SubmitMessage>(&message)) {
    submit(std::move(*submitted));
  } else if (auto* cancelled = std::get_if<CancelMessage>(&message)) {
    cancel(*cancelled);
  } else if (auto* lease = std::get_if<LeaseOver>(&message)) {
    handovers->handle(*lease, *scheduler);
  } else if (auto* import = std::get_if<ImportOver>(&message)) {
    handovers->handle(*import, *scheduler);
  }
}

void Engine::Impl::finish(Step&& step) {
  if (!step.result.device_lost.empty()) return lose_device(step.result.device_lost);
  scheduler->apply(step.result);
  scheduler->give_back(std::move(step.plan));
  spare_results.push_back(std::move(step.result));
}

void Engine::Impl::lose_device(const std::string& why) {
  lost = true;
  dispatch_updates();  // what steps before this one gave
  end_all(fmt::format("device_lost: {}", why));
  if (config.on_device_lost) config.on_device_lost(why);
}

void Engine::Impl::submit(SubmitMessage&& message) {
  const EngineRequest& body = message.body;
  const SequenceId first(next_sequence);
  next_sequence += body.n;
  LiveRequest& request = requests[message.request];
  request = {.id = message.request,
             .sink = std::move(message.sink),
             .first_sequence = first,
             .n = body.n,
             .live_choices = body.n};
  for (int32_t i = 0; i < body.n; ++i) {
    const SequenceId sequence(first.value + i);
    owners.emplace(sequence, &request);
    auto sampling = std::make_shared<SamplingParams>(body.sampling);
    sampling->seed += static_cast<uint64_t>(i);
    Submit submit{
        .sequence = sequence,
        .prompt = body.prompt,
        .sampling = std::move(sampling),
        .priority = body.priority,
        .arrival_s = message.arrival_s,
        .deadline_s = body.timeout_s > 0 ? message.arrival_s + body.timeout_s : 0,
        .cache_salt = body.cache_salt,
        .speculation_max_context = body.speculation_max_context,
        .leader = i > 0 ? first : SequenceId(),
        .constraint = body.constraint,
    };
    if (handovers && i == 0) handovers->prepare(body, sequence, submit);
    scheduler->submit(std::move(submit));
  }
}

void Engine::Impl::cancel(const CancelMessage& message) {
  const auto found = requests.find(message.request);
  if (found == requests.end()) return;
  const LiveRequest& request = found->second;
  for (int32_t i = 0; i < request.n; ++i)
    if (message.choice < 0 || message.choice == i)
      scheduler->cancel({.sequence = SequenceId(request.first_sequence.value + i), .reason = message.reason});
}

void Engine::Impl::emit_plans() {
  if (lost) return end_all("device_lost");  // what was submitted meanwhile
  while (std::optional<StepPlan> plan = scheduler->next_plan(system_clock().now_s())) {
    note_plan(*plan);
    Step step{.plan = std::move(*plan)};
    if (!spare_results.empty()) {
      step.result = std::move(spare_results.back());
      spare_results.pop_back();
    }
    executor->submit(std::move(step));
  }
  if (handovers) handovers->post(scheduler->take_imports());
}

// Before the updates: the stream that is told of a lease ends with one of them.
void Engine::Impl::grow_leases() {
  for (const LeaseGrowth& growth : scheduler->take_lease_growth()) {
    std::optional<RemotePrefix> lease = handovers->grow(growth);
    const auto owner = owners.find(growth.lease->sequence);
    if (!lease || owner == owners.end()) continue;
    OutputChunk announcement;
    announcement.lease = std::move(lease);
    owner->second->sink(std::move(announcement));
  }
  handovers->expire();
}

// A constraint that allows nothing is at fault, and may be anybody's: it ends its own request.
void Engine::Impl::send_masks() {
  const std::optional<StepId> step = scheduler->take_mask_jobs(mask_jobs);
  if (!step || lost) return;
  stuck.clear();
  executor->set_masks(mask_maker.make(*step, mask_jobs, executor->model().vocab, stuck));
  for (const SequenceId sequence : stuck)
    scheduler->cancel({.sequence = sequence,
                       .reason = FinishReason::kError,
                       .error = "the request's constraint allows no token to follow"});
}

void Engine::Impl::note_plan(const StepPlan& plan) {
  const int32_t tokens = plan.num_tokens();
  const auto bucket = std::lower_bound(kStepTokenBounds.begin(), kStepTokenBounds.end(), tokens);
  ++step_tokens.steps[static_cast<size_t>(bucket - kStepTokenBounds.begin())];
  step_tokens.tokens += tokens;
  for (const SequenceStart& start : plan.starts) {
    const auto owner = owners.find(start.sequence);
    CHECK(owner != owners.end(), "sequence ", start.sequence, " is planned and has ended");
    LiveRequest& request = *owner->second;
    if (request.scheduled_s == 0) request.scheduled_s = system_clock().now_s();
  }
}

void Engine::Impl::dispatch_updates() {
  scheduler->take_updates(updates);
  for (SequenceUpdate& update : updates) deliver(std::move(update));
}

void Engine::Impl::deliver(SequenceUpdate&& update) {
  const auto owner = owners.find(update.sequence);
  if (owner == owners.end()) return;
  LiveRequest& request = *owner->second;
  chunk.choice = static_cast<int32_t>(update.sequence.value - request.first_sequence.value);
  chunk.ids.assign(update.ids.begin(), update.ids.end());
  chunk.logprobs = std::move(update.logprobs);
  chunk.prompt_logprobs = std::move(update.prompt_logprobs);
  chunk.finish = update.finish;
  chunk.stop_id = update.stop_id;
  chunk.num_cached_tokens = update.num_cached_tokens;
  chunk.num_preemptions = update.num_preemptions;
  chunk.num_drafts = update.num_drafts;
  chunk.num_accepted = update.num_accepted;
  chunk.scheduled_s = request.scheduled_s;
  chunk.error = std::move(update.error);
  chunk.lease.reset();
  if (handovers && update.finish) chunk.lease = handovers->end(update);
  request.sink(std::move(chunk));
  if (!update.finish) return;
  owners.erase(owner);
  live_choices.fetch_sub(1);
  if (--request.live_choices == 0) requests.erase(RequestId(request.id));
}

void Engine::Impl::end_all(const std::string& why) {
  std::vector<SequenceId> left;
  for (const auto& [sequence, request] : owners) left.push_back(sequence);
  std::sort(left.begin(), left.end());
  for (const SequenceId sequence : left) deliver({.sequence = sequence, .finish = FinishReason::kError, .error = why});
}

void Engine::Impl::publish_stats(double host_s, bool stepped) {
  const SchedulerGauges gauges = scheduler->gauges();
  if (stepped) host_us.add(host_s * 1e6 + executor->last_build_us());
  std::lock_guard lock(stats_mutex);
  stats.scheduler = gauges;
  stats.steps = gauges.steps;
  stats.kv_usage = gauges.total_pages > 0 ? static_cast<double>(gauges.used_pages) / gauges.total_pages : 0;
  const double now_s = system_clock().now_s();
  if (stepped) stats.last_step_s = now_s;
  // Another node is waited for, for as long as src/kv lets it take: no plan is due.
  const bool waits_for_nodes = gauges.plans_in_flight == 0 && gauges.awaiting + gauges.leases > 0;
  if (stepped || waits_for_nodes || scheduler->idle()) progress_s = now_s;
  stats.step_tokens = step_tokens;
  stats.host_step_us = host_us.mean();
}

}  // namespace perigee
