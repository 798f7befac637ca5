// The memory-bound ops of the CPU backend: one pass over rows, rows spread over the pool's threads.
//
// Shapes, meaning and sources are those of ops/ops.h; activations are bf16 or f32. Every view may be strided. A row's
// result depends on that row alone: not on the number of rows, of threads, or its place among them.
#pragma once

#include <cstdint>
#include <span>

#include "ops/batch.h"
#include "ops/cpu/context.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee::cpu {

int64_t embed_bytes(const RawMatrix& table);     // of what pack_embed() keeps
EmbedWeight pack_embed(const RawMatrix& table);  // any weight format; kept as bf16 rows

// Zeros for tokens that the table does not have.
Tensor embed(const CpuContext& cpu, const EmbedWeight& table, std::span<const int32_t> tokens);
void rms_norm(const CpuContext& cpu, const Tensor& x, std::span<const float> weight, float eps, const Tensor& out);
void add(const CpuContext& cpu, const Tensor& residual, const Tensor& y);
Tensor silu_mul(const CpuContext& cpu, const Tensor& gate_up);
void rope(const CpuContext& cpu, const Tensor& x, int64_t head_dim, int64_t rope_begin,
          std::span<const int32_t> positions, const Rope& rope);
void write_latent(const CpuContext& cpu, const Tensor& c, const Tensor& k_rope, const Batch& batch,
                  const LatentLayer& cache);
Tensor gather_rows(const CpuContext& cpu, const Tensor& x, std::span<const int32_t> rows);

}  // namespace perigee::cpu
