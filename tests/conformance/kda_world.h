// A world of sequences for tests of Kimi Delta Attention: weights, inputs that depend on (sequence, position, variant)
// alone, pages and rings full of NaN where nothing lies.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/rng.h"
#include "ops/ops.h"

namespace perigee {

enum class KdaInputStyle {
  kPlain,
  kCorrelatedKeys,  // all keys of a head nearly equal
  kGatesNearZero,   // nothing is forgotten
  kGatesNearMinusInfinity,
  kMixedGates,  // some channels and tokens forget everything, some nothing
};

// Rows of one batch, as projections give them.
struct KdaRows {
  std::vector<float> qkv, a, b, z;
  std::vector<uint16_t> b_bf16;
};

class KdaWorld {
 public:
  KdaWorld(int64_t heads, KdaInputStyle style, uint64_t seed = 1) : style_(style), seed_(seed) {
    weights.shape.heads = heads;
    const auto width = static_cast<size_t>(weights.shape.width());
    weights.conv = numbers(3 * width * 4, 11, -0.6f, 0.6f);
    std::vector<float> rates = numbers(static_cast<size_t>(heads), 12, 1, 16);
    std::vector<float> bias(width);  // of steps between 0.001 and 0.1, as the model is initialised
    for (size_t i = 0; i < width; ++i) {
      const float step = 0.001f * std::pow(100.0f, random_unit(seed_ + 13, i));
      bias[i] = std::log(std::expm1(step));
    }
    weights.a = rates;
    weights.dt_bias = bias;
    weights.o_norm = numbers(128, 14, 0.5f, 1.5f);
  }

  // One new token's inputs, appended as a row. `variant` tells tokens at the same position apart.
  void append(KdaRows& rows, uint64_t sequence, int64_t position, uint64_t variant = 0) const {
    const KdaShape& shape = weights.shape;
    const int64_t width = shape.width();
    const uint64_t key = mix64(seed_ * 1000003 + sequence * 7919 + static_cast<uint64_t>(position) * 31 + variant);
    const uint64_t fixed = mix64(seed_ + sequence);
    for (int64_t i = 0; i < 3 * width; ++i) {
      const auto at = static_cast<uint64_t>(i);
      float x = 4 * random_unit(key, at) - 2;
      if (style_ == KdaInputStyle::kCorrelatedKeys && i / width == 1) x = 4 * random_unit(fixed, at) - 2 + 0.01f * x;
      rows.qkv.push_back(x);
    }
    for (int64_t i = 0; i < width; ++i) rows.a.push_back(gate(key + 1, static_cast<uint64_t>(i)));
    for (int64_t i = 0; i < shape.heads; ++i) {
      rows.b_bf16.push_back(f32_to_bf16(6 * random_unit(key + 2, static_cast<uint64_t>(i)) - 2));
      rows.b.push_back(bf16_to_f32(rows.b_bf16.back()));
    }
    for (int64_t i = 0; i < width; ++i) rows.z.push_back(4 * random_unit(key + 3, static_cast<uint64_t>(i)) - 2);
  }

  KdaInputs inputs(KdaRows& rows, DType activation) const {
    const KdaShape& shape = weights.shape;
    const auto n = static_cast<int64_t>(rows.b.size()) / shape.heads;
    const auto view = [n](void* data, DType dtype, int64_t cols) {
      return Tensor{.data = data, .dtype = dtype, .rows = n, .cols = cols, .row_stride = cols};
    };
    const bool f32 = activation == DType::kF32;
    return {.qkv = view(rows.qkv.data(), DType::kF32, 3 * shape.width()),
            .a = view(rows.a.data(), DType::kF32, shape.width()),
            .b = view(f32 ? static_cast<void*>(rows.b.data()) : rows.b_bf16.data(), activation, shape.heads),
            .z = view(rows.z.data(), DType::kF32, shape.width())};
  }

  KdaWeights weights;

 private:
  std::vector<float> numbers(size_t count, uint64_t stream, float low, float high) const {
    std::vector<float> out(count);
    for (size_t i = 0; i < count; ++i) out[i] = low + (high - low) * random_unit(seed_ + stream, i);
    return out;
  }
  float gate(uint64_t key, uint64_t i) const {
    const float x = 4 * random_unit(key, i) - 2;
    switch (style_) {
      case KdaInputStyle::kGatesNearZero: return x - 14;
      case KdaInputStyle::kGatesNearMinusInfinity: return 500 + 400 * x;
      case KdaInputStyle::kMixedGates: return 15 * x;
      default: return x;
    }
  }

