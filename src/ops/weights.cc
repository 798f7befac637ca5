#include "ops/weights.h"

namespace perigee {
namespace {

float int4_element(const RawMatrix& m, int64_t r, int64_t c) {
  const uint32_t word = static_cast<const uint32_t*>(m.data)[r * (m.in / 8) + c / 8];
  const int nibble = static_cast<int>((word >> (4 * (c % 8))) & 15u) - 8;
  const uint16_t scale = static_cast<const uint16_t*>(m.scale)[r * (m.in / 32) + c / 32];
  return bf16_to_f32(f32_to_bf16(static_cast<float>(nibble) * bf16_to_f32(scale)));
}

float fp8_element(const RawMatrix& m, int64_t r, int64_t c) {
  const int64_t blocks = (m.in + 127) / 128;
  const float scale = static_cast<const float*>(m.scale)[(r / 128) * blocks + c / 128];
  return f8e4m3_to_f32(static_cast<const uint8_t*>(m.data)[r * m.in + c]) * scale;
}

}  // namespace

VectorWeight::VectorWeight(std::vector<float> values) {
  auto owner = std::make_shared<const std::vector<float>>(std::move(values));
  data_ = owner->data();
  size_ = owner->size();
  owner_ = std::move(owner);
}

float raw_element(const RawMatrix& m, int64_t r, int64_t c) {
  const int64_t at = r * m.in + c;
  switch (m.format) {
    case WeightFormat::kF32: return static_cast<const float*>(m.data)[at];
    case WeightFormat::kBF16: return bf16_to_f32(static_cast<const uint16_t*>(m.data)[at]);
    case WeightFormat::kF16: return f16_to_f32(static_cast<const uint16_t*>(m.data)[at]);
    case WeightFormat::kF8Block128: return fp8_element(m, r, c);
    case WeightFormat::kInt4Group32: return int4_element(m, r, c);
  }
  return 0;
}

void raw_row(const RawMatrix& m, int64_t r, float* out) {
  for (int64_t c = 0; c < m.in; ++c) out[c] = raw_element(m, r, c);
}

std::vector<float> kda_conv_taps(const RawMatrix& q, const RawMatrix& k, const RawMatrix& v) {
  std::vector<float> taps(static_cast<size_t>(3 * q.out * q.in));
  std::vector<float> row(static_cast<size_t>(q.in));
  int64_t channel = 0;
  for (const RawMatrix* m : {&q, &k, &v}) {
    CHECK(m->out == q.out && m->in == q.in, "convolutions of ", q.out, "x", q.in, " and ", m->out, "x", m->in);
    for (int64_t r = 0; r < m->out; ++r, ++channel) {
      raw_row(*m, r, row.data());
      for (int64_t t = 0; t < m->in; ++t)
        taps[static_cast<size_t>(t * 3 * q.out + channel)] = row[static_cast<size_t>(t)];
    }
  }
  return taps;
}

}  // namespace perigee
