// CudaOps: weights to the GPU, once at load.
#include <algorithm>
#include <array>

#include "base/cgroup.h"
#include "ops/cuda/backend.h"
#include "ops/cuda/packed.h"

namespace perigee {
namespace {

constexpr int64_t kColumnUnit = 128;  // of padded columns
static_assert(kCudaLimits.latent_unit == kColumnUnit, "latents have no padding");

// Whether a packed FP8 matrix, which has a scale for each 8 rows (packed.h), can hold a window's scales.
bool keeps_fp8(const RawMatrix& m) {
  const bool in_one_block = m.first_row / 128 == (m.first_row + m.out - 1) / 128;
  return m.format == WeightFormat::kF8Block128 && m.starts_at_scale() && (m.first_row % 8 == 0 || in_one_block);
}

// Dense matrices stay FP8 if all of a stack are and its seams lie between the 8 rows that share a scale; all else
// becomes bf16.
WeightFormat dense_format(std::span<const RawMatrix> stacked) {
  for (size_t i = 0; i < stacked.size(); ++i)
    if (!keeps_fp8(stacked[i]) || (i + 1 < stacked.size() && stacked[i].out % 8 != 0)) return WeightFormat::kBF16;
  return WeightFormat::kF8Block128;
}

// What a matrix of an expert stays as.
WeightFormat expert_format(const RawMatrix& m) {
  const bool int4 = m.format == WeightFormat::kInt4Group32 && m.starts_at_scale();
  return int4 || keeps_fp8(m) ? m.format : WeightFormat::kBF16;
}

// Theirs if all matrices of all experts share it, else bf16: a model may leave some of them unquantised, and a
// shard may begin between scales.
WeightFormat common_format(std::span<const RawExpert> experts) {
  const WeightFormat format = expert_format(experts[0].gate);
  const bool alike = std::all_of(experts.begin(), experts.end(), [format](const RawExpert& e) {
    return expert_format(e.gate) == format && expert_format(e.up) == format && expert_format(e.down) == format;
  });
  return alike ? format : WeightFormat::kBF16;
}

// More do not read a file faster than the link takes it.
int num_upload_threads() {
  return std::min(available_cores(), 8);
}

}  // namespace

CudaMatrix CudaOps::make_matrix(WeightFormat format, int64_t out, int64_t in, int64_t count) {
  CHECK(in % kCudaLimits.unit == 0, "a matrix of ", in, " columns");
  CudaMatrix m;
  m.format = format;
  m.out = out;
  m.in = in;
  m.padded_in = (in + kColumnUnit - 1) / kColumnUnit * kColumnUnit;
  m.data = device_buffer(static_cast<size_t>(count * m.matrix_bytes()));
  if (m.scale_bytes() > 0) m.scale = device_buffer(static_cast<size_t>(count * m.scale_bytes()));
  return m;
}

PackTarget CudaOps::target(CudaMatrix& m, int64_t index, int interleave, int64_t first_row) const {
  return {.format = m.format,
          .data = m.data.data() + index * m.matrix_bytes(),
          .scale = m.scale.data() + index * m.scale_bytes(),
          .padded_in = m.padded_in,
          .first_row = first_row,
          .interleave = interleave};
}

void CudaOps::pack(const RawMatrix& raw, PackTarget target) {
  RawMatrix there = raw;
  if (raw.data != nullptr) {
    if (!upload_) upload_ = std::make_unique<Upload>(num_upload_threads());
    there.data = upload_->bring(data_bytes(raw), stream_);
    there.scale = upload_->bring(scale_bytes(raw), stream_);
  }
  if (device_status().ok()) check(pack_matrix(there, target, stream()), "packing weights");
}

LinearWeight CudaOps::pack_linear(std::span<const RawMatrix> stacked) {
  CHECK(!stacked.empty());
  int64_t out = 0;
  for (const RawMatrix& m : stacked) {
    CHECK(m.in == stacked[0].in, "stacked matrices of ", m.in, " and ", stacked[0].in, " columns");
    out += m.out;
  }
  auto packed = std::make_shared<CudaMatrix>(make_matrix(dense_format(stacked), out, stacked[0].in, 1));
  int64_t row = 0;
  for (const RawMatrix& m : stacked) {
    pack(m, target(*packed, 0, -1, row));
    row += m.out;
  }
  return {.out = out, .in = stacked[0].in, .packed = std::move(packed)};
}

// Interleaved as in experts (packed.h).
LinearWeight CudaOps::pack_gate_up(const RawMatrix& gate, const RawMatrix& up) {
  CHECK(gate.out == up.out && gate.in == up.in && gate.out % kCudaLimits.unit == 0, gate.out, "x", gate.in, " and ",
        up.out, "x", up.in);
  const WeightFormat format = dense_format(std::array{gate, up});
  auto packed = std::make_shared<CudaMatrix>(make_matrix(format, 2 * gate.out, gate.in, 1));
  pack(gate, target(*packed, 0, 0, 0));
  pack(up, target(*packed, 0, 1, 0));
  return {.out = 2 * gate.out, .in = gate.in, .packed = std::move(packed)};
}

ExpertWeights CudaOps::pack_experts(std::span<const RawExpert> experts) {
  CHECK(!experts.empty());
  const auto count = std::ssize(experts);
  const int64_t hidden = experts[0].gate.in, inter = experts[0].gate.out;
  CHECK(inter % kCudaLimits.unit == 0, "experts of ", inter, " rows");
  const WeightFormat format = common_format(experts);
  auto packed = std::make_shared<CudaExperts>();
  packed->gate_up = make_matrix(format, 2 * inter, hidden, count);
  packed->down = make_matrix(format, hidden, inter, count);
  for (int64_t e = 0; e < count; ++e) {
    for (const RawMatrix* m : {&experts[e].gate, &experts[e].up})
      CHECK(m->out == inter && m->in == hidden, "expert ", e, " is ", m->out, "x", m->in);
    CHECK(experts[e].down.out == hidden && experts[e].down.in == inter, "expert ", e, " differs from the first");
    pack(experts[e].gate, target(packed->gate_up, e, 0, 0));
    pack(experts[e].up, target(packed->gate_up, e, 1, 0));
    pack(experts[e].down, target(packed->down, e, -1, 0));
  }
  return {.num_experts = count, .hidden = hidden, .inter = inter, .packed = std::move(packed)};
}

MlaUpWeight CudaOps::pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) {
  CHECK(kv_b.out == shape.heads * (shape.nope + shape.value) && kv_b.in == shape.latent, kv_b.out, "x", kv_b.in);
  auto packed = std::make_shared<CudaMlaUp>();
  packed->kv_b = make_matrix(WeightFormat::kBF16, kv_b.out, kv_b.in, 1);
  packed->keys = make_matrix(WeightFormat::kBF16, shape.heads * shape.latent, shape.nope, 1);
  CHECK(packed->kv_b.padded_in == shape.latent, "latent of ", shape.latent);
  pack(kv_b, target(packed->kv_b, 0, -1, 0));
  if (device_status().ok()) check(pack_mla_keys(packed->kv_b, shape, packed->keys, stream()), "packing weights");
  return {.packed = std::move(packed)};
}

EmbedWeight CudaOps::pack_embed(const RawMatrix& table) {
  auto packed = std::make_shared<CudaMatrix>(make_matrix(WeightFormat::kBF16, table.out, table.in, 1));
  pack(table, target(*packed, 0, -1, 0));
  return {.vocab = table.out, .dim = table.in, .first = table.first_row, .packed = std::move(packed)};
}

VectorWeight CudaOps::pack_vector(VectorWeight host) {
  if (host.empty()) return host;
  auto memory = std::make_shared<Buffer>(device_buffer(host.size() * sizeof(float)));
  device_copy(memory->data(), host.data(), host.size() * sizeof(float));
  return {reinterpret_cast<const float*>(memory->data()), host.size(), memory};
}

}  // namespace perigee