  KdaInputStyle style_;
  uint64_t seed_;
};

// Memory for the units of some sequences: state pages in no particular order, three units a page, and rings.
class KdaMemory {
 public:
  static constexpr int32_t kUnitsPerPage = 3, kFirstUnit = 2;  // units of another layer come first
  static constexpr int32_t kCheckpoints = 4;                   // room for so many of a sequence

  // In the memory of `device`, where there is one.
  KdaMemory(const KdaShape& shape, int32_t num_sequences, int32_t ring_tokens, Ops* device = nullptr)
      : shape_(shape),
        device_(device),
        pages_each_((kFirstUnit + static_cast<int32_t>(shape.heads) - 1) / kUnitsPerPage + 1) {
    layer = {.page_bytes = kUnitsPerPage * shape.unit_bytes() + 640,
             .unit_bytes = shape.unit_bytes(),
             .units_per_page = kUnitsPerPage,
             .first_unit = kFirstUnit,
             .ring_token_bytes = shape.ring_token_floats() * 4,
             .ring_tokens = ring_tokens};
    layer.ring_slot_bytes = (kFirstUnit + shape.heads) * ring_tokens * layer.ring_token_bytes;
    const int32_t num_pages = (1 + kCheckpoints) * num_sequences * pages_each_;  // states, then checkpoints
    pool_ = std::vector<float>(static_cast<size_t>(num_pages * layer.page_bytes / 4), kPoison);
    ring_ = std::vector<float>(static_cast<size_t>(num_sequences * layer.ring_slot_bytes / 4), kPoison);
    layer.base = reinterpret_cast<uint8_t*>(pool_.data());
    layer.ring = reinterpret_cast<uint8_t*>(ring_.data());
    for (int32_t i = 0; i < num_pages; ++i) pages_.push_back(num_pages - 1 - i);
    for (int32_t s = 0; s < num_sequences; ++s) {
      for (int64_t h = 0; h < shape.heads; ++h)
        std::memset(layer.unit(pages(s), h), 0, static_cast<size_t>(shape.unit_bytes()));
    }
    if (device == nullptr) return;
    pool_there_ = upload(pool_);
    ring_there_ = upload(ring_);
    layer.base = pool_there_.data();
    layer.ring = ring_there_.data();
  }
  KdaMemory(const KdaMemory&) = delete;
  KdaMemory& operator=(const KdaMemory&) = delete;

  int32_t pages_each() const { return pages_each_; }
  const int32_t* pages(int32_t sequence) const { return pages_.data() + sequence * pages_each_; }
  const int32_t* checkpoint(int32_t sequence, int32_t index = 0) const {
    const int32_t num_states = static_cast<int32_t>(pages_.size()) / (1 + kCheckpoints);
    return pages_.data() + num_states + (sequence * kCheckpoints + index) * pages_each_;
  }
  // The units of all heads, [heads][S, then tail].
  std::vector<float> units(const int32_t* pages) const {
    const auto bytes = static_cast<size_t>(shape_.unit_bytes());
    std::vector<float> out(static_cast<size_t>(shape_.heads) * bytes / 4);
    for (int64_t h = 0; h < shape_.heads; ++h)
      copy(out.data() + h * shape_.unit_bytes() / 4, layer.unit(pages, h), bytes);
    return out;
  }
  void load_units(const int32_t* pages, const std::vector<float>& units) {
    for (int64_t h = 0; h < shape_.heads; ++h)
      copy(layer.unit(pages, h), units.data() + h * shape_.unit_bytes() / 4, static_cast<size_t>(shape_.unit_bytes()));
  }
  // All there is, bit by bit: NaN where nobody wrote.
  bool operator==(const KdaMemory& other) const {
    return same(layer.base, other.layer.base, pool_.size()) && same(layer.ring, other.layer.ring, ring_.size());
  }

  StateLayer layer;

 private:
  static constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

  void copy(void* to, const void* from, size_t bytes) const {
    if (device_ != nullptr)
      device_->copy(to, from, bytes);
    else
      std::memcpy(to, from, bytes);
  }
  Buffer upload(const std::vector<float>& from) const {
    Buffer there = device_->make_buffer(from.size() * sizeof(float));
    device_->copy(there.data(), from.data(), from.size() * sizeof(float));
    return there;
  }
  bool same(const uint8_t* a, const uint8_t* b, size_t floats) const {
    std::vector<float> first(floats), second(floats);
    copy(first.data(), a, floats * sizeof(float));
    copy(second.data(), b, floats * sizeof(float));
    return std::memcmp(first.data(), second.data(), floats * sizeof(float)) == 0;
  }

  KdaShape shape_;
  Ops* device_ = nullptr;
  int32_t pages_each_;
  std::vector<float> pool_, ring_;  // of a device: what it began with
  Buffer pool_there_, ring_there_;
  std::vector<int32_t> pages_;
};

}  // namespace perigee
