// Weights: as they come from files (Raw...), and as a backend keeps them (opaque, shared, immutable).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "ops/raw_matrix.h"
#include "tensor/tensor.h"

namespace perigee {

struct RawExpert {
  RawMatrix gate, up, down;  // [I, H], [I, H], [H, I]
};

// Base of what backends keep; only the backend that packed it knows more.
struct PackedWeight {
  virtual ~PackedWeight() = default;
  virtual int64_t bytes() const = 0;
};
using Packed = std::shared_ptr<const PackedWeight>;

// A vector of f32 where the backend's kernels read it: norms, biases, frequencies, the router's matrix. Made of host
// values it is one for host backends; Ops::pack_vector() makes it one for its own. Elements are for host code only.
class VectorWeight {
 public:
  VectorWeight() = default;
  VectorWeight(std::vector<float> values);  // NOLINT: a list of numbers is a weight of the host
  VectorWeight(std::initializer_list<float> values) : VectorWeight(std::vector<float>(values)) {}
  VectorWeight(const float* data, size_t size, std::shared_ptr<const void> owner)
      : data_(data), size_(size), owner_(std::move(owner)) {}
  const float* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const float* begin() const { return data_; }
  const float* end() const { return data_ + size_; }
  float operator[](size_t i) const { return data_[i]; }

