// Time of one Kimi-Linear layer by context: Kimi Delta Attention, whose state has a fixed size, beside latent
// attention, whose cache grows. Two models of six layers of one kind each, dummy weights, all but the attention made
// small.
//
// usage: layers_bench [num_threads] [longest context]
//
// Prints a line of JSON for each measurement; tools/plot_layers.py draws them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include "base/json.h"
#include "model/model.h"

namespace perigee {
namespace {

constexpr int64_t kLayers = 6;  // whose weights together are more than a last-level cache holds
constexpr int32_t kRingTokens = 1;

// Attention of Kimi-Linear-48B-A3B in every layer, of one kind.
Json config_of(bool kda) {
  std::string all;
  for (int64_t i = 1; i <= kLayers; ++i) all += str_cat(i > 1 ? "," : "", i);
  const auto json = parse_json(str_cat(
      R"({"architectures": ["KimiLinearForCausalLM"], "vocab_size": 64, "hidden_size": 2304, "num_hidden_layers": )",
      kLayers, R"(, "num_attention_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "mla_use_nope": true, "intermediate_size": 32, "first_k_dense_replace": )",
      kLayers, R"(, "moe_intermediate_size": 32, "num_experts": 1, "num_experts_per_token": 1, "moe_renormalize": true,
      "routed_scaling_factor": 1, "rms_norm_eps": 1e-5, "model_max_length": 1048576, "linear_attn_config": {
      "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "kda_layers": [)",
      kda ? all : "", R"(], "full_attn_layers": [)", kda ? "" : all, "]}}"));
  CHECK(json.ok(), json.error().message);
  return *json;
}

class Layers {
 public:
  Layers(Ops& ops, bool kda, int64_t longest) : ops_(ops) {
    const auto folder = std::filesystem::temp_directory_path() / (kda ? "perigee_kda_layers" : "perigee_mla_layers");
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "config.json") << dump_json(config_of(kda));
    LoadOptions options;
    options.path = folder;
    options.format = LoadFormat::kDummy;
    auto model = load_model(options, ops);
    CHECK(model.ok(), model.error().message);
    model_ = std::move(*model);
    const CacheLayout layout = model_->cache_layout(latent_format(ops.activation_dtype()));
    const int64_t blocks = layout.latent().layers > 0 ? longest / 64 + 1 : 0;
    memory_ = Buffer(static_cast<size_t>((layout.state_pages() + blocks) * layout.page_bytes()));
    ring_ = Buffer(static_cast<size_t>(layout.ring_slot_bytes(kRingTokens)));
    pool_ = {.base = memory_.data(), .layout = layout, .ring = ring_.data(), .ring_tokens = kRingTokens};
    pages_.resize(static_cast<size_t>(layout.state_pages() + std::max<int64_t>(blocks, longest / 64 + 1)));
    std::iota(pages_.begin(), pages_.end(), 0);
  }

  // Seconds of one layer, the best of several runs, that runs `num_tokens` tokens after `context` others.
  double seconds(int32_t num_tokens, int32_t context) {
    std::vector<int32_t> tokens(static_cast<size_t>(num_tokens), 7), positions(tokens.size());
    std::iota(positions.begin(), positions.end(), context);
    const bool prefill = num_tokens > 1;
    const MlaForm prompt = model_->choose_form(TokenKind::kPrompt, num_tokens, context);
    const SequenceRows sequence{.num_tokens = num_tokens,
                                .position = context,
                                .pages = pages_.data() + pool_.layout.state_pages(),
                                .form = prefill ? prompt : MlaForm::kAbsorbed,
                                .state_pages = pages_.data(),
                                .committed = prefill ? context : context - 1,
                                .commit_all = prefill};
    const std::vector<int32_t> last = {num_tokens - 1};
    double best = 1e300;
    int runs = 0;
    for (double total = 0; total < 0.5 || runs < 3; ++runs) {
      const auto begin = std::chrono::steady_clock::now();
      ops_.begin_step();
      model_->forward(
          {.tokens = tokens, .positions = positions, .sequences = std::span(&sequence, 1), .logit_rows = last}, ops_,
          pool_);
      const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      best = std::min(best, taken);
      total += taken;
    }
    return best / kLayers;
  }

  const Model& model() const { return *model_; }

 private:
  Ops& ops_;
  std::unique_ptr<Model> model_;
  Buffer memory_, ring_;
  PagePool pool_;
  std::vector<int32_t> pages_;
};

int run(int num_threads, int32_t longest) {
  const auto ops = make_cpu_ops({.num_threads = num_threads});
  if (!ops.ok()) {
    std::fprintf(stderr, "%s\n", ops.error().message.c_str());
    return 1;
  }
  for (const bool kda : {true, false}) {
    Layers layers(**ops, kda, longest + 512);
    for (const int32_t num_tokens : {1, 512}) {
      for (int32_t context = 1024; context <= (num_tokens == 1 ? longest : longest / 4); context *= 2) {
        std::printf("{\"layer\": \"%s\", \"tokens\": %d, \"context\": %d, \"us\": %.1f, \"weight_mb\": %.1f}\n",
                    kda ? "KDA" : "MLA", num_tokens, context, layers.seconds(num_tokens, context) * 1e6,
                    static_cast<double>(layers.model().info().weight_bytes) * 1e-6 / kLayers);
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  return perigee::run(std::max(threads, 1), argc > 2 ? std::atoi(argv[2]) : 65536);
}
