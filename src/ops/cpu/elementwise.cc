#include "ops/cpu/elementwise.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/cpu/elementwise_kernels.h"

namespace perigee::cpu {
namespace {

struct PackedEmbed final : PackedWeight {
  Buffer rows;  // [vocab, dim] bf16
  int64_t bytes() const override { return static_cast<int64_t>(rows.size()); }
};

const ElementwiseKernels& kernels(Isa isa) {
  return isa == Isa::kAvx2 ? kElementwiseAvx2 : kElementwiseAvx512;
}

// f(row) for rows [0, n) of `cols` elements: on the pool only where the work outweighs waking it (a few µs).
template <typename F>
void for_rows(const CpuContext& cpu, int64_t n, int64_t cols, F&& f) {
  constexpr int64_t kMinElements = 32 << 10;
  if (n * cols < kMinElements) {
    for (int64_t r = 0; r < n; ++r) f(r);
    return;
  }
  cpu.pool.run(n, [&](int64_t r, int) { f(r); });
}

void check_float(const Tensor& x) {
  CHECK(x.dtype == DType::kF32 || x.dtype == DType::kBF16, "want f32 or bf16, got ", dtype_name(x.dtype));
}

// Row r of x (f32 or bf16) as bf16 into out.
void copy_as_bf16(const ElementwiseKernels& k, const Tensor& x, int64_t r, uint16_t* out) {
  if (x.dtype == DType::kBF16) {
    std::memcpy(out, x.row<const uint16_t>(r), static_cast<size_t>(x.cols) * sizeof(uint16_t));
  } else {
    k.narrow(x.row<const float>(r), x.cols, out);
  }
}

float value_at(const Tensor& x, int64_t r, int64_t j) {
  return x.dtype == DType::kBF16 ? bf16_to_f32(x.row<const uint16_t>(r)[j]) : x.row<const float>(r)[j];
}

// The same as e4m3 of x * factor.
void copy_as_f8(const Tensor& x, int64_t r, float factor, uint8_t* out) {
  for (int64_t j = 0; j < x.cols; ++j) out[j] = f32_to_f8e4m3(value_at(x, r, j) * factor);
}

// The latent half of a kF8Tiles row: divided by scales, as the reference does, not multiplied.
void copy_as_tiles(const Tensor& c, int64_t r, const LatentTiles<uint8_t>& out) {
  for (int64_t first = 0; first < c.cols; first += kLatentTile) {
    float largest = 0;
    for (int64_t j = first; j < first + kLatentTile; ++j) largest = std::fmax(largest, std::fabs(value_at(c, r, j)));
    const float scale = std::fmax(largest / kLargestE4M3, FLT_MIN);
    std::memcpy(out.scales + first / kLatentTile * static_cast<int64_t>(sizeof(scale)), &scale, sizeof(scale));
    for (int64_t j = first; j < first + kLatentTile; ++j) out.numbers[j] = f32_to_f8e4m3(value_at(c, r, j) / scale);
  }
}

}  // namespace

int64_t embed_bytes(const RawMatrix& table) {
  return table.out * table.in * static_cast<int64_t>(sizeof(uint16_t));
}

EmbedWeight pack_embed(const RawMatrix& table) {
  auto packed = std::make_shared<PackedEmbed>();
  packed->rows = Buffer(static_cast<size_t>(embed_bytes(table)));
  auto* out = reinterpret_cast<uint16_t*>(packed->rows.data());
  std::vector<float> row(static_cast<size_t>(table.in));
  for (int64_t r = 0; r < table.out; ++r) {
    raw_row(table, r, row.data());
    for (int64_t i = 0; i < table.in; ++i) out[r * table.in + i] = f32_to_bf16(row[static_cast<size_t>(i)]);
  }
  return {.vocab = table.out, .dim = table.in, .first = table.first_row, .packed = std::move(packed)};
}

Tensor embed(const CpuContext& cpu, const EmbedWeight& table, std::span<const int32_t> tokens) {
  const auto& packed = static_cast<const PackedEmbed&>(*table.packed);
  const auto* rows = reinterpret_cast<const uint16_t*>(packed.rows.data());
  const ElementwiseKernels& k = kernels(cpu.isa);
  const Tensor out = cpu.arena.tensor(DType::kF32, static_cast<int64_t>(tokens.size()), table.dim);
  for_rows(cpu, out.rows, out.cols, [&](int64_t r) {
    const int64_t id = tokens[static_cast<size_t>(r)] - table.first;
    if (id >= 0 && id < table.vocab)
      k.widen(rows + id * table.dim, table.dim, out.row<float>(r));
    else
      std::fill_n(out.row<float>(r), table.dim, 0.0f);
  });
  return out;
}

void rms_norm(const CpuContext& cpu, const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) {
  check_float(x);
  CHECK(static_cast<int64_t>(weight.size()) == x.cols, weight.size(), " weights for ", x.cols, " columns");
  const ElementwiseKernels& k = kernels(cpu.isa);
  CHECK(out.dtype == DType::kBF16 || (out.dtype == DType::kF32 && x.dtype == DType::kF32), dtype_name(out.dtype));
  CHECK(out.rows == x.rows && out.cols == x.cols);
  for_rows(cpu, x.rows, x.cols, [&](int64_t r) {
    if (out.dtype == DType::kF32) {
      k.rms_norm_wide(x.row<const float>(r), weight.data(), eps, x.cols, out.row<float>(r));
    } else if (x.dtype == DType::kF32) {
      k.rms_norm_f32(x.row<const float>(r), weight.data(), eps, x.cols, out.row<uint16_t>(r));
    } else {
      k.rms_norm_bf16(x.row<const uint16_t>(r), weight.data(), eps, x.cols, out.row<uint16_t>(r));
    }
  });
}

void add(const CpuContext& cpu, const Tensor& residual, const Tensor& y) {
  CHECK(residual.dtype == DType::kF32 && y.dtype == DType::kF32);
  CHECK(residual.rows == y.rows && residual.cols == y.cols);
  const ElementwiseKernels& k = kernels(cpu.isa);
  for_rows(cpu, y.rows, y.cols, [&](int64_t r) { k.add(residual.row<float>(r), y.row<const float>(r), y.cols); });
}

Tensor silu_mul(const CpuContext& cpu, const Tensor& gate_up) {
  CHECK(gate_up.dtype == DType::kF32 && gate_up.cols % 2 == 0);
  const ElementwiseKernels& k = kernels(cpu.isa);
  const int64_t inter = gate_up.cols / 2;
  const Tensor out = cpu.arena.tensor(DType::kBF16, gate_up.rows, inter);
  for_rows(cpu, gate_up.rows, gate_up.cols, [&](int64_t r) {
    const float* gate = gate_up.row<const float>(r);
    k.silu_mul(gate, gate + inter, inter, out.row<uint16_t>(r));
  });
  return out;
}

void rope(const CpuContext& cpu, const Tensor& x, int64_t head_dim, int64_t rope_begin,
          std::span<const int32_t> positions, const Rope& rope) {
  if (!rope.enabled) return;
  check_float(x);
  CHECK(!rope.halves || x.dtype == DType::kF32, "halves are rotated in f32");
  const auto num_pairs = static_cast<int64_t>(rope.inv_freq.size());
  CHECK(x.cols % head_dim == 0 && rope_begin + 2 * num_pairs <= head_dim);
  CHECK(static_cast<int64_t>(positions.size()) == x.rows);
  const ElementwiseKernels& k = kernels(cpu.isa);
  cpu.scratch.reset();
  const std::span<float> tables = cpu.scratch.array<float>(cpu.pool.size() * 2 * num_pairs);
  const auto turn_row = [&](int64_t r, int thread) {
    float* cos_sin = tables.data() + thread * 2 * num_pairs;
    for (int64_t i = 0; i < num_pairs; ++i) {
      const float angle = static_cast<float>(positions[static_cast<size_t>(r)]) * rope.inv_freq[static_cast<size_t>(i)];
      cos_sin[2 * i] = std::cos(angle) * rope.cos_sin_factor;
      cos_sin[2 * i + 1] = std::sin(angle) * rope.cos_sin_factor;
    }
    for (int64_t begin = rope_begin; begin < x.cols; begin += head_dim) {
      if (rope.halves) {
        k.rotate_halves(x.row<float>(r) + begin, cos_sin, num_pairs);
      } else if (x.dtype == DType::kF32) {
        k.rotate_f32(x.row<float>(r) + begin, cos_sin, num_pairs);
      } else {
        k.rotate_bf16(x.row<uint16_t>(r) + begin, cos_sin, num_pairs);
      }
    }
  };
  constexpr int64_t kMinRows = 8;  // a row's sines cost about 1 µs
  if (x.rows < kMinRows) {
    for (int64_t r = 0; r < x.rows; ++r) turn_row(r, 0);
    return;
  }
  cpu.pool.run(x.rows, turn_row);
}

void write_latent(const CpuContext& cpu, const Tensor& c, const Tensor& k_rope, const Batch& batch,
                  const LatentLayer& cache) {
  check_float(c);
  check_float(k_rope);
  CHECK(cache.format != LatentFormat::kF32, "the cpu backend keeps bf16 or e4m3 latents");
  CHECK(cache.row_bytes == latent_row_bytes(cache.format, c.cols, k_rope.cols));
  CHECK(cache.format != LatentFormat::kF8Tiles || c.cols % kLatentTile == 0, c.cols);
  const ElementwiseKernels& k = kernels(cpu.isa);
  for (const SequenceRows& s : batch.sequences) {
    for_rows(cpu, s.num_tokens, c.cols + k_rope.cols, [&](int64_t i) {
      const int64_t position = s.position + i;
      const int32_t page = page_here(s, position);
      if (page < 0) return;
      uint8_t* row = cache.base + page * cache.page_bytes + (position % 64) * cache.row_bytes;
      if (cache.format == LatentFormat::kF8Tiles) {
        const LatentTiles to(row, c.cols);
        copy_as_tiles(c, s.first_row + i, to);
        copy_as_bf16(k, k_rope, s.first_row + i, reinterpret_cast<uint16_t*>(to.k_rope));
        return;
      }
      if (cache.format == LatentFormat::kF8E4M3) {
        copy_as_f8(c, s.first_row + i, 1 / cache.scale, row);
        copy_as_f8(k_rope, s.first_row + i, 1 / cache.scale, row + c.cols);
        return;
      }
      auto* out = reinterpret_cast<uint16_t*>(row);
      copy_as_bf16(k, c, s.first_row + i, out);
      copy_as_bf16(k, k_rope, s.first_row + i, out + c.cols);
    });
  }
}

Tensor gather_rows(const CpuContext& cpu, const Tensor& x, std::span<const int32_t> rows) {
  const Tensor out = cpu.arena.tensor(x.dtype, static_cast<int64_t>(rows.size()), x.cols);
  const int64_t element = dtype_bytes(x.dtype);
  for (int64_t r = 0; r < out.rows; ++r) {
    const int64_t from = rows[static_cast<size_t>(r)];
    CHECK(from >= 0 && from < x.rows, "row ", from, " of ", x.rows);
    std::memcpy(static_cast<uint8_t*>(out.data) + r * out.row_stride * element,
                static_cast<const uint8_t*>(x.data) + from * x.row_stride * element,
                static_cast<size_t>(x.cols * element));
  }
  return out;
}

}  // namespace perigee::cpu
