// CudaOps: attention with keys and values by head.
#include <algorithm>
#include <cstdint>

#include "ops/cuda/backend.h"
#include "ops/cuda/full/full_attention.h"

namespace perigee {
namespace {

constexpr int32_t kDecodeTokens = 32;  // a sequence with more new tokens has a launch of its own

void check_cache(const FullLayer& cache, const Batch& batch) {
  CHECK(cache.dtype == DType::kBF16 || cache.dtype == DType::kF8E4M3, "the cuda backend keeps bf16 or e4m3, not ",
        dtype_name(cache.dtype));
  CHECK(batch.device != nullptr && !batch.is_shared(), "keys and values of heads are not shared by ranks");
}

}  // namespace

Tensor CudaOps::full_in(const Tensor& x, const FullWeights& w, const Batch& batch, const FullLayer& cache) {
  check_cache(cache, batch);
  CHECK(cache.heads == w.shape.kv_heads && cache.dim == w.shape.dim &&
            w.qkv.out == (w.shape.heads + 2 * w.shape.kv_heads) * w.shape.dim,
        w.qkv.out, " rows of queries, keys and values");
  const Tensor qkv = linear(x, w.qkv, DType::kF32);
  const Tensor q = arena_.tensor(DType::kBF16, x.rows, w.shape.heads * w.shape.dim);
  check(full_write_rows({qkv, w.shape, w.rope, batch, cache, q}, stream()), "full_in");
  return q;
}

void CudaOps::write_full(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache) {
  check_cache(cache, batch);
  CHECK(k.dtype == DType::kF32 && k.cols == cache.heads * cache.dim && v.cols == k.cols, k.cols);
  check(full_store_rows(k, v, batch, cache, stream()), "write_full");
}

Tensor CudaOps::full_attend(const Tensor& q, const FullShape& shape, const Batch& batch, const FullLayer& cache) {
  check_cache(cache, batch);
  CHECK(q.dtype == DType::kBF16 && q.cols == shape.heads * shape.dim && cache.heads == shape.kv_heads &&
            cache.dim == shape.dim && shape.heads % shape.kv_heads == 0,
        q.cols, " columns of queries");
  // The kernels copy 16 bytes of the cache and read four queries' numbers at once.
  CHECK(cache.page_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(cache.base) % 16 == 0 && q.row_stride % 4 == 0 &&
            reinterpret_cast<uintptr_t>(q.data) % 8 == 0,
        "pages of ", cache.page_bytes, " bytes, queries ", q.row_stride, " apart");
  if (full_partials_.data() == nullptr) {
    cuda_ok(full_load_kernels(), "loading attention kernels");
    full_partials_ = device_buffer(full_partial_bytes(kFullMostDim));
  }
  const Tensor y = arena_.tensor(DType::kBF16, q.rows, q.cols);
  const auto count = static_cast<int32_t>(batch.sequences.size());
  for (int32_t first = 0, end = 0; first < count; first = end) {
    int32_t most = 0, rows = 0;
    for (end = first; end < count && (end == first || most <= kDecodeTokens); ++end) {
      const int32_t tokens = batch.sequences[static_cast<size_t>(end)].num_tokens;
      if (end > first && tokens > kDecodeTokens) break;
      most = std::max(most, tokens);
      rows += tokens;
    }
    check(full_attend_rows({.q = q,
                            .shape = shape,
                            .sequences = *batch.device,
                            .cache = cache,
                            .out = y,
                            .first = first,
                            .count = end - first,
                            .max_tokens = most,
                            .first_row = batch.sequences[static_cast<size_t>(first)].first_row,
                            .rows = rows,
                            .fixed = options_.deterministic,
                            .partials = reinterpret_cast<float*>(full_partials_.data())},
                           stream()),
          "full_attend");
  }
  return y;
}

}  // namespace perigee
