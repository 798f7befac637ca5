// constraint_bench [--mask-us N] [--forward-ms N]: tokens a second of constrained and of free requests, by rows of a
// step.
//
// Engine and rank are real, with a vocabulary of 163,840 ids. The model is not: its forward pass takes a given time and
// gives every row the same random logits. The constraint stands for a grammar: it takes N us a mask, and allows half
// of the ids. So the figures are those of everything around grammars: planning, messages, threads, sampling under a
// mask. Columns: all free; all constrained; half of each, and what the free ones get then, in tokens a second of one
// request.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "engine/engine.h"

namespace perigee {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int32_t kVocabulary = 163840, kPrompt = 64, kWarmup = 20;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

class TimedModel final : public Model {
 public:
  explicit TimedModel(double forward_ms) : forward_ms_(forward_ms), logits_(kVocabulary) {
    info_.vocab = kVocabulary;
    info_.max_positions = 8192;
    for (size_t i = 0; i < logits_.size(); ++i) logits_[i] = static_cast<float>(random_unit(1, i)) * 20;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override { return {CacheGroup::latent(1, 16, 0, format)}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }
  // Sleeps, as the host of a GPU does.
  ModelOutput forward(const Batch& batch, Ops& ops, const PagePool&) const override {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(forward_ms_));
    const Tensor logits = ops.arena().tensor(DType::kF32, std::ssize(batch.logit_rows), kVocabulary);
    for (int64_t i = 0; i < logits.rows; ++i) std::memcpy(logits.row<float>(i), logits_.data(), 4 * logits_.size());
    return {.logits = logits};
  }

 private:
  double forward_ms_;
  std::vector<float> logits_;
  ModelInfo info_;
};

class TimedConstraint final : public Constraint {
 public:
  explicit TimedConstraint(double mask_us) : mask_us_(mask_us) {}
  std::unique_ptr<ConstraintState> begin() const override { return std::make_unique<State>(mask_us_); }
  int32_t shortest() const override { return 1; }

 private:
  struct State final : ConstraintState {
    explicit State(double us) : mask_us(us) {}
    bool accept(int32_t) override { return true; }
    void masks(std::span<const int32_t> drafts, int32_t, int64_t words, uint32_t* out) override {
      for (size_t place = 0; place <= drafts.size(); ++place, out += words) {
        const Clock::time_point begin = Clock::now();
        std::fill_n(out, words, 0x55555555u);
        while (us_since(begin) < mask_us) {
        }
      }
    }
    double mask_us;
  };
  double mask_us_;
};

struct Rates {
  double all = 0, free = 0;  // tokens a second: of all requests; of a free one
};

// The first request counts the steps; all have begun by then.
Rates measure(int32_t num_free, int32_t num_constrained, double mask_us, double forward_ms, float temperature) {
  EngineConfig config;
  config.rank.make_model = [forward_ms](Ops&) { return std::make_unique<TimedModel>(forward_ms); };
  config.rank.cache_bytes = 64 << 20;
  config.rank.load.path = "models/tiny-k2";
  config.rank.limits.max_sequences = 64;
  config.rank.limits.max_step_tokens = 8192;
  config.scheduling.max_model_len = 8192;
  const auto engine = Engine::create(config);
  CHECK(engine.ok(), engine.error().message);
  const int32_t rows = num_free + num_constrained, num_steps = rows > 16 ? 60 : 200;
  std::promise<void> done;
  int32_t num_tokens = 0;
  Clock::time_point begin;
  double us = 0;
  const auto counts = [&](OutputChunk&& chunk) {
    ++num_tokens;
    if (num_tokens == kWarmup) begin = Clock::now();
    if (num_tokens == kWarmup + num_steps) us = us_since(begin);
    if (chunk.finish) done.set_value();
  };
  for (int32_t i = 0; i < rows; ++i) {
    EngineRequest request;
    request.prompt = std::make_shared<const std::vector<int32_t>>(kPrompt, i);
    request.sampling.temperature = temperature;
    request.sampling.max_tokens = kWarmup + num_steps + 8;
    if (i >= num_free) request.constraint = std::make_shared<TimedConstraint>(mask_us);
    const OutputSink sink = i == 0 ? OutputSink(counts) : OutputSink([](OutputChunk&&) {});
    CHECK((*engine)->submit(request, sink).ok());
  }
  done.get_future().wait();
  (*engine)->shutdown();
  const double steps_per_s = 1e6 * num_steps / us;
  return {.all = steps_per_s * rows, .free = num_free > 0 ? steps_per_s : 0};
}

int run(double mask_us, double forward_ms) {
  std::printf("%g us a mask, forward pass %g ms\n", mask_us, forward_ms);
  for (const float temperature : {0.0f, 1.0f})
    for (const int32_t rows : {1, 16, 64}) {
      const Rates free = measure(rows, 0, mask_us, forward_ms, temperature);
      const Rates constrained = measure(0, rows, mask_us, forward_ms, temperature);
      std::printf("temperature %g, %2d rows: free %8.1f tok/s, constrained %8.1f (%.3f)", temperature, rows, free.all,
                  constrained.all, constrained.all / free.all);
      if (rows > 1) {
        const Rates half = measure(rows / 2, rows / 2, mask_us, forward_ms, temperature);
        std::printf(", beside as many constrained ones a free one %.3f", half.free / free.free);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  double mask_us = 40, forward_ms = 10;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string_view(argv[i]) == "--mask-us") mask_us = std::atof(argv[i + 1]);
    if (std::string_view(argv[i]) == "--forward-ms") forward_ms = std::atof(argv[i + 1]);
  }
  return perigee::run(mask_us, forward_ms);
}
