// TensorSource: where a model's weights come from by name, files or D14's formula, in one shape.
//
// A model declares every tensor it needs as a TensorSpec; the source checks the whole list before anything is packed;
// WeightReader then hands the packed weights to the model's constructor.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/cache_scales.h"
#include "model/config.h"
#include "model/model.h"
#include "model/shard.h"
#include "ops/ops.h"

namespace perigee {

enum class TensorRole : uint8_t {
  kProjection,    // name + ".weight" in a float format or FP8 (with ".weight_scale_inv")
  kRoutedExpert,  // the same, or name + ".weight_packed", ".weight_scale", ".weight_shape" (INT4)
  kMatrix,        // name + ".weight" in a float format
  kNorm,          // name + ".weight", a vector in a float format
  kBias,          // `name` itself, a vector in a float format
  kConv,          // name + ".weight", [out, 1, in] in a float format: `in` taps of each channel
  kLogDecay,      // `name` itself, [1, 1, in, 1] in a float format: log of a decay rate of each head
  kTimeBias,      // `name` itself, a vector in a float format: what the decay's step size begins from
  kOffsets,       // `name` itself, a vector of I64
};

// Whether it is a vector: TensorSource::vector() serves the role, of kOffsets integers(); else matrix() does.
constexpr bool is_vector(TensorRole role) {
  return role == TensorRole::kNorm || role == TensorRole::kBias || role == TensorRole::kLogDecay ||
         role == TensorRole::kTimeBias || role == TensorRole::kOffsets;
}

struct TensorSpec {
  std::string name;  // full hub name, prefix included, without the suffix that the role implies
  TensorRole role;
  Shard shard;
  int64_t out = 0, in = 0;  // of vectors: in = length, out = 1
  std::string why = {};     // why config.json asks for it, where that is not plain; for messages

  std::string stored_name() const;            // with the suffix, of all but INT4
  std::vector<int64_t> stored_shape() const;  // as the file has it
};

// A matrix and what keeps its bytes alive (null: the source does).
struct RawWeight {
  RawMatrix matrix;
  std::vector<std::shared_ptr<const void>> owners;
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  // Checks that every tensor is there as declared and nothing else is. Errors name file, tensor, expected and found.
  virtual Status verify(std::span<const TensorSpec> specs, const ModelConfig& config) = 0;
  // Whether there is a tensor with this whole name, suffix included. Computed numbers are there under the names that
  // are asked for, none under others.
  virtual bool has(const std::string&) const { return false; }

  // All that follows requires that verify() accepted a list with `spec`, and reads no byte beyond `part`.
  virtual WeightFormat format(const TensorSpec& spec) const = 0;
  virtual RawWeight matrix(const TensorSpec& spec, const MatrixPart& part) const = 0;
  // The same, or, where the source computes its numbers, the keys alone: for backends that compute them too.
  virtual RawWeight matrix_or_keys(const TensorSpec& spec, const MatrixPart& part) const { return matrix(spec, part); }
  virtual std::vector<float> vector(const TensorSpec& spec, const MatrixPart& part) const = 0;
  // Of kOffsets, all of it. Computed numbers are zeros.
  virtual std::vector<int64_t> integers(const TensorSpec& spec) const {
    return std::vector<int64_t>(static_cast<size_t>(spec.in));
  }
  // The scale of a kF8E4M3 cache of the attention named so (..."layers.3.self_attn"), if the source has one. Finite and
  // positive, as verify() checks.
  virtual std::optional<float> cache_scale(const std::string&) const { return std::nullopt; }

  RawWeight matrix(const TensorSpec& spec) const { return matrix(spec, part_of(spec, {})); }
  RawWeight matrix_or_keys(const TensorSpec& spec) const { return matrix_or_keys(spec, part_of(spec, {})); }
  std::vector<float> vector(const TensorSpec& spec) const { return vector(spec, part_of(spec, {})); }
};

// The safetensors files in `folder`. Tensors of layers beyond the last (MTP), rotary inv_freq and, with a note or when
// `language_model_only`, vision tensors are left out.
Result<std::unique_ptr<TensorSource>> open_file_source(const std::string& folder, bool language_model_only);

// Packs one rank's part of each weight, one at a time, by `packer`, reporting progress. `source` must have verified
// every spec asked for, and check_shards() must have passed.
class WeightReader {
 public:
  using Progress = std::function<void(const char* phase, int64_t done, int64_t total)>;
  WeightReader(const TensorSource& source, WeightPacker& packer, TensorParallel ranks, int64_t total_bytes,
               const CacheScales& cache_scales, Progress progress)
      : source_(source),
        packer_(packer),
        ranks_(ranks),
        cache_scales_(cache_scales),
        total_(total_bytes),
        progress_(std::move(progress)) {}

  LinearWeight linear(std::span<const TensorSpec> stacked);
  LinearWeight linear(const TensorSpec& spec) { return linear(std::span(&spec, 1)); }
  LinearWeight gate_up(const TensorSpec& gate, const TensorSpec& up);
  EmbedWeight embed(const TensorSpec& spec);
  MlaUpWeight mla_up(const TensorSpec& spec, const MlaShape& shape);
  VectorWeight kda_conv(const TensorSpec& q, const TensorSpec& k, const TensorSpec& v);  // KdaWeights::conv
  // Three specs an expert: gate, up, down. Packs those that this rank has of.
  ExpertWeights experts(std::span<const TensorSpec> specs);
  VectorWeight matrix_f32(const TensorSpec& spec);  // row-major
  VectorWeight vector(const TensorSpec& spec);
  VectorWeight exp_vector(const TensorSpec& spec);  // e to the power of each
  float cache_scale(const std::string& attention) const;
  // Values that the model computes from its config, where the backend reads them.
  VectorWeight pack_vector(std::vector<float> values);
  int64_t read_bytes() const { return done_; }  // of the source
  int64_t packed_bytes() const { return packed_bytes_; }
  bool has_cache_scales() const { return !cache_scales_.empty(); }

 private:
  RawWeight raw(const TensorSpec& spec);          // for the backend: perhaps keys alone
  RawWeight raw_on_host(const TensorSpec& spec);  // with its numbers
  RawWeight counted(RawWeight weight);
  std::vector<float> part_of_vector(const TensorSpec& spec);
  void count(int64_t bytes);
  void packed(const Packed& packed);

  const TensorSource& source_;
  WeightPacker& packer_;
  const TensorParallel ranks_;
  const CacheScales& cache_scales_;
  int64_t total_ = 0, done_ = 0, packed_bytes_ = 0;
  Progress progress_;
};

}  // namespace perigee