 private:
  const float* data_ = nullptr;
  size_t size_ = 0;
  std::shared_ptr<const void> owner_;
};

// What a backend makes at load of matrices that the model stores in 16 bits or more.
enum class OnlineQuantization : uint8_t {
  kNone,
  // Weights of -127 ... 127 times a scale for each output, that of its largest; activations stay as they are. Not the
  // embedding table, routers and MLA's up-projections.
  kInt8PerChannel,
};

struct LinearWeight {
  int64_t out = 0, in = 0;
  Packed packed;
};

struct EmbedWeight {
  int64_t vocab = 0, dim = 0;  // vocab: tokens here
  int64_t first = 0;           // token of the first row
  Packed packed;
};

struct ExpertWeights {  // of this rank
  int64_t num_experts = 0, hidden = 0, inter = 0;
  Packed packed;
};

struct MlaShape {
  int64_t heads = 0, nope = 0, rope = 0, value = 0, latent = 0;
  float softmax_scale = 0;
  int64_t q_head() const { return nope + rope; }
};

struct MlaUpWeight {
  Packed packed;
};

struct Rope {
  bool enabled = true;    // false: NoPE (Kimi-Linear)
  bool halves = false;    // pairs are (i, i + dr / 2), as Llama has them, instead of (2i, 2i + 1)
  VectorWeight inv_freq;  // [dr / 2]
  float cos_sin_factor = 1.0f;
};

struct MlaWeights {
  MlaShape shape;
  LinearWeight q_a;        // [q_lora, H]; packed is null without q_lora
  VectorWeight q_a_norm;   // [q_lora]
  LinearWeight q;          // [h * (dn + dr), q_lora or H]
  LinearWeight kv_a;       // [L + dr, H]
  VectorWeight kv_a_norm;  // [L]
  MlaUpWeight up;
  LinearWeight o;  // [H, h * dv]
  Rope rope;
  float latent_eps = 1e-6f;
  float cache_scale = 1;  // LatentLayer::scale of this layer
};

// Attention with keys and values of their own for each group of heads (GQA, Ainslie et al. 2023): query head h reads
// those of head h / (heads / kv_heads).
struct FullShape {
  int64_t heads = 0, kv_heads = 0, dim = 0;
  float softmax_scale = 0;
};

struct FullWeights {
  FullShape shape;
  LinearWeight qkv;  // [(h + 2 hkv) * dim, H]: q rows, k rows, v rows
  LinearWeight o;    // [H, h * dim]
  Rope rope;
};

// Kimi Delta Attention (Kimi Linear 2025, section 3): a recurrent state per head instead of a cache of tokens.
struct KdaShape {
  int64_t heads = 0, dim = 128;  // of a head: keys and values alike
  int64_t conv = 4;              // taps of the causal convolution
  int64_t width() const { return heads * dim; }
  // What one head of one layer keeps, a unit (DESIGN D7), f32: S [dim keys][dim values], values contiguous, so that
  // neither step nor chunk sums across lanes; then the convolution's last inputs [q, k, v][conv - 1, oldest
  // first][dim].
  int64_t tail_floats() const { return 3 * (conv - 1) * dim; }
  int64_t unit_bytes() const { return (dim * dim + tail_floats()) * 4; }
  // One token of a unit's ring, f32: inputs of the convolution q, k, v, then log decay g, [dim] each; beta; padding.
  int64_t ring_token_floats() const { return 4 * dim + 16; }
};

struct KdaWeights {
  KdaShape shape;
  LinearWeight qkv;      // [3 * h * dim, H]: q rows, k rows, v rows
  LinearWeight gates;    // [dim + dim + h, H]: f_a rows, g_a rows, b rows
  LinearWeight f_b;      // [h * dim, dim]: decay
  LinearWeight g_b;      // [h * dim, dim]: output gate
  VectorWeight conv;     // [conv][3 * h * dim], the last tap meets the current token; see kda_conv_taps
  VectorWeight a;        // [h] exp(A_log)
  VectorWeight dt_bias;  // [h * dim]
  VectorWeight o_norm;   // [dim]
  float eps = 1e-5f;
  LinearWeight o;  // [H, h * dim]
};

// KdaWeights::conv from the stored q, k and v convolutions, [h * dim, conv] each.
std::vector<float> kda_conv_taps(const RawMatrix& q, const RawMatrix& k, const RawMatrix& v);

struct MlpWeights {
  LinearWeight gate_up;  // [2I, H]: gate rows, then up rows
  LinearWeight down;     // [H, I]
};

enum class RouterScore : uint8_t { kSigmoid, kSoftmax };

struct RouterWeight {
  int64_t num_experts = 0, hidden = 0;
  // Where ranks have whole experts: those here are the ones from first_here on.
  int64_t first_here = 0, num_elsewhere = 0;
  VectorWeight weight;           // [E, H] row-major; scores are f32 dot products of the activation with it
  VectorWeight bias;             // [E] selection only; empty: none
  bool uniform = false;          // measurements: selection by uniform_choice(), without groups
  bool bias_in_weights = false;  // the weights are scores with the bias, as Kimi-Linear's own code has it
  RouterScore score = RouterScore::kSigmoid;
  int32_t top_k = 0;
  int32_t num_groups = 1, top_groups = 1;  // group score: sum of its two largest biased scores
  bool normalize = true;                   // weights /= sum + 1e-20
  float scale = 1.0f;                      // weights *= scale

  // What Routing::ids has for an expert.
  constexpr int32_t id_here(int64_t expert) const {
    const int64_t id = expert - first_here;
    return id >= 0 && id < num_experts - num_elsewhere ? static_cast<int32_t>(id) : -1;
  }
};

// Of the models that a backend computes; the default is any.
struct ShapeLimits {
  static constexpr int64_t kAny = INT64_MAX;
  int64_t unit = 1;  // the columns of every matrix, the dims of a head and the rows of an MLP are multiples of it
  int64_t latent_unit = 1;  // so is the latent rank of this
  int64_t max_latent = kAny, max_rope = kAny;
  int64_t max_experts = kAny, max_groups = kAny, max_top_k = kAny;
};

// Expert choice of n tokens, in the step's arena.
struct Routing {
  int64_t num_tokens = 0;
  int32_t top_k = 0;
  int64_t num_elsewhere = 0;  // experts that other ranks have
  int32_t* ids = nullptr;     // [n, k] among the experts of this rank; -1: another rank has it
  float* weights = nullptr;   // [n, k]
};

struct MoeWeights {
  RouterWeight router;
  ExpertWeights experts;
  MlpWeights shared;  // packed null: none
};

}  // namespace perigee
