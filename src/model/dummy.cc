#include "model/dummy.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/rng.h"

namespace perigee {
namespace {

constexpr int64_t kMinPerThread = 1 << 16;

// The random numbers of a tensor from element `first` on.
class Numbers {
 public:
  Numbers(std::string_view name, int64_t first) : key_(fnv1a(name)), first_(static_cast<uint64_t>(first)) {}
  uint64_t bits(size_t i) const { return random_u64(key_, first_ + i); }
  float uniform(size_t i) const {
    const int64_t odd = 2 * static_cast<int64_t>(bits(i) >> 41) + 1;
    return static_cast<float>(odd - (1 << 23)) * 0x1p-23f;
  }

 private:
  uint64_t key_, first_;
};

// Elements of a row-major tensor: row r begins with element origin + r * stride.
struct Elements {
  int64_t origin = 0, rows = 0, columns = 0, stride = 0;
};

Elements elements_of(const ByteRows& bytes, int64_t origin, int64_t element_bytes) {
  return {.origin = origin,
          .rows = bytes.rows,
          .columns = bytes.row_bytes / element_bytes,
          .stride = bytes.stride / element_bytes};
}

// Fills `to`, where rows lie as in the tensor, by fill(first element, run of them), an equal share a thread.
template <typename T, typename Fill>
void fill_elements(const Elements& e, int num_threads, std::span<T> to, const Fill& fill) {
  const int64_t count = e.rows * e.columns, most = std::max<int64_t>(count / kMinPerThread, 1);
  const int64_t threads = std::clamp<int64_t>(num_threads, 1, most);
  const auto share = [&](int64_t t) {
    for (int64_t i = count * t / threads, end = count * (t + 1) / threads; i < end;) {
      const int64_t at = i / e.columns * e.stride + i % e.columns;
      const int64_t run = e.columns == e.stride ? end - i : std::min(e.columns - i % e.columns, end - i);
      fill(e.origin + at, to.subspan(static_cast<size_t>(at), static_cast<size_t>(run)));
      i += run;
    }
  };
  std::vector<std::thread> workers;
  for (int64_t t = 1; t < threads; ++t) workers.emplace_back(share, t);
  share(0);
  for (std::thread& worker : workers) worker.join();
}

class DummySource final : public TensorSource {
 public:
  explicit DummySource(int num_threads) : num_threads_(num_threads) {}

  Status verify(std::span<const TensorSpec> specs, const ModelConfig& config) override {
    quantization_ = config.quantization;
    for (const TensorSpec& spec : specs)
      if (format(spec) == WeightFormat::kInt4Group32 && spec.in % 32 != 0)
        return bad_input(
            fmt::format("tensor {}: INT4 groups of 32 need a multiple of 32 columns, found {}", spec.name, spec.in));
    return {};
  }

  WeightFormat format(const TensorSpec& spec) const override {
    if (spec.role == TensorRole::kOffsets || spec.role == TensorRole::kBias || spec.role == TensorRole::kLogDecay ||
        spec.role == TensorRole::kTimeBias)
      return WeightFormat::kF32;
    if (spec.role == TensorRole::kRoutedExpert && quantization_ == Quantization::kInt4Group32)
      return WeightFormat::kInt4Group32;
    const bool projection = spec.role == TensorRole::kRoutedExpert || spec.role == TensorRole::kProjection;
    if (projection && quantization_ == Quantization::kFp8Block128) return WeightFormat::kF8Block128;
    return WeightFormat::kBF16;
  }

  RawWeight matrix(const TensorSpec& spec, const MatrixPart& part) const override {
    RawWeight weight{.matrix = window({.format = format(spec), .out = spec.out, .in = spec.in}, part), .owners = {}};
    RawMatrix& m = weight.matrix;
    if (m.format == WeightFormat::kInt4Group32) {
      m.data = make<uint32_t>(weight, data_bytes(m), m.origin() / 8, [&](int64_t first, std::span<uint32_t> out) {
        dummy_int4(spec.name + ".weight_packed", first, out);
      });
      m.scale = make<uint16_t>(weight, scale_bytes(m), m.scale_origin(), [&](int64_t first, std::span<uint16_t> out) {
        dummy_int4_scale(spec.name + ".weight_scale", spec.in, first, out);
      });
    } else if (m.format == WeightFormat::kF8Block128) {
      m.data = make<uint8_t>(weight, data_bytes(m), m.origin(), [&](int64_t first, std::span<uint8_t> out) {
        dummy_fp8(spec.name + ".weight", first, out);
      });
      m.scale = make<float>(weight, scale_bytes(m), m.scale_origin(), [&](int64_t first, std::span<float> out) {
        dummy_fp8_scale(spec.name + ".weight_scale_inv", spec.in, first, out);
      });
    } else {
      m.data = make<uint16_t>(weight, data_bytes(m), m.origin(), [&](int64_t first, std::span<uint16_t> out) {
        dummy_matrix(spec.stored_name(), spec.in, first, out);
      });
    }
    return weight;
  }

