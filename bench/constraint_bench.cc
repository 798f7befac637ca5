// constraint_bench [--mask-us N] [--forward-ms N] [--temperature T] [--model FOLDER] [--device cpu|cuda] [--drafts K]:
// tokens a second of constrained and of free requests, by rows of a step.
//
// Engine and rank are real. Without a folder the model is not: it has a vocabulary of 163,840 ids, its forward pass
// takes a given time and gives every row the same random logits. With a folder it is that model with random weights,
// and drafts are looked up in the text. The constraint stands for a grammar: it takes N us a mask, and allows every
// other id, which is the slowest mask to sample under. So the figures are those of everything around grammars:
// planning, messages, threads, uploads, sampling under a mask. Columns: all free; all constrained; half of each, and
// what the free ones get then, in tokens a second of one request. Each is the best of three runs.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/check.h"
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

struct Options {
  double mask_us = 40, forward_ms = 10;
  std::string model;
  Device device = Device::kCpu;
  int32_t num_drafts = 0;
  float temperature = 0;
};

// From the first request's token kWarmup on, when all have begun.
Rates measure_once(const Options& options, int32_t num_free, int32_t num_constrained) {
  EngineConfig config;
  config.rank.device = options.device;
  config.rank.cache_bytes = options.model.empty() ? 64 << 20 : int64_t{4} << 30;
  config.rank.load.path = options.model;
  config.rank.load.format = LoadFormat::kDummy;
  if (options.model.empty()) {
    config.rank.make_model = [ms = options.forward_ms](Ops&) { return std::make_unique<TimedModel>(ms); };
    config.rank.load.path = "models/tiny-k2";
  }
  config.rank.limits.num_drafts = options.num_drafts;
  config.rank.limits.max_sequences = 64;
  config.rank.limits.max_step_tokens = 8192;
  config.scheduling.max_model_len = 8192;
  const auto engine = Engine::create(config);
  CHECK(engine.ok(), engine.error().message);
  const int32_t rows = num_free + num_constrained, most = options.device == Device::kCpu && rows > 16 ? 60 : 200;
  std::promise<void> done;
  int64_t first_tokens = 0, all_tokens = 0, free_tokens = 0;  // the last two while it is measured
  Clock::time_point begin;
  double us = 0;
  const auto count = [&](int32_t request, const OutputChunk& chunk) {  // the engine's thread
    const auto tokens = static_cast<int64_t>(chunk.ids.size());
    if (first_tokens >= kWarmup && us == 0) {
      all_tokens += tokens;
      free_tokens += request < num_free ? tokens : 0;
    }
    if (request != 0) return;
    const bool began = first_tokens >= kWarmup;
    first_tokens += tokens;
    if (!began && first_tokens >= kWarmup) begin = Clock::now();
    if (us == 0 && first_tokens >= kWarmup + most) us = us_since(begin);
    if (chunk.finish) done.set_value();
  };
  for (int32_t i = 0; i < rows; ++i) {
    EngineRequest request;
    request.prompt = std::make_shared<const std::vector<int32_t>>(kPrompt, i);
    request.sampling.temperature = options.temperature;
    request.sampling.max_tokens = kWarmup + most + 8;
    if (i >= num_free) request.constraint = std::make_shared<TimedConstraint>(options.mask_us);
    CHECK((*engine)->submit(request, [&count, i](OutputChunk&& chunk) { count(i, chunk); }).ok());
  }
  done.get_future().wait();
  (*engine)->shutdown();
  const auto rate = [&](int64_t tokens) { return 1e6 * static_cast<double>(tokens) / us; };
  return {.all = rate(all_tokens), .free = num_free > 0 ? rate(free_tokens) / num_free : 0};
}

Rates measure(const Options& options, int32_t num_free, int32_t num_constrained) {
  Rates best;
  for (int i = 0; i < 3; ++i)
    if (const Rates one = measure_once(options, num_free, num_constrained); one.all > best.all) best = one;
  return best;
}

int run(const Options& options) {
  const std::string model = options.model.empty() ? str_cat("forward pass ", options.forward_ms, " ms") : options.model;
  std::printf("%s, %d drafts, %g us a mask, temperature %g\n", model.c_str(), options.num_drafts, options.mask_us,
              static_cast<double>(options.temperature));
  for (const int32_t rows : {1, 16, 64}) {
    const Rates free = measure(options, rows, 0), constrained = measure(options, 0, rows);
    std::printf("%2d rows: free %8.1f tok/s, constrained %8.1f (%.3f)", rows, free.all, constrained.all,
                constrained.all / free.all);
    if (rows > 1) {
      const Rates half = measure(options, rows / 2, rows / 2);
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
  perigee::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--mask-us") options.mask_us = std::atof(argv[i + 1]);
    if (name == "--temperature") options.temperature = std::strtof(argv[i + 1], nullptr);
    if (name == "--forward-ms") options.forward_ms = std::atof(argv[i + 1]);
    if (name == "--model") options.model = argv[i + 1];
    if (name == "--device" && argv[i + 1] == std::string_view("cuda")) options.device = perigee::Device::kCuda;
    if (name == "--drafts") options.num_drafts = std::atoi(argv[i + 1]);
  }
  return perigee::run(options);
}
