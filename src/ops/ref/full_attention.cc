// Attention with keys and values by head, and their cache, as RefOps defines them.
#include <algorithm>
#include <cmath>

#include "ops/ref/ref_ops.h"

namespace perigee {
namespace {

void store(DType dtype, uint8_t* row, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) switch (dtype) {
      case DType::kF32: reinterpret_cast<float*>(row)[i] = x[i]; break;
      case DType::kBF16: reinterpret_cast<uint16_t*>(row)[i] = f32_to_bf16(x[i]); break;
      default: row[i] = f32_to_f8e4m3(x[i]);
    }
}

float load(DType dtype, const uint8_t* row, int64_t i) {
  switch (dtype) {
    case DType::kF32: return reinterpret_cast<const float*>(row)[i];
    case DType::kBF16: return bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[i]);
    default: return f8e4m3_to_f32(row[i]);
  }
}

uint8_t* row_of(const FullLayer& cache, uint8_t* head, int64_t position) {
  return head + position % kRowsOfBlock * (cache.head_bytes() / kRowsOfBlock);
}

// Keys and values of one head of one sequence, [context, dim].
struct Cached {
  std::vector<float> keys, values;
  Cached(const FullLayer& cache, const SequenceRows& s, int64_t head) {
    for (int64_t position = 0; position < s.position + s.num_tokens; ++position) {
      const int32_t page = s.pages[position / kRowsOfBlock];
      const uint8_t* key = row_of(cache, cache.keys(page, head), position);
      const uint8_t* value = row_of(cache, cache.values(page, head), position);
      for (int64_t i = 0; i < cache.dim; ++i) {
        keys.push_back(load(cache.dtype, key, i));
        values.push_back(load(cache.dtype, value, i));
      }
    }
  }
};

// One query q [dim] over the first `visible` positions -> out [dim].
void attend(const FullShape& shape, const Cached& kv, const float* q, int64_t visible, float* out) {
  std::vector<float> p(static_cast<size_t>(visible));
  float largest = -INFINITY, sum = 0;
  for (int64_t s = 0; s < visible; ++s) {
    p[static_cast<size_t>(s)] = shape.softmax_scale * ref_dot(q, kv.keys.data() + s * shape.dim, shape.dim);
    largest = std::fmax(largest, p[static_cast<size_t>(s)]);
  }
  for (float& x : p) sum += x = std::exp(x - largest);
  std::fill_n(out, shape.dim, 0.0f);
  for (int64_t s = 0; s < visible; ++s)
    for (int64_t i = 0; i < shape.dim; ++i)
      out[i] += p[static_cast<size_t>(s)] / sum * kv.values[static_cast<size_t>(s * shape.dim + i)];
}

}  // namespace

void RefOps::write_full(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache) {
  CHECK(k.cols == cache.heads * cache.dim && v.cols == k.cols && !batch.is_shared(), k.cols);
  for (const SequenceRows& s : batch.sequences)
    for (int64_t t = 0; t < s.num_tokens; ++t) {
      const int64_t position = s.position + t;
      const int32_t page = s.pages[position / kRowsOfBlock];
      for (int64_t head = 0; head < cache.heads; ++head) {
        const int64_t first = head * cache.dim;
        store(cache.dtype, row_of(cache, cache.keys(page, head), position), k.row<float>(s.first_row + t) + first,
              cache.dim);
        store(cache.dtype, row_of(cache, cache.values(page, head), position), v.row<float>(s.first_row + t) + first,
              cache.dim);
      }
    }
}

Tensor RefOps::full_attend(const Tensor& q, const FullShape& shape, const Batch& batch, const FullLayer& cache) {
  CHECK(q.cols == shape.heads * shape.dim && cache.heads == shape.kv_heads && !batch.is_shared(), q.cols);
  const Tensor y = arena_.tensor(DType::kF32, q.rows, q.cols);
  const int64_t group = shape.heads / shape.kv_heads;
  for (const SequenceRows& s : batch.sequences)
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const Cached kv(cache, s, head);
      for (int64_t t = 0; t < s.num_tokens; ++t)
        for (int64_t h = head * group; h < (head + 1) * group; ++h)
          attend(shape, kv, q.row<float>(s.first_row + t) + h * shape.dim, s.position + t + 1,
                 y.row<float>(s.first_row + t) + h * shape.dim);
    }
  return y;
}

}  // namespace perigee
