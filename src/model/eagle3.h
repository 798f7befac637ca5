// Eagle3: a draft model of one layer that guesses what its target will say next (EAGLE-3, Li et al. 2025).
//
// It reads hidden states of the target: those that enter three of its layers (Model::tap), fused into one. For the
// token at position p its input is the hidden state of p and the embedding of token p + 1, both normed, side by side;
// its latent attention is twice as wide at its input as at its output. Its first pass runs all tokens that the target
// has just computed; each further one runs its own guess, with the hidden state that its last pass gave. Embedding and
// head are the target's where its files have none.
//
// This version reads drafts with latent attention like their target's (Eagle3DeepseekV2ForCausalLM). Their cache is one
// more layer of the target's blocks, so it is paged, shared, cached and freed with them.
#pragma once

#include <memory>
#include <vector>

#include "model/layer_weights.h"

namespace perigee {

// What config.json says of a draft, checked against its target.
struct Eagle3Config {
  ModelConfig layer;                   // its sizes; of one layer
  std::vector<int32_t> taps;           // layers of the target whose inputs it reads, ascending
  bool norms_each_tap = false;         // fc_norm
  bool norms_all_taps = false;         // norm_before_fc
  bool norms_before_residual = false;  // the residual is the normed hidden state
  bool hands_on_normed = false;        // norm_output: the next pass reads the normed output
};

// Errors name key, found and expected.
Result<Eagle3Config> parse_eagle3_config(const Json& config, const ModelInfo& target);

// Which of the two a draft's files have.
struct OwnEmbeddings {
  bool input = false, output = false;
};
std::vector<TensorSpec> eagle3_tensors(const Eagle3Config& config, OwnEmbeddings own);

class Eagle3 {
 public:
  struct Output {
    Tensor logits;  // f32 [rows of logits, this rank's share of vocab]
    Tensor hidden;  // f32 [rows of logits, H], for the next pass
  };

  // Reads `options.path`; Errors name file, tensor or key. `target` outlives it.
  static Result<std::unique_ptr<Eagle3>> load(const LoadOptions& options, const Model& target, Ops& ops);
  // The same without its weights: see size_model().
  static Result<std::unique_ptr<Eagle3>> size(const LoadOptions& options, const Model& target, WeightPacker& sizes);

  const Eagle3Config& config() const { return config_; }
  int64_t weight_bytes() const { return weight_bytes_; }

  // The fused hidden states, f32 [n, H], of taps wide [n, taps * H].
  Tensor fuse(const Tensor& taps, Ops& ops) const;
  // Runs tokens of which each is one position further in its text than the batch says. `hidden` f32 [n, H] is
  // overwritten. Only the last layer of the pool's latents is read and written.
  Output forward(const Batch& batch, const Tensor& hidden, Ops& ops, const PagePool& pool) const;

 private:
  enum class Numbers : uint8_t { kRead, kNone };
  Eagle3(Eagle3Config config, const Model& target) : config_(std::move(config)), target_(target) {}
  static Result<std::unique_ptr<Eagle3>> make(const LoadOptions& options, const Model& target, WeightPacker& packer,
                                              Numbers numbers);
  void read(WeightReader& reader, OwnEmbeddings own);

  const Eagle3Config config_;
  const Model& target_;
  EmbedWeight own_embedding_;
  LinearWeight own_head_;
  const EmbedWeight* embedding_ = nullptr;
  const LinearWeight* head_ = nullptr;
  std::vector<VectorWeight> tap_norms_;  // of each tap, or of all, or none
  LinearWeight fuse_;
  VectorWeight embedding_norm_, hidden_norm_, norm_;
  MlaWeights mla_;
  FeedForward mlp_;
  int64_t weight_bytes_ = 0;
};

}  // namespace perigee
