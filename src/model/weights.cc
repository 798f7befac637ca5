#include "model/weights.h"

#include <cmath>

namespace perigee {

std::string TensorSpec::stored_name() const {
  const bool bare = is_vector(role) && role != TensorRole::kNorm;
  return bare ? name : name + ".weight";
}

std::vector<int64_t> TensorSpec::stored_shape() const {
  if (role == TensorRole::kConv) return {out, 1, in};
  if (role == TensorRole::kLogDecay) return {1, 1, in, 1};
  return is_vector(role) ? std::vector<int64_t>{in} : std::vector<int64_t>{out, in};
}

RawWeight WeightReader::raw(const TensorSpec& spec) {
  const MatrixPart part = part_of(spec, ranks_);
  return counted(packer_.makes_dummy_weights() ? source_.matrix_or_keys(spec, part) : source_.matrix(spec, part));
}

RawWeight WeightReader::raw_on_host(const TensorSpec& spec) {
  return counted(source_.matrix(spec, part_of(spec, ranks_)));
}

RawWeight WeightReader::counted(RawWeight weight) {
  count(raw_bytes(weight.matrix));
  return weight;
}

std::vector<float> WeightReader::part_of_vector(const TensorSpec& spec) {
  const MatrixPart part = part_of(spec, ranks_);
  count(raw_bytes({.format = source_.format(spec), .out = part.rows, .in = part.columns}));
  return source_.vector(spec, part);
}

void WeightReader::count(int64_t bytes) {
  done_ += bytes;
  if (progress_) progress_("weights", done_, total_);
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
  LinearWeight weight = packer_.pack_linear(matrices);
  packed(weight.packed);
  return weight;
}

LinearWeight WeightReader::gate_up(const TensorSpec& gate, const TensorSpec& up) {
  const RawWeight a = raw(gate), b = raw(up);
  LinearWeight weight = packer_.pack_gate_up(a.matrix, b.matrix);
  packed(weight.packed);
  return weight;
}

EmbedWeight WeightReader::embed(const TensorSpec& spec) {
  EmbedWeight weight = packer_.pack_embed(raw(spec).matrix);
  packed(weight.packed);
  return weight;
}

MlaUpWeight WeightReader::mla_up(const TensorSpec& spec, const MlaShape& shape) {
  MlaUpWeight weight = packer_.pack_mla_up(raw(spec).matrix, shape);
  packed(weight.packed);
  return weight;
}

ExpertWeights WeightReader::experts(std::span<const TensorSpec> specs) {
  std::vector<RawWeight> keep;
  for (const TensorSpec& spec : specs)
    if (spec.shard.kind() != ShardKind::kOneRank || spec.shard.is_of(ranks_)) keep.push_back(raw(spec));
  std::vector<RawExpert> experts;
  for (size_t i = 0; i + 2 < keep.size(); i += 3)
    experts.push_back({.gate = keep[i].matrix, .up = keep[i + 1].matrix, .down = keep[i + 2].matrix});
  ExpertWeights weights = packer_.pack_experts(experts);
  packed(weights.packed);
  return weights;
}

VectorWeight WeightReader::pack_vector(std::vector<float> values) {
  packed_bytes_ += static_cast<int64_t>(values.size() * sizeof(float));
  return packer_.pack_vector(std::move(values));
}

VectorWeight WeightReader::kda_conv(const TensorSpec& q, const TensorSpec& k, const TensorSpec& v) {
  const RawWeight a = raw_on_host(q), b = raw_on_host(k), c = raw_on_host(v);
  return pack_vector(kda_conv_taps(a.matrix, b.matrix, c.matrix));
}

VectorWeight WeightReader::matrix_f32(const TensorSpec& spec) {
  const RawWeight weight = raw_on_host(spec);
  const RawMatrix& m = weight.matrix;
  std::vector<float> out(static_cast<size_t>(m.out * m.in));
  for (int64_t r = 0; r < m.out; ++r) raw_row(m, r, out.data() + r * m.in);
  return pack_vector(std::move(out));
}

VectorWeight WeightReader::vector(const TensorSpec& spec) {
  return pack_vector(part_of_vector(spec));
}

VectorWeight WeightReader::exp_vector(const TensorSpec& spec) {
  std::vector<float> out = part_of_vector(spec);
  for (float& x : out) x = static_cast<float>(std::exp(static_cast<double>(x)));
  return pack_vector(std::move(out));
}

float WeightReader::cache_scale(const std::string& attention) const {
  return cache_scales_.empty() ? 1 : cache_scales_.at(attention);
}

}  // namespace perigee