  RawWeight matrix_or_keys(const TensorSpec& spec, const MatrixPart& part) const override {
    RawWeight weight{.matrix = window({.format = format(spec), .out = spec.out, .in = spec.in}, part), .owners = {}};
    const bool int4 = weight.matrix.format == WeightFormat::kInt4Group32;
    weight.matrix.data_key = fnv1a(spec.name + (int4 ? ".weight_packed" : ".weight"));
    weight.matrix.scale_key = fnv1a(spec.name + (int4 ? ".weight_scale" : ".weight_scale_inv"));
    return weight;
  }

  std::vector<float> vector(const TensorSpec& spec, const MatrixPart& part) const override {
    std::vector<float> out(static_cast<size_t>(part.columns));
    switch (spec.role) {
      case TensorRole::kBias: dummy_bias(spec.name, part.first_column, out); break;
      case TensorRole::kLogDecay: dummy_log_decay(spec.name, part.first_column, out); break;
      case TensorRole::kTimeBias: dummy_time_bias(spec.name, part.first_column, out); break;
      default: {
        std::vector<uint16_t> stored(out.size());
        dummy_norm(spec.stored_name(), part.first_column, stored);
        std::transform(stored.begin(), stored.end(), out.begin(), bf16_to_f32);
      }
    }
    return out;
  }

 private:
  // Memory for rows of T as far apart as `rows`, filled; kept by `weight`.
  template <typename T, typename Fill>
  const T* make(RawWeight& weight, const ByteRows& rows, int64_t origin, const Fill& fill) const {
    const auto count = static_cast<size_t>(rows.extent()) / sizeof(T);
    std::shared_ptr<T[]> memory = std::make_shared_for_overwrite<T[]>(count);
    fill_elements(elements_of(rows, origin, sizeof(T)), num_threads_, std::span<T>(memory.get(), count), fill);
    weight.owners.push_back(memory);
    return memory.get();
  }

  int num_threads_;
  Quantization quantization_ = Quantization::kNone;
};

}  // namespace

void dummy_matrix(std::string_view name, int64_t fan_in, int64_t first, std::span<uint16_t> out) {
  const Numbers values(name, first);
  const float scale = static_cast<float>(std::sqrt(3.0 / static_cast<double>(fan_in)));
  for (size_t i = 0; i < out.size(); ++i) out[i] = f32_to_bf16(values.uniform(i) * scale);
}

void dummy_norm(std::string_view name, int64_t first, std::span<uint16_t> out) {
  const Numbers values(name, first);
  for (size_t i = 0; i < out.size(); ++i) out[i] = f32_to_bf16(1.0f + 0.25f * values.uniform(i));
}

void dummy_bias(std::string_view name, int64_t first, std::span<float> out) {
  const Numbers values(name, first);
  for (size_t i = 0; i < out.size(); ++i) out[i] = 0.1f * values.uniform(i);
}

void dummy_log_decay(std::string_view name, int64_t first, std::span<float> out) {
  const Numbers values(name, first);
  const float range = static_cast<float>(std::log(16.0));
  for (size_t i = 0; i < out.size(); ++i) out[i] = range * (values.uniform(i) + 1.0f) * 0.5f;
}

void dummy_time_bias(std::string_view name, int64_t first, std::span<float> out) {
  const Numbers values(name, first);
  for (size_t i = 0; i < out.size(); ++i) {
    // Rounded by a conversion, so that no compiler fuses it into the sum.
    const float offset = static_cast<float>(2.5 * static_cast<double>(values.uniform(i)));
    out[i] = -4.5f + offset;
  }
}

void dummy_int4(std::string_view name, int64_t first, std::span<uint32_t> words) {
  const Numbers values(name, first);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(values.bits(i));
}

void dummy_int4_scale(std::string_view name, int64_t in, int64_t first, std::span<uint16_t> out) {
  const Numbers values(name, first);
  const float scale = static_cast<float>(1.0 / (4.6097722 * std::sqrt(static_cast<double>(in))));
  for (size_t i = 0; i < out.size(); ++i) out[i] = f32_to_bf16(scale * (1.0f + 0.25f * values.uniform(i)));
}

void dummy_fp8(std::string_view name, int64_t first, std::span<uint8_t> out) {
  const Numbers values(name, first);
  for (size_t i = 0; i < out.size(); ++i) out[i] = f32_to_f8e4m3(448.0f * values.uniform(i));
}

void dummy_fp8_scale(std::string_view name, int64_t in, int64_t first, std::span<float> out) {
  const Numbers values(name, first);
  const float scale = static_cast<float>(std::sqrt(3.0 / static_cast<double>(in)) / 448.0);
  for (size_t i = 0; i < out.size(); ++i) out[i] = scale * (1.0f + 0.25f * values.uniform(i));
}

std::unique_ptr<TensorSource> make_dummy_source(int num_threads) {
  return std::make_unique<DummySource>(num_threads);
}

}  // namespace perigee
