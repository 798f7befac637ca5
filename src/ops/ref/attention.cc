// Multi-head latent attention (DeepSeek-V2 2024, section 2.1.2) and its cache, as RefOps defines them.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <span>

#include "ops/ref/ref_ops.h"

namespace perigee {
namespace {

uint8_t* cache_row(const LatentLayer& cache, int32_t page, int64_t row) {
  return cache.base + page * cache.page_bytes + row * cache.row_bytes;
}

// A tile's largest magnitude becomes e4m3's largest.
float tile_scale(const float* x) {
  float largest = 0;
  for (int64_t j = 0; j < kLatentTile; ++j) largest = std::fmax(largest, std::fabs(x[j]));
  return std::fmax(largest / kLargestE4M3, FLT_MIN);
}

void store_tiles(uint8_t* row, std::span<const float> c, std::span<const float> k_rope) {
  const LatentTiles to(row, std::ssize(c));
  for (size_t tile = 0; tile < c.size() / kLatentTile; ++tile) {
    const float scale = tile_scale(c.data() + tile * kLatentTile);
    std::memcpy(to.scales + tile * sizeof(scale), &scale, sizeof(scale));
    for (size_t j = tile * kLatentTile; j < (tile + 1) * kLatentTile; ++j) to.numbers[j] = f32_to_f8e4m3(c[j] / scale);
  }
  for (size_t j = 0; j < k_rope.size(); ++j) reinterpret_cast<uint16_t*>(to.k_rope)[j] = f32_to_bf16(k_rope[j]);
}

void store(const LatentLayer& cache, uint8_t* row, std::span<const float> c, std::span<const float> k_rope) {
  if (cache.format == LatentFormat::kF8Tiles) return store_tiles(row, c, k_rope);
  for (size_t j = 0; j < c.size() + k_rope.size(); ++j) {
    const float value = j < c.size() ? c[j] : k_rope[j - c.size()];
    switch (cache.format) {
      case LatentFormat::kF32: reinterpret_cast<float*>(row)[j] = value; break;
      case LatentFormat::kBF16: reinterpret_cast<uint16_t*>(row)[j] = f32_to_bf16(value); break;
      default: row[j] = f32_to_f8e4m3(value / cache.scale);
    }
  }
}

void load_tiles(const uint8_t* row, std::span<float> c, std::span<float> k_rope) {
  const LatentTiles from(row, std::ssize(c));
  for (size_t j = 0; j < c.size(); ++j) {
    float scale = 0;
    std::memcpy(&scale, from.scales + j / kLatentTile * sizeof(scale), sizeof(scale));
    c[j] = f8e4m3_to_f32(from.numbers[j]) * scale;
  }
  for (size_t j = 0; j < k_rope.size(); ++j) k_rope[j] = bf16_to_f32(reinterpret_cast<const uint16_t*>(from.k_rope)[j]);
}

// -> [c | k_rope], c being the first `latent`.
void load(const LatentLayer& cache, const uint8_t* row, int64_t latent, std::span<float> out) {
  if (cache.format == LatentFormat::kF8Tiles)
    return load_tiles(row, out.first(static_cast<size_t>(latent)), out.subspan(static_cast<size_t>(latent)));
  for (size_t j = 0; j < out.size(); ++j) {
    switch (cache.format) {
      case LatentFormat::kF32: out[j] = reinterpret_cast<const float*>(row)[j]; break;
      case LatentFormat::kBF16: out[j] = bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[j]); break;
      default: out[j] = f8e4m3_to_f32(row[j]) * cache.scale;
    }
  }
}

// The sequence's cache rows [c | k_rope] that lie here, in the order of their positions, as f32 [context, L + dr].
std::vector<float> read_latents(const LatentLayer& cache, const SequenceRows& sequence, const MlaShape& shape) {
  const int64_t width = shape.latent + shape.rope;
  const int64_t context = tokens_here(sequence, sequence.position + sequence.num_tokens);
  std::vector<float> out(context * width);
  for (int64_t s = 0; s < context; ++s) {
    const uint8_t* row = cache_row(cache, sequence.pages[s / kRowsOfBlock], s % kRowsOfBlock);
    load(cache, row, shape.latent, std::span(out).subspan(s * width, width));
  }
  return out;
}

// Returns the log of the sum of exponentials.
float softmax(std::vector<float>& scores) {
  float largest = -INFINITY, sum = 0;
  for (const float s : scores) largest = std::fmax(largest, s);
  for (float& s : scores) sum += s = std::exp(s - largest);
  for (float& s : scores) s /= sum;
  return scores.empty() ? largest : largest + std::log(sum);
}

// One head of one sequence. `uk` [dn, L] and `uv` [dv, L] are its rows of kv_b; `latents` [context, L + dr].
struct Head {
  const MlaShape& shape;
  const float* uk;
  const float* uv;
  const std::vector<float>& latents;
  int64_t context;
  int64_t width() const { return shape.latent + shape.rope; }
  const float* latent(int64_t s) const { return latents.data() + s * width(); }
  const float* k_rope(int64_t s) const { return latent(s) + shape.latent; }
};

// Keys and values of a head, made from the latents: k_s = [W_UK c_s | k_rope_s], v_s = W_UV c_s.
struct Expanded {
  std::vector<float> k_nope, v;  // [context, dn], [context, dv]
  explicit Expanded(const Head& h) : k_nope(h.context * h.shape.nope), v(h.context * h.shape.value) {
    const int64_t latent = h.shape.latent;
    for (int64_t s = 0; s < h.context; ++s) {
      for (int64_t d = 0; d < h.shape.nope; ++d)
        k_nope[s * h.shape.nope + d] = ref_dot(h.uk + d * latent, h.latent(s), latent);
      for (int64_t d = 0; d < h.shape.value; ++d)
        v[s * h.shape.value + d] = ref_dot(h.uv + d * latent, h.latent(s), latent);
    }
  }
};

// One query q [dn + dr] over the first `visible` positions -> out [dv].
void attend_expanded(const Head& h, const Expanded& kv, const float* q, int64_t visible, float* out) {
  const MlaShape& shape = h.shape;
  std::vector<float> p(visible);
  for (int64_t s = 0; s < visible; ++s) {
    const float nope = ref_dot(q, kv.k_nope.data() + s * shape.nope, shape.nope);
    p[s] = shape.softmax_scale * (nope + ref_dot(q + shape.nope, h.k_rope(s), shape.rope));
  }
  softmax(p);
  std::fill_n(out, shape.value, 0.0f);
  for (int64_t s = 0; s < visible; ++s)
    for (int64_t d = 0; d < shape.value; ++d) out[d] += p[s] * kv.v[s * shape.value + d];
}

// The same with W_UK moved to the query, [W_UK^T q_nope | q_rope] ...
void absorb(const MlaShape& shape, const float* uk, const float* q, float* out) {
  std::fill_n(out, shape.latent, 0.0f);
  for (int64_t d = 0; d < shape.nope; ++d)
    for (int64_t l = 0; l < shape.latent; ++l) out[l] += uk[d * shape.latent + l] * q[d];
  std::copy_n(q + shape.nope, shape.rope, out + shape.latent);
}

// ... so that keys and values are the first `visible` latents themselves -> out [L]; returns softmax()'s sum ...
float mix(const MlaShape& shape, const std::vector<float>& latents, const float* query, int64_t visible, float* out) {
  const int64_t width = shape.latent + shape.rope;
  std::vector<float> p(visible);
  for (int64_t s = 0; s < visible; ++s) {
    const float* key = latents.data() + s * width;
    const float nope = ref_dot(query, key, shape.latent);
    p[s] = shape.softmax_scale * (nope + ref_dot(query + shape.latent, key + shape.latent, shape.rope));
  }
  const float log_sum = softmax(p);
  std::fill_n(out, shape.latent, 0.0f);
  for (int64_t s = 0; s < visible; ++s)
    for (int64_t l = 0; l < shape.latent; ++l) out[l] += p[s] * latents[s * width + l];
  return log_sum;
}

// ... and W_UV after the sum.
void project(const MlaShape& shape, const float* uv, const float* mixed, float* out) {
  for (int64_t d = 0; d < shape.value; ++d) out[d] = ref_dot(uv + d * shape.latent, mixed, shape.latent);
}

void attend_absorbed(const Head& h, const float* q, int64_t visible, float* out) {
  std::vector<float> query(h.width()), mixed(h.shape.latent);
  absorb(h.shape, h.uk, q, query.data());
  mix(h.shape, h.latents, query.data(), visible, mixed.data());
  project(h.shape, h.uv, mixed.data(), out);
}

void attend_head(const Head& h, const SequenceRows& sequence, const Tensor& q, const Tensor& y, int64_t index) {
  const bool expand = sequence.form == MlaForm::kExpanded;
  const Expanded kv = expand ? Expanded(h) : Expanded({h.shape, h.uk, h.uv, h.latents, 0});
  for (int64_t t = 0; t < sequence.num_tokens; ++t) {
    const float* query = q.row<float>(sequence.first_row + t) + index * h.shape.q_head();
    float* out = y.row<float>(sequence.first_row + t) + index * h.shape.value;
    const int64_t visible = sequence.position + t + 1;
    if (expand) {
      attend_expanded(h, kv, query, visible, out);
    } else {
      attend_absorbed(h, query, visible, out);
    }
  }
}

}  // namespace

