#include "ops/ref/ref_ops.h"

#include <algorithm>
#include <cmath>

namespace perigee {
namespace {

struct RefMatrix final : PackedWeight {
  std::vector<float> values;  // [rows, cols]
  int64_t bytes() const override { return static_cast<int64_t>(values.size() * sizeof(float)); }
};

struct RefExperts final : PackedWeight {
  struct Expert {
    std::vector<float> gate, up, down;  // [I, H], [I, H], [H, I]
  };
  std::vector<Expert> experts;
  int64_t bytes() const override {
    size_t total = 0;
    for (const Expert& e : experts) total += e.gate.size() + e.up.size() + e.down.size();
    return static_cast<int64_t>(total * sizeof(float));
  }
};

void append_dequantised(std::vector<float>& out, const RawMatrix& m) {
  const size_t begin = out.size();
  out.resize(begin + static_cast<size_t>(m.out * m.in));
  for (int64_t r = 0; r < m.out; ++r) raw_row(m, r, out.data() + begin + r * m.in);
}

std::vector<float> dequantised(const RawMatrix& m) {
  std::vector<float> out;
  append_dequantised(out, m);
  return out;
}

Packed pack(const RawMatrix& m) {
  auto packed = std::make_shared<RefMatrix>();
  packed->values = dequantised(m);
  return packed;
}

float silu(float z) {
  return z / (1.0f + std::exp(-z));
}

// y[out] = W x, W [out, in] row-major.
void multiply(const float* w, const float* x, int64_t out, int64_t in, float* y) {
  for (int64_t r = 0; r < out; ++r) y[r] = ref_dot(w + r * in, x, in);
}

}  // namespace

const float* ref_values(const Packed& packed) {
  return static_cast<const RefMatrix&>(*packed).values.data();
}

float ref_dot(const float* a, const float* b, int64_t n) {
  float lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) lanes[j] += a[i + j] * b[i + j];
  for (; i < n; ++i) lanes[i % 8] += a[i] * b[i];
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

LinearWeight RefOps::pack_linear(std::span<const RawMatrix> stacked) {
  CHECK(!stacked.empty());
  auto packed = std::make_shared<RefMatrix>();
  LinearWeight w{.out = 0, .in = stacked[0].in, .packed = packed};
  for (const RawMatrix& m : stacked) {
    CHECK(m.in == w.in, "stacked matrices of ", w.in, " and ", m.in, " columns");
    w.out += m.out;
    append_dequantised(packed->values, m);
  }
  return w;
}

ExpertWeights RefOps::pack_experts(std::span<const RawExpert> experts) {
  CHECK(!experts.empty());
  auto packed = std::make_shared<RefExperts>();
  for (const RawExpert& e : experts)
    packed->experts.push_back({.gate = dequantised(e.gate), .up = dequantised(e.up), .down = dequantised(e.down)});
  return {.num_experts = static_cast<int64_t>(experts.size()),
          .hidden = experts[0].gate.in,
          .inter = experts[0].gate.out,
          .packed = packed};
}

MlaUpWeight RefOps::pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) {
  CHECK(kv_b.out == shape.heads * (shape.nope + shape.value) && kv_b.in == shape.latent, kv_b.out, "x", kv_b.in);
  return {.packed = pack(kv_b)};
}

EmbedWeight RefOps::pack_embed(const RawMatrix& table) {
  return {.vocab = table.out, .dim = table.in, .first = table.first_row, .packed = pack(table)};
}

Tensor RefOps::embed(const EmbedWeight& table, std::span<const int32_t> tokens) {
  const Tensor y = arena_.tensor(DType::kF32, static_cast<int64_t>(tokens.size()), table.dim);
  for (int64_t i = 0; i < y.rows; ++i) {
    CHECK(tokens[i] >= 0 && tokens[i] < table.vocab * comm().size(), "token ", tokens[i], " of ", table.vocab);
    const int64_t row = tokens[i] - table.first;
    if (row >= 0 && row < table.vocab) {
      std::copy_n(ref_values(table.packed) + row * table.dim, table.dim, y.row<float>(i));
    } else {
      std::fill_n(y.row<float>(i), table.dim, 0.0f);
    }
  }
  comm().all_reduce(y);
  return y;
}

void RefOps::rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& y) {
  CHECK(static_cast<int64_t>(weight.size()) == x.cols, weight.size(), " weights for ", x.cols, " columns");
  CHECK(y.dtype == DType::kF32 && y.rows == x.rows && y.cols == x.cols, "a norm of ", x.cols, " into ", y.cols);
  for (int64_t i = 0; i < x.rows; ++i) {
    const float* in = x.row<float>(i);
    const float mean_square = ref_dot(in, in, x.cols) / static_cast<float>(x.cols);
    const float factor = 1.0f / std::sqrt(mean_square + eps);
    for (int64_t j = 0; j < x.cols; ++j) y.row<float>(i)[j] = in[j] * factor * weight[j];
  }
}

