// Test only: a backend that answers from a script, on a thread of its own, one token per choice and tick.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "server/backend.h"
#include "server/fake_options.h"

namespace perigee {

class FakeBackend : public Backend {
 public:
  explicit FakeBackend(FakeOptions options) : options_(std::move(options)), thread_([this] { run(); }) {}
  ~FakeBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  Result<RequestId> submit(EngineRequest request, OutputSink sink) override {
    const std::lock_guard lock(mutex_);
    if (submitted.size() >= options_.accepts) return Error(Code::kExhausted, "the queue is full");
    const RequestId id(next_id_++);
    for (int32_t i = 0; i < request.n; ++i) {
      choices_.push_back({id, i, request, sink, options_.reply(*request.prompt), system_clock().now_s()});
      prompt_tokens_ += std::ssize(*request.prompt);
      cached_tokens_ += cached(choices_.back());
    }
    submitted.push_back(std::move(request));
    wake_.notify_all();
    return id;
  }

  void cancel(RequestId id, int32_t choice, FinishReason reason) override {
    const std::lock_guard lock(mutex_);
    ++cancels[reason];
    looks_before_cancel = looks.load();
    for (Choice& each : choices_)
      if (each.id == id && (choice < 0 || each.index == choice)) each.cancelled = reason;
    wake_.notify_all();
  }

  void release(const RemotePrefix& remote) override {
    const std::lock_guard lock(mutex_);
    released.push_back(remote);
    ++num_released;
  }

  EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    ++looks;
    EngineStats stats;
    stats.scheduler.running = static_cast<int32_t>(choices_.size());
    stats.scheduler.generated_tokens = generated_;
    stats.scheduler.prompt_tokens = prompt_tokens_;
    stats.scheduler.cached_prompt_tokens = cached_tokens_;
    stats.stalled_s = stalled_s;
    stats.lost = lost;
    stats.scheduler.checkpoint_pages = 9, stats.scheduler.checkpoints = 3, stats.scheduler.checkpoint_hits = 5;
    stats.scheduler.speculation = {.rows = 10, .drafts = 19, .accepted_at = {6, 2}};
    stats.handovers = HandoverCounts{.leases = {.expired = 3, .held = 2}, .transfers = {.failed = 4, .seconds = 0.5}};
    stats.step_tokens = {.steps = {0, 3}, .tokens = 12};  // three steps of 2 to 8 tokens
    return stats;
  }
  BackendInfo info() const override {
    return {options_.vocab, options_.max_model_len, options_.max_choices, 77, 1,
            {options_.eos}, options_.num_drafts,    options_.takes_leases};
  }

  size_t running() const {
    const std::lock_guard lock(mutex_);
    return choices_.size();
  }
  int num_cancels(FinishReason reason) const {
    const std::lock_guard lock(mutex_);
    return cancels.contains(reason) ? cancels.at(reason) : 0;
  }

  // Ends what `hold_after` began.
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    wake_.notify_all();
  }

  std::vector<EngineRequest> submitted;
  std::vector<RemotePrefix> released;
  std::atomic<size_t> num_released{0};
  std::atomic<double> stalled_s{0};
  std::atomic<bool> lost{false};
  mutable std::atomic<int> looks{0}, looks_before_cancel{0};  // how often stats() was asked for; the newest cancel

 private:
  struct Choice {
    RequestId id;
    int32_t index;
    EngineRequest request;
    OutputSink sink;
    std::vector<int32_t> reply;
    double scheduled_s = 0;
    size_t done = 0;
    std::optional<FinishReason> cancelled = std::nullopt;
    bool ended = false, announced = false;
  };

  // A made-up score: token id has -id/100, the two best are ids 1 and 2.
  static TokenLogprobs score(int32_t id, int32_t num_top) {
    TokenLogprobs out{.id = id, .logprob = -static_cast<float>(id) / 100.0f, .rank = id, .top = {}};
    for (int32_t i = 1; i <= num_top; ++i) out.top.emplace_back(i, -static_cast<float>(i) / 100.0f);
    return out;
  }

  // As of an engine where every prompt begins with one cached token: later choices find all but the last.
  static int32_t cached(const Choice& choice) {
    return choice.index == 0 ? 1 : static_cast<int32_t>(choice.request.prompt->size()) - 1;
  }

  OutputChunk next_chunk(Choice& choice) {
    if (choice.request.lease == LeaseWish::kFromStart && choice.index == 0 && !std::exchange(choice.announced, true))
      return {.lease = fake_lease()};
    const SamplingParams& sampling = choice.request.sampling;
    OutputChunk chunk;
    chunk.choice = choice.index;
    chunk.num_cached_tokens = cached(choice);
    chunk.scheduled_s = choice.scheduled_s;
    if (choice.done == 0 && sampling.prompt_logprobs >= 0)
      for (size_t i = 1; i < choice.request.prompt->size(); ++i)
        chunk.prompt_logprobs.push_back(score((*choice.request.prompt)[i], sampling.prompt_logprobs));
    if (choice.cancelled) chunk.finish = choice.cancelled;
    for (int32_t i = 0; i < options_.tokens_per_chunk && !chunk.finish; ++i) {
      const bool over = choice.done >= choice.reply.size();
      const int32_t id = over ? options_.eos : choice.reply[choice.done];
      ++choice.done;
      ++generated_;
      chunk.ids.push_back(id);
      if (sampling.logprobs >= 0) chunk.logprobs.push_back(score(id, sampling.logprobs));
      if (std::find(sampling.stop_ids.begin(), sampling.stop_ids.end(), id) != sampling.stop_ids.end()) {
        chunk.finish = FinishReason::kStop;
        chunk.stop_id = id;
      } else if (static_cast<int32_t>(choice.done) == options_.fail_after) {
        chunk.finish = FinishReason::kError;
        chunk.error = "planted failure";
      } else if (static_cast<int32_t>(choice.done) >= sampling.max_tokens) {
        chunk.finish = FinishReason::kLength;
      }
    }
    if (chunk.finish && choice.request.lease == LeaseWish::kAtEnd && choice.index == 0) chunk.lease = fake_lease();
    return chunk;
  }

  bool goes_on(const Choice& choice) const {
    return released_ || choice.cancelled || choice.done < static_cast<size_t>(options_.hold_after);
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || std::ranges::any_of(choices_, [&](auto& c) { return goes_on(c); }); });
      if (stop_) return;
      std::vector<std::pair<OutputSink, OutputChunk>> out;
      for (Choice& choice : choices_) {
        if (!goes_on(choice)) continue;
        out.emplace_back(choice.sink, next_chunk(choice));
        choice.ended = out.back().second.finish.has_value();
      }
      std::erase_if(choices_, [](const Choice& choice) { return choice.ended; });
      lock.unlock();
      for (auto& [sink, chunk] : out) sink(std::move(chunk));
      out.clear();
      if (options_.tick_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(options_.tick_s));
      lock.lock();
    }
  }

  const FakeOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Choice> choices_;
  std::map<FinishReason, int> cancels;
  int64_t next_id_ = 0;
  int64_t generated_ = 0, prompt_tokens_ = 0, cached_tokens_ = 0;
  bool released_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace perigee
