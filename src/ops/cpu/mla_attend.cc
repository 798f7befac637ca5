#include "ops/cpu/mla_attend.h"

#include <vector>

#include "ops/cpu/mla_call.h"

namespace perigee::cpu {
namespace {

// Panels of the [depth, columns] matrix at(k, c), zero beyond (num_k, num_columns).
template <typename F>
void pack_panels(F&& at, int64_t num_k, int64_t num_columns, int64_t depth, int64_t columns, uint32_t* out) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t k = 0; k < depth; k += 2) {
      const uint32_t low = c < num_columns && k < num_k ? at(k, c) : 0;
      const uint32_t high = c < num_columns && k + 1 < num_k ? at(k + 1, c) : 0;
      out[c / kPanel * (depth / 2 * kPanel) + k / 2 * kPanel + c % kPanel] = low | high << 16;
    }
  }
}

uint32_t* head_words(const Buffer& panels, int64_t head, int64_t depth, int64_t columns) {
  return reinterpret_cast<uint32_t*>(panels.data()) + head * (depth / 2) * columns;
}

struct OutShape {
  DType dtype = DType::kF32;
  int64_t rows = 0, cols = 0;
};

MlaCall make_call(const CpuContext& cpu, const Tensor& q, const MlaUpWeight* up, const MlaShape& shape,
                  const Batch& batch, const OutShape& out) {
  cpu.scratch.reset();
  return {.cpu = cpu,
          .kernels = mla_kernels(cpu.isa),
          .dims = MlaDims(shape),
          .up = up == nullptr ? nullptr : static_cast<const PackedMlaUp*>(up->packed.get()),
          .q = q,
          .batch = batch,
          .out = cpu.arena.tensor(out.dtype, out.rows, out.cols),
          .scale = shape.softmax_scale * kLog2E};
}

void check_queries(const Tensor& q, const MlaShape& shape) {
  CHECK(q.dtype == DType::kF32 && q.cols == shape.heads * shape.q_head(), "q is ", dtype_name(q.dtype), " of ", q.cols,
        " columns");
}

void take_cache(MlaCall& call, const LatentLayer& cache) {
  CHECK(cache.format != LatentFormat::kF32 &&
        cache.row_bytes == latent_row_bytes(cache.format, call.dims.latent, call.dims.rope));
  call.cache = cache;
}

}  // namespace

int64_t mla_up_bytes(const MlaShape& shape) {
  const MlaDims d(shape);
  return d.absorb_bytes() + d.keys_bytes() + d.values_bytes();
}

MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) {
  const MlaDims d(shape);
  const int64_t per_head = d.nope + d.value;
  CHECK(kv_b.out == d.heads * per_head && kv_b.in == d.latent, "kv_b is [", kv_b.out, ", ", kv_b.in, "]");
  auto packed = std::make_shared<PackedMlaUp>();
  packed->absorb = Buffer(static_cast<size_t>(d.absorb_bytes()));
  packed->keys = Buffer(static_cast<size_t>(d.keys_bytes()));
  packed->values = Buffer(static_cast<size_t>(d.values_bytes()));
  std::vector<float> row(static_cast<size_t>(d.latent));
  std::vector<uint16_t> up(static_cast<size_t>(per_head * d.latent));  // one head in bf16
  for (int64_t h = 0; h < d.heads; ++h) {
    for (int64_t r = 0; r < per_head; ++r) {
      raw_row(kv_b, h * per_head + r, row.data());
      for (int64_t i = 0; i < d.latent; ++i) {
        up[static_cast<size_t>(r * d.latent + i)] = f32_to_bf16(row[static_cast<size_t>(i)]);
      }
    }
    const uint16_t* w = up.data();
    pack_panels([&](int64_t k, int64_t c) { return w[k * d.latent + c]; }, d.nope, d.latent, d.nope_depth,
                d.latent_depth, head_words(packed->absorb, h, d.nope_depth, d.latent_depth));
    pack_panels([&](int64_t k, int64_t c) { return w[c * d.latent + k]; }, d.latent, d.nope, d.latent_depth,
                d.nope_columns, head_words(packed->keys, h, d.latent_depth, d.nope_columns));
    pack_panels([&](int64_t k, int64_t c) { return w[(d.nope + c) * d.latent + k]; }, d.latent, d.value, d.latent_depth,
                d.value_columns, head_words(packed->values, h, d.latent_depth, d.value_columns));
  }
  return {.packed = std::move(packed)};
}

Tensor mla_attend(const CpuContext& cpu, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape,
                  const Batch& batch, const LatentLayer& cache) {
  check_queries(q, shape);
  MlaCall call = make_call(cpu, q, &up, shape, batch, {.rows = q.rows, .cols = shape.heads * shape.value});
  take_cache(call, cache);
  attend_absorbed(call);
  attend_expanded(call);
  return call.out;
}

Tensor mla_absorb(const CpuContext& cpu, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape,
                  const Batch& batch) {
  check_queries(q, shape);
  const int64_t width = shape.heads * (shape.latent + shape.rope);
  const MlaCall call = make_call(cpu, q, &up, shape, batch, {.dtype = DType::kBF16, .rows = q.rows, .cols = width});
  absorb_queries(call);
  return call.out;
}

Tensor attend_latents(const CpuContext& cpu, const Tensor& queries, const MlaShape& shape, const Batch& batch,
                      const LatentLayer& cache) {
  CHECK(queries.dtype == DType::kBF16 && queries.contiguous() &&
            queries.cols == shape.heads * (shape.latent + shape.rope),
        "queries are ", dtype_name(queries.dtype), " of ", queries.cols, " columns");
  MlaCall call =
      make_call(cpu, queries, nullptr, shape, batch, {.rows = queries.rows * shape.heads, .cols = shape.latent + 1});
  take_cache(call, cache);
  attend_latents(call);
  return call.out;
}

Tensor mla_project(const CpuContext& cpu, const Tensor& u, const MlaUpWeight& up, const MlaShape& shape,
                   const Batch& batch) {
  CHECK(u.dtype == DType::kF32 && u.contiguous() && u.cols == shape.heads * shape.latent);
  const MlaCall call = make_call(cpu, u, &up, shape, batch, {.rows = u.rows, .cols = shape.heads * shape.value});
  project_latents(call);
  return call.out;
}

}  // namespace perigee::cpu