void RefOps::write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) {
  CHECK(cache.row_bytes == latent_row_bytes(cache.format, c.cols, k_rope.cols));
  CHECK(cache.format != LatentFormat::kF8Tiles || c.cols % kLatentTile == 0, c.cols);
  for (const SequenceRows& sequence : batch.sequences) {
    for (int64_t t = 0; t < sequence.num_tokens; ++t) {
      const int64_t position = sequence.position + t;
      const int32_t page = page_here(sequence, position);
      if (page < 0) continue;
      uint8_t* row = cache_row(cache, page, position % kRowsOfBlock);
      const int64_t i = sequence.first_row + t;
      store(cache, row, {c.row<const float>(i), static_cast<size_t>(c.cols)},
            {k_rope.row<const float>(i), static_cast<size_t>(k_rope.cols)});
    }
  }
}

Tensor RefOps::mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                          const LatentLayer& cache) {
  if (batch.is_shared()) return Ops::mla_attend(q, up, shape, batch, cache);
  CHECK(q.cols == shape.heads * shape.q_head(), q.cols, " columns for ", shape.heads, " heads");
  const Tensor y = arena_.tensor(DType::kF32, q.rows, shape.heads * shape.value);
  const float* kv_b = ref_values(up.packed);
  for (const SequenceRows& sequence : batch.sequences) {
    const std::vector<float> latents = read_latents(cache, sequence, shape);
    for (int64_t g = 0; g < shape.heads; ++g) {
      const float* uk = kv_b + g * (shape.nope + shape.value) * shape.latent;
      const Head head{shape, uk, uk + shape.nope * shape.latent, latents, sequence.position + sequence.num_tokens};
      attend_head(head, sequence, q, y, g);
    }
  }
  return y;
}

