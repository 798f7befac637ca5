// Model: a loaded network that turns a batch into logits. One file per family holds its forward pass, straight-line.
//
// A model knows ops and weights; it knows nothing of sequences, sampling, plans or threads. Its cache lives in a page
// pool that exec owns; cache_layout() says how big a page must be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "model/shard.h"
#include "ops/batch.h"
#include "ops/ops.h"

namespace perigee {

// Geometry of the page pool (DESIGN D5, D7): a page holds one block of 64 tokens of all latent layers, block-major, or
// whole units of recurrent state. A unit is one head of one recurrent layer; a state is all units of a sequence.
struct CacheLayout {
  int64_t num_layers = 0;    // with latent attention
  int64_t row_elements = 0;  // L + dr
  DType dtype = DType::kBF16;
  // Recurrent layers; all zero without.
  int64_t state_layers = 0, state_heads = 0;
  int64_t unit_bytes = 0;        // a multiple of 128
  int64_t ring_token_bytes = 0;  // what a token leaves in the ring for one unit; see StateLayer

  int64_t row_bytes() const { return row_elements * dtype_bytes(dtype); }
  int64_t layer_bytes() const { return (64 * row_bytes() + 127) / 128 * 128; }
  // Never less than a unit: few latent layers beside large heads waste the rest of a block's page.
  int64_t page_bytes() const { return std::max(num_layers * layer_bytes(), unit_bytes); }
  int64_t units() const { return state_layers * state_heads; }
  int64_t units_per_page() const { return unit_bytes == 0 ? 0 : page_bytes() / unit_bytes; }
  // Of one sequence's state, and of a checkpoint of it.
  int64_t state_pages() const { return units() == 0 ? 0 : (units() + units_per_page() - 1) / units_per_page(); }
  int64_t ring_slot_bytes(int32_t ring_tokens) const { return units() * ring_tokens * ring_token_bytes; }
};

// The page pool of one rank, as a model sees it, with the ring of each slot's newest tokens beside it.
struct PagePool {
  uint8_t* base = nullptr;
  CacheLayout layout;
  uint8_t* ring = nullptr;  // slots * layout.ring_slot_bytes(ring_tokens); null without recurrent layers
  int32_t ring_tokens = 1;  // K + 1: the most tokens of a step that a later step may still reject

  // i counts the latent layers alone; `scale` is of an e4m3 cache.
  LatentLayer latent_layer(int64_t i, float scale = 1) const {
    return {.base = base + i * layout.layer_bytes(),
            .page_bytes = layout.page_bytes(),
            .row_bytes = layout.row_bytes(),
            .dtype = layout.dtype,
            .scale = layout.dtype == DType::kF8E4M3 ? scale : 1};
  }
  // i counts the recurrent layers alone.
  StateLayer state_layer(int64_t i) const {
    return {.base = base,
            .page_bytes = layout.page_bytes(),
            .unit_bytes = layout.unit_bytes,
            .units_per_page = static_cast<int32_t>(layout.units_per_page()),
            .first_unit = static_cast<int32_t>(i * layout.state_heads),
            .ring = ring,
            .ring_slot_bytes = layout.ring_slot_bytes(ring_tokens),
            .ring_token_bytes = layout.ring_token_bytes,
            .ring_tokens = ring_tokens};
  }
};

struct ModelInfo {
  std::string architecture;  // "DeepseekV3ForCausalLM"
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t num_layers = 0;
  int64_t heads = 0;
  int64_t max_positions = 0;
  std::vector<int32_t> eos_ids;   // union of config.json and generation_config.json
  int64_t weight_bytes = 0;       // as packed
  bool has_cache_scales = false;  // of an e4m3 cache
};

// What a step computes, in the step's arena.
struct ModelOutput {
  Tensor logits;                      // f32 [logit_rows, vocab]
  std::span<const Tensor> taps = {};  // hidden states of layers that a draft model reads; none yet
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;
  virtual CacheLayout cache_layout(DType cache_dtype) const = 0;
  // Runs the batch and writes the cache of every new token. Requires ops.begin_step() before; one call per step.
  virtual ModelOutput forward(const Batch& batch, Ops& ops, const PagePool& pool) const = 0;
  // Which form serves a sequence admitted with n tokens to compute on `context` cached ones; see choose_mla_form.
  virtual MlaForm choose_form(TokenKind kind, int64_t new_tokens, int64_t context) const = 0;
};

enum class LoadFormat { kSafetensors, kDummy };

struct LoadOptions {
  std::string path;  // folder with config.json
  LoadFormat format = LoadFormat::kSafetensors;
  double latent_norm_eps = -1;       // < 0: rms_norm_eps
  bool language_model_only = false;  // skip vision tensors of multimodal checkpoints
  // Weigh experts by the scores with the selection bias, as Kimi-Linear's own (hub) code does and no server does.
  bool kimi_linear_biased_routing = false;
  TensorParallel ranks;  // which part of each tensor is read
  int num_threads = 0;   // 0: as many as available_cores()
  // What the device has for weights: a model that needs more is refused before its first tensor is read.
  int64_t memory_bytes = INT64_MAX;
  // Progress on long work: phase, bytes done, bytes in all. May be empty; called from one thread at a time.
  std::function<void(const char* phase, int64_t done, int64_t total)> progress;
};

// The checks of load_model() alone: that every tensor is there, whole, as config.json says. Reads no data.
Status check_model_files(const LoadOptions& options);

// Reads config.json, checks every tensor (name, shape, dtype) before using any, and packs the weights for `ops`.
// Errors name file, tensor, expected and found.
Result<std::unique_ptr<Model>> load_model(const LoadOptions& options, Ops& ops);

}  // namespace perigee
