// Attention with keys and values by head of the CPU backend, and its cache. Shapes and meaning are those of ops/ops.h.
//
// Keys are met block by block, 64 at absolute positions, by an online softmax in ascending order (Milakov, Gimelshein
// 2018), all in f32: so a query's result is the same bits for every batch, chunking and thread count. Cache rows at
// positions beyond a sequence's last new token may hold anything, NaN included.
#pragma once

#include "ops/batch.h"
#include "ops/cpu/context.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee::cpu {

void write_full(const CpuContext& cpu, const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache);
Tensor full_attend(const CpuContext& cpu, const Tensor& q, const FullShape& shape, const Batch& batch,
                   const FullLayer& cache);

}  // namespace perigee::cpu