Tensor RefOps::linear(const Tensor& x, const LinearWeight& w, DType out) {
  CHECK(x.cols == w.in && out == DType::kF32, x.cols, " columns for ", w.in);
  const Tensor y = arena_.tensor(DType::kF32, x.rows, w.out);
  for (int64_t i = 0; i < x.rows; ++i) multiply(ref_values(w.packed), x.row<float>(i), w.out, w.in, y.row<float>(i));
  return y;
}

void RefOps::add(const Tensor& residual, const Tensor& y) {
  CHECK(residual.rows == y.rows && residual.cols == y.cols);
  for (int64_t i = 0; i < y.rows; ++i)
    for (int64_t j = 0; j < y.cols; ++j) residual.row<float>(i)[j] += y.row<float>(i)[j];
}

Tensor RefOps::silu_mul(const Tensor& gate_up) {
  const int64_t width = gate_up.cols / 2;
  const Tensor y = arena_.tensor(DType::kF32, gate_up.rows, width);
  for (int64_t i = 0; i < y.rows; ++i) {
    const float* in = gate_up.row<float>(i);
    for (int64_t j = 0; j < width; ++j) y.row<float>(i)[j] = silu(in[j]) * in[width + j];
  }
  return y;
}

void RefOps::rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
                  const Rope& rope) {
  const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
  CHECK(x.cols % head_dim == 0 && rope_begin + 2 * pairs <= head_dim);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t p = 0; p < pairs; ++p) {
      const float angle = static_cast<float>(positions[i]) * rope.inv_freq[p];
      const float c = std::cos(angle) * rope.cos_sin_factor;
      const float s = std::sin(angle) * rope.cos_sin_factor;
      for (float* head = x.row<float>(i); head < x.row<float>(i) + x.cols; head += head_dim) {
        float& x0 = head[rope_begin + (rope.halves ? p : 2 * p)];
        float& x1 = head[rope_begin + (rope.halves ? p + pairs : 2 * p + 1)];
        const float a = x0, b = x1;
        x0 = a * c - b * s;
        x1 = a * s + b * c;
      }
    }
  }
}

Tensor RefOps::moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& weights) {
  const auto& experts = static_cast<const RefExperts&>(*weights.packed).experts;
  const int64_t hidden = weights.hidden, inter = weights.inter;
  const Tensor y = arena_.tensor(DType::kF32, x.rows, hidden);
  std::vector<float> gate(inter), up(inter), down(hidden);
  for (int64_t i = 0; i < x.rows; ++i) {
    const float* in = x.row<float>(i);
    std::fill_n(y.row<float>(i), hidden, 0.0f);
    for (int32_t k = 0; k < routing.top_k; ++k) {
      const int32_t id = routing.ids[i * routing.top_k + k];
      if (id < 0) continue;
      const auto& expert = experts.at(static_cast<size_t>(id));
      const float weight = routing.weights[i * routing.top_k + k];
      multiply(expert.gate.data(), in, inter, hidden, gate.data());
      multiply(expert.up.data(), in, inter, hidden, up.data());
      for (int64_t j = 0; j < inter; ++j) gate[j] = silu(gate[j]) * up[j];
      multiply(expert.down.data(), gate.data(), hidden, inter, down.data());
      for (int64_t j = 0; j < hidden; ++j) y.row<float>(i)[j] += weight * down[j];
    }
  }
  return y;
}

Tensor RefOps::gather_rows(const Tensor& x, std::span<const int32_t> rows) {
  const Tensor y = arena_.tensor(DType::kF32, static_cast<int64_t>(rows.size()), x.cols);
  for (int64_t i = 0; i < y.rows; ++i) std::copy_n(x.row<float>(rows[i]), x.cols, y.row<float>(i));
  return y;
}

namespace {

class RefSizes final : public WeightPacker {
 public:
  const char* name() const override { return "ref"; }
  DType activation_dtype() const override { return DType::kF32; }
  bool makes_dummy_weights() const override { return true; }

  LinearWeight pack_linear(std::span<const RawMatrix> stacked) override {
    int64_t bytes = 0;
    for (const RawMatrix& m : stacked) bytes += f32_bytes(m);
    return counted_linear(stacked, bytes);
  }
  ExpertWeights pack_experts(std::span<const RawExpert> experts) override {
    int64_t bytes = 0;
    for (const RawExpert& e : experts) bytes += f32_bytes(e.gate) + f32_bytes(e.up) + f32_bytes(e.down);
    return counted_experts(experts, bytes);
  }
  MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape&) override {
    return {.packed = counted_weight(f32_bytes(kv_b))};
  }
  EmbedWeight pack_embed(const RawMatrix& table) override { return counted_embed(table, f32_bytes(table)); }

 private:
  static int64_t f32_bytes(const RawMatrix& m) { return m.out * m.in * static_cast<int64_t>(sizeof(float)); }
};

}  // namespace

std::unique_ptr<WeightPacker> make_ref_sizes() {
  return std::make_unique<RefSizes>();
}

std::unique_ptr<Ops> make_ref_ops(Comm& comm, Comm& dcp) {
  return std::make_unique<RefOps>(comm, dcp);
}

}  // namespace perigee
