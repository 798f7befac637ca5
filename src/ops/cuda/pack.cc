// CudaOps: weights to the GPU, once at load.
#include <algorithm>

#include "base/cgroup.h"
#include "ops/cuda/backend.h"
#include "ops/cuda/packed.h"

namespace perigee {
namespace {

// More do not read a file faster than the link takes it.
int num_upload_threads() {
  return std::min(available_cores(), 8);
}

}  // namespace

CudaMatrix CudaOps::make_matrix(const MatrixLayout& layout) {
  CudaMatrix m(layout);
  m.data = device_buffer(static_cast<size_t>(layout.data_bytes()));
  if (layout.scale_bytes() > 0) m.scale = device_buffer(static_cast<size_t>(layout.all_scale_bytes()));
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
  auto packed = std::make_shared<CudaMatrix>(make_matrix(linear_layout(stacked)));
  int64_t row = 0;
  for (const RawMatrix& m : stacked) {
    pack(m, target(*packed, 0, -1, row));
    row += m.out;
  }
  return {.out = packed->out, .in = packed->in, .packed = packed};
}

// Interleaved as in experts (packed.h).
LinearWeight CudaOps::pack_gate_up(const RawMatrix& gate, const RawMatrix& up) {
  auto packed = std::make_shared<CudaMatrix>(make_matrix(gate_up_layout(gate, up)));
  pack(gate, target(*packed, 0, 0, 0));
  pack(up, target(*packed, 0, 1, 0));
  return {.out = packed->out, .in = packed->in, .packed = packed};
}

ExpertWeights CudaOps::pack_experts(std::span<const RawExpert> experts) {
  const ExpertLayout layout = expert_layout(experts);
  const int64_t hidden = layout.down.out, inter = layout.down.in;
  auto packed = std::make_shared<CudaExperts>();
  packed->gate_up = make_matrix(layout.gate_up);
  packed->down = make_matrix(layout.down);
  const auto count = std::ssize(experts);
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
  const MlaUpLayout layout = mla_up_layout(kv_b, shape);
  auto packed = std::make_shared<CudaMlaUp>();
  packed->kv_b = make_matrix(layout.kv_b);
  packed->keys = make_matrix(layout.keys);
  pack(kv_b, target(packed->kv_b, 0, -1, 0));
  if (device_status().ok()) check(pack_mla_keys(packed->kv_b, shape, packed->keys, stream()), "packing weights");
  return {.packed = std::move(packed)};
}

EmbedWeight CudaOps::pack_embed(const RawMatrix& table) {
  auto packed = std::make_shared<CudaMatrix>(make_matrix(embed_layout(table)));
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
