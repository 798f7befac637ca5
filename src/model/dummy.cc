#include "model/dummy.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/rng.h"

namespace perigee {
namespace {

constexpr int64_t kMinPerThread = 1 << 16;

float uniform(uint64_t key, uint64_t i) {
  const int64_t odd = 2 * static_cast<int64_t>(random_u64(key, i) >> 41) + 1;
  return static_cast<float>(odd - (1 << 23)) * 0x1p-23f;
}

// f(i) for i in [0, count), in one contiguous range a thread.
template <typename F>
void for_each_index(int64_t count, int num_threads, const F& f) {
  const int64_t most = std::max<int64_t>(count / kMinPerThread, 1);
  const int64_t threads = std::clamp<int64_t>(num_threads, 1, most);
  const auto range = [&](int64_t t) {
    for (int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) f(i);
  };
  std::vector<std::thread> workers;
  for (int64_t t = 1; t < threads; ++t) workers.emplace_back(range, t);
  range(0);
  for (std::thread& worker : workers) worker.join();
}

class DummySource final : public TensorSource {
 public:
  explicit DummySource(int num_threads) : num_threads_(num_threads) {}

  Result<int64_t> verify(std::span<const TensorSpec> specs, const ModelConfig& config) override {
    quantization_ = config.quantization;
    int64_t total = 0;
    for (const TensorSpec& spec : specs) {
      const RawMatrix shape{.format = format(spec), .out = spec.out, .in = spec.in};
      if (shape.format == WeightFormat::kInt4Group32 && spec.in % 32 != 0)
        return bad_input(
            str_cat("tensor ", spec.name, ": INT4 groups of 32 need a multiple of 32 columns, found ", spec.in));
      total += raw_bytes(shape);
    }
    return total;
  }

  RawWeight matrix(const TensorSpec& spec) const override {
    RawWeight weight{.matrix = {.format = format(spec), .out = spec.out, .in = spec.in}, .owners = {}};
    RawMatrix& m = weight.matrix;
    const int64_t count = m.out * m.in;
    if (m.format == WeightFormat::kInt4Group32) {
      const auto words = hold<uint32_t>(weight, count / 8);
      const auto scales = hold<uint16_t>(weight, count / 32);
      dummy_int4(spec.name + ".weight_packed", num_threads_, words);
      dummy_int4_scale(spec.name + ".weight_scale", m.in, num_threads_, scales);
      m.data = words.data();
      m.scale = scales.data();
    } else if (m.format == WeightFormat::kF8Block128) {
      const auto values = hold<uint8_t>(weight, count);
      const auto scales = hold<float>(weight, (m.out + 127) / 128 * ((m.in + 127) / 128));
      dummy_fp8(spec.name + ".weight", num_threads_, values);
      dummy_fp8_scale(spec.name + ".weight_scale_inv", m.in, scales);
      m.data = values.data();
      m.scale = scales.data();
    } else {
      const auto values = hold<uint16_t>(weight, count);
      dummy_matrix(spec.stored_name(), m.in, num_threads_, values);
      m.data = values.data();
    }
    return weight;
  }

  RawWeight matrix_or_keys(const TensorSpec& spec) const override {
    RawWeight weight{.matrix = {.format = format(spec), .out = spec.out, .in = spec.in}, .owners = {}};
    const bool int4 = weight.matrix.format == WeightFormat::kInt4Group32;
    weight.matrix.data_key = fnv1a(spec.name + (int4 ? ".weight_packed" : ".weight"));
    weight.matrix.scale_key = fnv1a(spec.name + (int4 ? ".weight_scale" : ".weight_scale_inv"));
    return weight;
  }

  std::vector<float> vector(const TensorSpec& spec) const override {
    std::vector<float> out(spec.in);
    switch (spec.role) {
      case TensorRole::kBias: dummy_bias(spec.name, out); break;
      case TensorRole::kLogDecay: dummy_log_decay(spec.name, out); break;
      case TensorRole::kTimeBias: dummy_time_bias(spec.name, out); break;
      default: {
        std::vector<uint16_t> stored(spec.in);
        dummy_norm(spec.stored_name(), stored);
        std::transform(stored.begin(), stored.end(), out.begin(), bf16_to_f32);
      }
    }
    return out;
  }

