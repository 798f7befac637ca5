// Eagle3: a draft model of one layer that guesses what its target will say next (EAGLE-3, Li et al. 2025).
//
// It reads hidden states of the target: those that enter three of its layers (Model::tap), fused into one. For the
// token at position p its input is the hidden state of p and the embedding of token p + 1, both normed, side by side;
// its attention is twice as wide at its input as at its output. Its first pass runs all tokens that the target has just
// computed; each further one runs its own guess, with the hidden state that its last pass gave. Embedding and head are
// the target's where its files have none. It may draft over a part of the vocabulary alone.
//
// Two kinds, by their attention: latent like the target's (Eagle3DeepseekV2ForCausalLM), or Llama's
// (LlamaForCausalLMEagle3), with keys and values by head, which are divided among the ranks as its heads are.
//
// Two places for its cache (ADR 0015). Latents are one more layer of the target's blocks: they are paged, shared,
// cached and freed with them. In an arena of its own, where each page of the target's has its block, a rank has those
// of all tokens, whichever rank of a dcp group has the target's: keys and values by head, latents in another format
// than the target's, and those of a layer that each rank of a dcp group has whole.
//
// Its layer is divided among the ranks as its target's layers are, or each rank has all of it and computes the same as
// the others without a word to them; embedding and head are divided either way.
#pragma once

#include <memory>
#include <vector>

#include "model/eagle3_config.h"
#include "model/layer_weights.h"

namespace perigee {

// What a draft's files have besides its layer.
struct OwnVocabulary {
  bool input = false, output = false;  // an embedding, a head
  bool ids = false;                    // d2t: of each drafted id how far the target's is from it
};
std::vector<TensorSpec> eagle3_tensors(const Eagle3Config& config, OwnVocabulary own);

class Eagle3 {
 public:
  struct Output {
    Tensor logits;  // f32 [rows of logits, this rank's share of the drafted vocabulary]
    Tensor hidden;  // f32 [rows of logits, H], for the next pass
  };

  enum class Layer : uint8_t { kDivided, kWhole };  // see above
  // Reads `options.path`; Errors name file, tensor or key. `target` outlives it.
  static Result<std::unique_ptr<Eagle3>> load(const LoadOptions& options, const Model& target, Ops& ops,
                                              Layer layer = Layer::kDivided);
  // The same without its weights: see size_model().
  static Result<std::unique_ptr<Eagle3>> size(const LoadOptions& options, const Model& target, WeightPacker& sizes,
                                              Layer layer = Layer::kDivided);

  const Eagle3Config& config() const { return config_; }
  int64_t weight_bytes() const { return weight_bytes_; }
  // The target's id of one that is drafted.
  int32_t target_id(int32_t drafted) const {
    return target_ids_.empty() ? drafted : target_ids_[static_cast<size_t>(drafted)];
  }
  // The target's layout with the draft's cache. `numbers`: in which it is kept; by head not kF8Tiles. `dcp_size`: of
  // the ranks that share the target's blocks.
  CacheLayout cache_layout(const CacheLayout& target, LatentFormat numbers, int32_t dcp_size) const;

  // The fused hidden states, f32 [n, H], of taps wide [n, taps * H].
  Tensor fuse(const Tensor& taps, Ops& ops) const;
  // Runs tokens of which each is one position further in its text than the batch says. `hidden` f32 [n, H] is
  // overwritten. Only the draft's own cache is read and written; the pages of one in an arena of its own are those.
  Output forward(const Batch& batch, const Tensor& hidden, Ops& ops, const PagePool& pool) const;

 private:
  enum class Numbers : uint8_t { kRead, kNone };
  Eagle3(Eagle3Config config, const Model& target, Layer layer)
      : config_(std::move(config)), target_(target), whole_(layer == Layer::kWhole) {}
  static Result<std::unique_ptr<Eagle3>> make(const LoadOptions& options, const Model& target, WeightPacker& packer,
                                              Numbers numbers, Layer layer);
  void read_vocabulary(WeightReader& reader, OwnVocabulary own);
  void read_layer(WeightReader& reader);
  void add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, const Tensor& out,
                Ops& ops) const;
  Tensor attend_latents(const Tensor& in, const Batch& batch, Ops& ops, const PagePool& pool) const;
  Tensor attend_full(const Tensor& in, const Batch& batch, Ops& ops, const PagePool& pool) const;

  const Eagle3Config config_;
  const Model& target_;
  const bool whole_;
  std::vector<int32_t> target_ids_;  // of each drafted id; empty: the same
  EmbedWeight own_embedding_;
  LinearWeight own_head_;
  const EmbedWeight* embedding_ = nullptr;
  const LinearWeight* head_ = nullptr;
  std::vector<VectorWeight> tap_norms_;  // of each tap, or of all, or none
  LinearWeight fuse_;
  VectorWeight embedding_norm_, hidden_norm_, norm_;
  MlaWeights mla_;    // one
  FullWeights full_;  // of the two
  FeedForward mlp_;
  int64_t weight_bytes_ = 0;
};

}  // namespace perigee
