// ShapeSource: another source's tensors without their numbers: shapes and formats, for what lays weights out alone.
// Where numbers are read on the host they are zeros.
#pragma once

#include "model/weights.h"

namespace perigee {

class ShapeSource final : public TensorSource {
 public:
  explicit ShapeSource(const TensorSource& of) : of_(of) {}  // which outlives it, and has verified its tensors

  Status verify(std::span<const TensorSpec>, const ModelConfig&) override { return {}; }
  WeightFormat format(const TensorSpec& spec) const override { return of_.format(spec); }
  RawWeight matrix(const TensorSpec& spec, const MatrixPart& part) const override {
    RawWeight weight = matrix_or_keys(spec, part);
    RawMatrix& m = weight.matrix;
    m.data = zeros(data_bytes(m), weight);
    if (m.has_scales()) m.scale = zeros(scale_bytes(m), weight);
    return weight;
  }
  RawWeight matrix_or_keys(const TensorSpec& spec, const MatrixPart& part) const override {
    return {.matrix = window({.format = format(spec), .out = spec.out, .in = spec.in}, part), .owners = {}};
  }
  std::vector<float> vector(const TensorSpec&, const MatrixPart& part) const override {
    return std::vector<float>(static_cast<size_t>(part.columns));
  }
  std::optional<float> cache_scale(const std::string& attention) const override { return of_.cache_scale(attention); }

 private:
  static const void* zeros(const ByteRows& bytes, RawWeight& weight) {
    auto memory = std::make_shared<Buffer>(static_cast<size_t>(bytes.extent()));
    weight.owners.push_back(memory);
    return memory->data();
  }

  const TensorSource& of_;
};

}  // namespace perigee