 private:
  WeightFormat format(const TensorSpec& spec) const {
    if (spec.role == TensorRole::kRoutedExpert && quantization_ == Quantization::kInt4Group32)
      return WeightFormat::kInt4Group32;
    const bool projection = spec.role == TensorRole::kRoutedExpert || spec.role == TensorRole::kProjection;
    if (projection && quantization_ == Quantization::kFp8Block128) return WeightFormat::kF8Block128;
    return WeightFormat::kBF16;
  }

  template <typename T>
  static std::span<T> hold(RawWeight& weight, int64_t count) {
    std::shared_ptr<T[]> memory = std::make_shared_for_overwrite<T[]>(static_cast<size_t>(count));
    const std::span<T> out(memory.get(), static_cast<size_t>(count));
    weight.owners.push_back(std::move(memory));
    return out;
  }

  int num_threads_;
  Quantization quantization_ = Quantization::kNone;
};

}  // namespace

void dummy_matrix(std::string_view name, int64_t fan_in, int num_threads, std::span<uint16_t> out) {
  const uint64_t key = fnv1a(name);
  const float scale = static_cast<float>(std::sqrt(3.0 / static_cast<double>(fan_in)));
  for_each_index(std::ssize(out), num_threads, [&](int64_t i) { out[i] = f32_to_bf16(uniform(key, i) * scale); });
}

void dummy_norm(std::string_view name, std::span<uint16_t> out) {
  const uint64_t key = fnv1a(name);
  for (size_t i = 0; i < out.size(); ++i) out[i] = f32_to_bf16(1.0f + 0.25f * uniform(key, i));
}

void dummy_bias(std::string_view name, std::span<float> out) {
  const uint64_t key = fnv1a(name);
  for (size_t i = 0; i < out.size(); ++i) out[i] = 0.1f * uniform(key, i);
}

void dummy_log_decay(std::string_view name, std::span<float> out) {
  const uint64_t key = fnv1a(name);
  const float range = static_cast<float>(std::log(16.0));
  for (size_t i = 0; i < out.size(); ++i) out[i] = range * (uniform(key, i) + 1.0f) * 0.5f;
}

void dummy_time_bias(std::string_view name, std::span<float> out) {
  const uint64_t key = fnv1a(name);
  for (size_t i = 0; i < out.size(); ++i) {
    // Rounded by a conversion, so that no compiler fuses it into the sum.
    const float offset = static_cast<float>(2.5 * static_cast<double>(uniform(key, i)));
    out[i] = -4.5f + offset;
  }
}

void dummy_int4(std::string_view name, int num_threads, std::span<uint32_t> words) {
  const uint64_t key = fnv1a(name);
  for_each_index(std::ssize(words), num_threads,
                 [&](int64_t i) { words[i] = static_cast<uint32_t>(random_u64(key, static_cast<uint64_t>(i))); });
}

void dummy_int4_scale(std::string_view name, int64_t in, int num_threads, std::span<uint16_t> out) {
  const uint64_t key = fnv1a(name);
  const float scale = static_cast<float>(1.0 / (4.6097722 * std::sqrt(static_cast<double>(in))));
  for_each_index(std::ssize(out), num_threads,
                 [&](int64_t i) { out[i] = f32_to_bf16(scale * (1.0f + 0.25f * uniform(key, i))); });
}

void dummy_fp8(std::string_view name, int num_threads, std::span<uint8_t> out) {
  const uint64_t key = fnv1a(name);
  for_each_index(std::ssize(out), num_threads, [&](int64_t i) { out[i] = f32_to_f8e4m3(448.0f * uniform(key, i)); });
}

void dummy_fp8_scale(std::string_view name, int64_t in, std::span<float> out) {
  const uint64_t key = fnv1a(name);
  const float scale = static_cast<float>(std::sqrt(3.0 / static_cast<double>(in)) / 448.0);
  for (size_t i = 0; i < out.size(); ++i) out[i] = scale * (1.0f + 0.25f * uniform(key, i));
}

std::unique_ptr<TensorSource> make_dummy_source(int num_threads) {
  return std::make_unique<DummySource>(num_threads);
}

}  // namespace perigee