Tensor RefOps::mla_absorb(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch&) {
  const int64_t width = shape.latent + shape.rope;
  const Tensor out = arena_.tensor(DType::kF32, q.rows, shape.heads * width);
  for (int64_t g = 0; g < shape.heads; ++g) {
    const float* uk = ref_values(up.packed) + g * (shape.nope + shape.value) * shape.latent;
    for (int64_t i = 0; i < q.rows; ++i)
      absorb(shape, uk, q.row<float>(i) + g * shape.q_head(), out.row<float>(i) + g * width);
  }
  return out;
}

Tensor RefOps::attend_latents(const Tensor& queries, const MlaShape& shape, const Batch& batch,
                              const LatentLayer& cache) {
  const int64_t width = shape.latent + shape.rope;
  const Tensor out = arena_.tensor(DType::kF32, queries.rows * shape.heads, shape.latent + 1);
  for (const SequenceRows& sequence : batch.sequences) {
    const std::vector<float> latents = read_latents(cache, sequence, shape);
    for (int64_t t = 0; t < sequence.num_tokens; ++t) {
      const int64_t visible = tokens_here(sequence, sequence.position + t + 1), i = sequence.first_row + t;
      for (int64_t g = 0; g < shape.heads; ++g) {
        float* row = out.row<float>(i * shape.heads + g);
        row[shape.latent] = mix(shape, latents, queries.row<float>(i) + g * width, visible, row);
      }
    }
  }
  return out;
}

Tensor RefOps::mla_project(const Tensor& u, const MlaUpWeight& up, const MlaShape& shape, const Batch&) {
  const Tensor out = arena_.tensor(DType::kF32, u.rows, shape.heads * shape.value);
  for (int64_t g = 0; g < shape.heads; ++g) {
    const float* uv = ref_values(up.packed) + (g * (shape.nope + shape.value) + shape.nope) * shape.latent;
    for (int64_t i = 0; i < u.rows; ++i)
      project(shape, uv, u.row<float>(i) + g * shape.latent, out.row<float>(i) + g * shape.value);
  }
  return out;
}

}  // namespace perigee
