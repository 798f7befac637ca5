// Multi-head latent attention of the CPU backend (DeepSeek-V2 2024, section 2.1), in both forms of DESIGN D3.
//
// Absorbed: queries are mapped into latent space and meet the cached rows [c | k_rope] themselves; the keys are cut at
// multiples of 1,024, counted among those that lie on this rank, into pieces whose partial results (max, sum, output)
// are merged in ascending order.
// Expanded: keys and values of each head are made again from the cached latents, 256 keys at a time (absolute
// multiples), and met by an online softmax in ascending order (Dao et al. 2022; Milakov, Gimelshein 2018).
// Either way a query's result is the same bits for every batch, chunking and thread count.
//
// Queries, latents, softmax weights and expanded keys and values are bf16, all sums f32. Cache rows at positions
// beyond a sequence's last new token may hold anything, NaN included.
#pragma once

#include "ops/batch.h"
#include "ops/cpu/context.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee::cpu {

// kv_b [h * (dn + dv), L], per head dn rows of W_UK, then dv rows of W_UV. The packing is the same for every Isa.
int64_t mla_up_bytes(const MlaShape& shape);  // of what pack_mla_up() keeps
MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape);

// q [n, h * (dn + dr)] bf16, rotated; the new tokens' latents are already in the cache (bf16). -> [n, h * dv] bf16.
Tensor mla_attend(const CpuContext& cpu, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape,
                  const Batch& batch, const LatentLayer& cache);

// See Ops. Queries are bf16.
Tensor mla_absorb(const CpuContext& cpu, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape,
                  const Batch& batch);
Tensor attend_latents(const CpuContext& cpu, const Tensor& queries, const MlaShape& shape, const Batch& batch,
                      const LatentLayer& cache);
Tensor mla_project(const CpuContext& cpu, const Tensor& u, const MlaUpWeight& up, const MlaShape& shape,
                   const Batch& batch);

}  // namespace perigee::cpu
