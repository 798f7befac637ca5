// Test only: a draft with made-up weights beside its target, on `ref`, and passes of one sequence.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/temp_folder.h"
#include "model/eagle3.h"
#include "model/test_weights.h"

namespace perigee {

// For targets like tiny_config() and tiny_hybrid_config(). `keys`: more of them, each with a comma after it.
inline Json draft_config(const std::string& keys) {
  return json("{" + keys + R"("architectures": ["Eagle3DeepseekV2ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 96, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 256,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}})");
}

// A draft of Llama's kind: the same sizes, keys and values of one head for two.
inline Json llama_draft_config(const std::string& keys) {
  return json("{" + keys + R"("architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 96, "hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 256,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}})");
}

// A d2t of so many offsets, as a file has it: drafted ids are each third of the target's.
inline StoredTensor each_third_id(int64_t count) {
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < count; ++i) offsets.push_back(2 * i);
  return {"d2t", "I64", {count}, bytes_of(offsets.data(), count * 8)};
}

class DraftWorld {
 public:
  // What a pass gives, of each of its rows.
  struct Pass {
    std::vector<std::vector<double>> taps;
    std::vector<std::vector<float>> logits, hidden;
  };

  DraftWorld(const Json& target, const Json& draft) : ops_(make_ref_ops()) {
    target_folder_.write("config.json", dump_json(target));
    draft_folder_.write("config.json", dump_json(draft));
    auto config = parse_config(target, Json());
    CHECK(config.ok(), config.error().message);
    target_config_ = std::move(*config);
    auto model = load_model({.path = target_folder_.path(), .format = LoadFormat::kDummy}, *ops_);
    CHECK(model.ok(), model.error().message);
    target_ = std::move(*model);
    auto loaded = Eagle3::load({.path = draft_folder_.path(), .format = LoadFormat::kDummy}, *target_, *ops_);
    CHECK(loaded.ok(), loaded.error().message);
    draft_ = std::move(*loaded);
    target_->tap(draft_->config().taps);
    const CacheLayout layout = draft_->cache_layout(target_->cache_layout(LatentFormat::kF32), LatentFormat::kF32, 1);
    num_state_pages_ = static_cast<int32_t>(layout.state_pages());
    for (int32_t page = num_state_pages_ + kBlocks - 1; page >= 0; --page) pages_.push_back(page);
    memory_ = Buffer(static_cast<size_t>(std::ssize(pages_) * layout.bytes_per_page()));
    ring_ = Buffer(static_cast<size_t>(layout.ring_slot_bytes(1)));
    pool_ = {.base = memory_.data(),
             .layout = layout,
             .ring = ring_.data(),
             .draft_base = memory_.data() + std::ssize(pages_) * layout.page_bytes()};
  }

  const Eagle3& draft() const { return *draft_; }
  const Model& target() const { return *target_; }
  const ModelConfig& target_config() const { return target_config_; }
  Ops& ops() const { return *ops_; }

  // The target runs ids [begin, end), which is where it stands, and the draft after it.
  Pass first_pass(const std::vector<int32_t>& ids, int32_t begin, int32_t end) {
    ops_->begin_step();
    const Rows run(*this, {ids.begin() + begin, ids.begin() + end}, begin);
    const Tensor taps = target_->forward(run.batch(), *ops_, pool_).taps;
    const Rows next(*this, {ids.begin() + begin + 1, ids.begin() + end + 1}, begin);
    Pass pass = passed(draft_->forward(next.batch(), draft_->fuse(taps, *ops_), *ops_, pool_));
    for (int64_t r = 0; r < taps.rows; ++r)
      pass.taps.emplace_back(taps.row<const float>(r), taps.row<const float>(r) + taps.cols);
    return pass;
  }
  // The draft runs one token with what its last pass has left.
  Pass next_pass(const std::vector<float>& hidden, int32_t token, int32_t position) {
    const Tensor given = ops_->arena().tensor(DType::kF32, 1, std::ssize(hidden));
    std::copy(hidden.begin(), hidden.end(), given.row<float>(0));
    const Rows run(*this, {token}, position);
    return passed(draft_->forward(run.batch(), given, *ops_, pool_));
  }
  const std::vector<float>& last_hidden() const { return last_hidden_; }

 private:
  static constexpr int32_t kBlocks = 4;

  class Rows {
   public:
    Rows(const DraftWorld& world, std::vector<int32_t> tokens, int32_t position) : tokens_(std::move(tokens)) {
      const auto count = static_cast<int32_t>(tokens_.size());
      for (int32_t i = 0; i < count; ++i) {
        positions_.push_back(position + i);
        rows_.push_back(i);
      }
      sequence_ = {.num_tokens = count,
                   .position = position,
                   .pages = world.pages_.data() + world.num_state_pages_,
                   .state_pages = world.pages_.data(),
                   .committed = position,
                   .commit_all = true};
    }
    Batch batch() const {
      return {.tokens = tokens_, .positions = positions_, .sequences = std::span(&sequence_, 1), .logit_rows = rows_};
    }

   private:
    std::vector<int32_t> tokens_, positions_, rows_;
    SequenceRows sequence_;
  };

  Pass passed(const Eagle3::Output& out) {
    Pass pass;
    for (int64_t r = 0; r < out.logits.rows; ++r) {
      pass.logits.emplace_back(out.logits.row<const float>(r), out.logits.row<const float>(r) + out.logits.cols);
      pass.hidden.emplace_back(out.hidden.row<const float>(r), out.hidden.row<const float>(r) + out.hidden.cols);
    }
    last_hidden_ = pass.hidden.back();
    return pass;
  }

  TempFolder target_folder_, draft_folder_;
  std::unique_ptr<Ops> ops_;
  ModelConfig target_config_;
  std::unique_ptr<Model> target_;
  std::unique_ptr<Eagle3> draft_;
  std::vector<int32_t> pages_;
  int32_t num_state_pages_ = 0;
  Buffer memory_, ring_;
  PagePool pool_;
  std::vector<float> last_hidden_;
};

}  // namespace perigee
