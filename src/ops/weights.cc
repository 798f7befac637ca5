#include "ops/weights.h"

namespace perigee {

VectorWeight::VectorWeight(std::vector<float> values) {
  auto owner = std::make_shared<const std::vector<float>>(std::move(values));
  data_ = owner->data();
  size_ = owner->size();
  owner_ = std::move(owner);
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
