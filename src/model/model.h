// Model: a loaded network that turns a batch into logits. One file per family holds its forward pass, straight-line.
//
// A model knows ops and weights; it knows nothing of sequences, sampling, plans or threads. Its cache lives in a page
// pool that exec owns; cache_layout() says how big a page must be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "model/cache_layout.h"
#include "model/shard.h"
#include "ops/batch.h"
#include "ops/ops.h"

namespace perigee {

struct ModelInfo {
  std::string architecture;  // "DeepseekV3ForCausalLM"
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t num_layers = 0;
  int64_t heads = 0;
  int64_t max_positions = 0;
  std::vector<int32_t> eos_ids;   // union of config.json and generation_config.json
  int64_t weight_bytes = 0;       // as packed
  bool has_cache_scales = false;  // of a kF8E4M3 cache, from its files or LoadOptions::kv_scale_file
};

// What a step computes, in the step's arena.
struct ModelOutput {
  Tensor logits;     // f32 [logit_rows, vocab]
  Tensor taps = {};  // wide [n, taps * hidden]: of every new token, the hidden states of Model::tap()
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;
  virtual CacheLayout cache_layout(LatentFormat format) const = 0;
  // Runs the batch and writes the cache of every new token. Requires ops.begin_step() before; one call per step.
  virtual ModelOutput forward(const Batch& batch, Ops& ops, const PagePool& pool) const = 0;
  // For a draft model (model/eagle3.h): steps also give the hidden states that enter these layers, ascending; and what
  // it shares with this one.
  virtual void tap(std::vector<int32_t> layers) { CHECK(layers.empty(), "a model without taps"); }
  virtual const EmbedWeight& embedding() const { CHECK(false, "a model that shares no weights"); }
  virtual const LinearWeight& head() const { CHECK(false, "a model that shares no weights"); }
  // Which form serves a sequence admitted with n tokens to compute on `context` cached ones; see choose_mla_form.
  virtual MlaForm choose_form(TokenKind kind, int64_t new_tokens, int64_t context) const = 0;
};

enum class LoadFormat { kSafetensors, kDummy };

struct LoadOptions {
  std::string path;  // folder with config.json
  LoadFormat format = LoadFormat::kSafetensors;
  // Of the cache of latents; none: numbers as the backend computes with them. Refused before the first tensor is read
  // where model or backend cannot keep it.
  std::optional<LatentFormat> cache;
  std::string kv_scale_file;         // of a kF8E4M3 cache (model/cache_scales.h); empty: none
  double latent_norm_eps = -1;       // < 0: rms_norm_eps
  bool language_model_only = false;  // skip vision tensors of multimodal models
  // Weigh experts by the scores with the selection bias, as Kimi-Linear's own (hub) code does and no server does.
  bool kimi_linear_biased_routing = false;
  bool uniform_routing = false;  // measurements: tokens choose experts at random (ops/uniform_routing.h)
  TensorParallel ranks;          // which part of each tensor is read
  int num_threads = 0;           // 0: as many as available_cores()
  // What the device has for weights: a model that needs more is refused before its first tensor is read.
  int64_t memory_bytes = INT64_MAX;
  // Progress on long work: phase, bytes done, bytes in all. May be empty; called from one thread at a time.
  std::function<void(const char* phase, int64_t done, int64_t total)> progress;
};

// The checks of load_model() alone: that every tensor is there, whole, as config.json says. Reads no data.
Status check_model_files(const LoadOptions& options);

// The model without its weights, which are laid out by `sizes` (Ops::sizes()): info(), the bytes of the weights
// included, and cache_layout() are those of the model that load_model() makes; forward() must not be called.
Result<std::unique_ptr<Model>> size_model(const LoadOptions& options, WeightPacker& sizes);

// Reads config.json, checks every tensor (name, shape, dtype) before using any, and packs the weights for `ops`.
// Errors name file, tensor, expected and found.
Result<std::unique_ptr<Model>> load_model(const LoadOptions& options, Ops& ops);

}  // namespace perigee
