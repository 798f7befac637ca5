// engine_bench [--steps N]: host time of a decode step with 64 sequences, engine and one rank together.
//
// The rank is real but for its model, which computes nothing: its forward pass returns at once (hot), or first sweeps
// more memory than the caches hold (cold), as in a server whose host does other things while a device works at a step.
// Columns: the engine's own figure (EngineStats::host_step_us: scheduler, plan, batch; the rest is counted by neither),
// and the processor time of the engine's thread for a whole step, deliveries included. Sinks either read their chunk or
// hand it to another thread as the server's do.

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <future>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace perigee {
namespace {

constexpr int32_t kSequences = 64, kPrompt = 512, kWarmup = 70;

double thread_cpu_us() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

class IdleModel final : public Model {
 public:
  explicit IdleModel(bool cold) : swept_(cold ? 96u << 20 : 0) {
    info_.vocab = 16;
    info_.max_positions = 8192;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override { return {CacheGroup::latent(1, 16, 0, format)}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }
  ModelOutput forward(const Batch& batch, Ops& ops, const PagePool&) const override {
    for (size_t i = 0; i < swept_.size(); i += 64) ++swept_[i];
    const Tensor logits = ops.arena().tensor(DType::kF32, std::ssize(batch.logit_rows), info_.vocab);
    for (int64_t i = 0; i < logits.rows; ++i) std::fill_n(logits.row<float>(i), info_.vocab, 0.0f);
    return {.logits = logits};
  }

 private:
  mutable std::vector<uint8_t> swept_;
  ModelInfo info_;
};

// Where the server's sinks leave their chunks: a thread that runs what is posted.
class Loop {
 public:
  void post(std::function<void()> work) { boost::asio::post(context_, std::move(work)); }
  ~Loop() {
    context_.stop();
    thread_.join();
  }

 private:
  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{context_.get_executor()};
  std::thread thread_{[this] { context_.run(); }};
};

double percentile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(fraction * static_cast<double>(values.size() - 1))];
}

struct Run {
  std::vector<double> host_us;  // the gauge, now and then
  double engine_cpu_us = 0;
};

Run run(bool cold, bool posts, int32_t num_steps) {
  EngineConfig config;
  config.rank.make_model = [cold](Ops&) { return std::make_unique<IdleModel>(cold); };
  config.rank.cache_bytes = 64 << 20;
  config.rank.load.path = "models/tiny-k2";
  config.rank.limits.max_sequences = kSequences;
  config.rank.limits.max_step_tokens = 8192;
  config.scheduling.max_model_len = 8192;
  const auto engine = Engine::create(config);
  CHECK(engine.ok(), engine.error().message);

  Loop loop;
  Run out;
  std::promise<void> all_submitted, done;
  int32_t num_tokens = 0;
  double begin_us = 0, end_us = 0;
  std::atomic<int64_t> num_handled{0};
  const auto handle = [&num_handled](const OutputChunk& chunk) { num_handled += std::ssize(chunk.ids); };
  const auto deliver = [&, posts](OutputChunk&& chunk) {
    if (!posts) return handle(chunk);
    const auto held = std::make_shared<OutputChunk>(std::move(chunk));
    std::function<void()> work = [&handle, held] { handle(*held); };
    loop.post([work = std::move(work)] { work(); });
  };
  const auto leader = [&](OutputChunk&& chunk) {
    if (num_tokens == 0) all_submitted.get_future().wait();
    ++num_tokens;
    if (num_tokens == kWarmup) begin_us = thread_cpu_us();
    if (num_tokens == kWarmup + num_steps) end_us = thread_cpu_us();
    if (num_tokens > kWarmup && num_tokens % 8 == 0) out.host_us.push_back((*engine)->stats().host_step_us);
    const bool last = chunk.finish.has_value();
    deliver(std::move(chunk));
    if (last) done.set_value();
  };
  for (int32_t i = 0; i < kSequences; ++i) {
    EngineRequest request;
    request.prompt = std::make_shared<const std::vector<int32_t>>(kPrompt, i);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = kWarmup + num_steps + 8;
    request.sampling.stop_ids = {1, 2, 3};
    CHECK((i == 0 ? (*engine)->submit(request, leader) : (*engine)->submit(request, deliver)).ok());
  }
  all_submitted.set_value();
  done.get_future().wait();
  (*engine)->shutdown();
  out.engine_cpu_us = (end_us - begin_us) / num_steps;
  return out;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  const int32_t num_steps = argc > 2 && std::string_view(argv[1]) == "--steps" ? std::atoi(argv[2]) : 400;
  for (const bool cold : {false, true})
    for (const bool posts : {false, true}) {
      const perigee::Run run = perigee::run(cold, posts, num_steps);
      std::printf(
          "%s caches, sinks that %s: host time %6.1f us a step (median of the gauge; least %6.1f), CPU of the "
          "engine's thread %6.1f us\n",
          cold ? "cold" : "hot", posts ? "post" : "read", perigee::percentile(run.host_us, 0.5),
          perigee::percentile(run.host_us, 0), run.engine_cpu_us);
    }
  return 0;
}
