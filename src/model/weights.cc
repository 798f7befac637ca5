#include "model/weights.h"

#include <cmath>

namespace perigee {

int64_t raw_bytes(const RawMatrix& m) {
  const int64_t elements = m.out * m.in;
  switch (m.format) {
    case WeightFormat::kF32: return elements * 4;
    case WeightFormat::kBF16:
    case WeightFormat::kF16: return elements * 2;
    case WeightFormat::kF8Block128: return elements + (m.out + 127) / 128 * ((m.in + 127) / 128) * 4;
    case WeightFormat::kInt4Group32: return elements / 2 + elements / 32 * 2;
  }
  return 0;
}

std::string TensorSpec::stored_name() const {
  const bool bare = role == TensorRole::kBias || role == TensorRole::kLogDecay || role == TensorRole::kTimeBias;
  return bare ? name : name + ".weight";
}

std::vector<int64_t> TensorSpec::stored_shape() const {
  if (role == TensorRole::kConv) return {out, 1, in};
  if (role == TensorRole::kLogDecay) return {1, 1, in, 1};
  return is_vector(role) ? std::vector<int64_t>{in} : std::vector<int64_t>{out, in};
}

RawWeight WeightReader::raw(const TensorSpec& spec) {
  return counted(ops_.makes_dummy_weights() ? source_.matrix_or_keys(spec) : source_.matrix(spec));
}

RawWeight WeightReader::raw_on_host(const TensorSpec& spec) {
  return counted(source_.matrix(spec));
}

RawWeight WeightReader::counted(RawWeight weight) {
  done_ += raw_bytes(weight.matrix);
  if (progress_) progress_("weights", done_, total_);
  return weight;
}

void WeightReader::packed(const Packed& packed) {
  packed_bytes_ += packed->bytes();
}

LinearWeight WeightReader::linear(std::span<const TensorSpec> stacked) {
  std::vector<RawWeight> keep;
  std::vector<RawMatrix> matrices;
  for (const TensorSpec& spec : stacked) {
    keep.push_back(raw(spec));
    matrices.push_back(keep.back().matrix);
  }
  LinearWeight weight = ops_.pack_linear(matrices);
  packed(weight.packed);
  return weight;
}

LinearWeight WeightReader::gate_up(const TensorSpec& gate, const TensorSpec& up) {
  const RawWeight a = raw(gate), b = raw(up);
  LinearWeight weight = ops_.pack_gate_up(a.matrix, b.matrix);
  packed(weight.packed);
  return weight;
}

EmbedWeight WeightReader::embed(const TensorSpec& spec) {
  EmbedWeight weight = ops_.pack_embed(raw(spec).matrix);
  packed(weight.packed);
  return weight;
}

MlaUpWeight WeightReader::mla_up(const TensorSpec& spec, const MlaShape& shape) {
  MlaUpWeight weight = ops_.pack_mla_up(raw(spec).matrix, shape);
  packed(weight.packed);
  return weight;
}

ExpertWeights WeightReader::experts(std::span<const TensorSpec> specs) {
  std::vector<RawWeight> keep;
  for (const TensorSpec& spec : specs) keep.push_back(raw(spec));
  std::vector<RawExpert> experts;
  for (size_t i = 0; i + 2 < keep.size(); i += 3)
    experts.push_back({.gate = keep[i].matrix, .up = keep[i + 1].matrix, .down = keep[i + 2].matrix});
  ExpertWeights weights = ops_.pack_experts(experts);
  packed(weights.packed);
  return weights;
}

VectorWeight WeightReader::pack_vector(std::vector<float> values) {
  packed_bytes_ += static_cast<int64_t>(values.size() * sizeof(float));
  return ops_.pack_vector(std::move(values));
}

VectorWeight WeightReader::kda_conv(const TensorSpec& q, const TensorSpec& k, const TensorSpec& v) {
  const RawWeight a = raw_on_host(q), b = raw_on_host(k), c = raw_on_host(v);
  return pack_vector(kda_conv_taps(a.matrix, b.matrix, c.matrix));
}

VectorWeight WeightReader::matrix_f32(const TensorSpec& spec) {
  const RawWeight weight = raw_on_host(spec);
  std::vector<float> out(spec.out * spec.in);
  for (int64_t r = 0; r < spec.out; ++r) raw_row(weight.matrix, r, out.data() + r * spec.in);
  return pack_vector(std::move(out));
}

VectorWeight WeightReader::vector(const TensorSpec& spec) {
  return pack_vector(source_.vector(spec));
}

VectorWeight WeightReader::exp_vector(const TensorSpec& spec) {
  std::vector<float> out = source_.vector(spec);
  for (float& x : out) x = static_cast<float>(std::exp(static_cast<double>(x)));
  return pack_vector(std::move(out));
}

float WeightReader::cache_scale(const std::string& attention) {
  const float scale = source_.cache_scale(attention);
  read_cache_scales_ |= scale != 1;
  return scale;
}

}  // namespace perigee
