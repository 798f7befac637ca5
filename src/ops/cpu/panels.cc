#include "ops/cpu/panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace perigee::cpu {
namespace {

// An FP8 row without its scales: exact, for bf16 has more bits of both kinds.
void f8_row(const RawMatrix& m, int64_t r, uint16_t* out) {
  const std::array<float, 256>& table = f8e4m3_values();
  const auto* bits = static_cast<const uint8_t*>(m.data) + m.index(r, 0);
  for (int64_t c = 0; c < m.in; ++c) out[c] = f32_to_bf16(table[bits[c]]);
}

// Output j of the panel's scales.
void scatter_scales(const PanelMatrix& m, int64_t panel, int64_t j, const OutputRow& output) {
  const float* scale = static_cast<const float*>(output.matrix->scale) + output.matrix->scale_index(output.row, 0);
  for (int64_t b = 0; b < m.scale_blocks(); ++b) m.scales(panel, b)[j] = scale[b];
}

// Row r as bf16 into out[m.in].
void bf16_row(const RawMatrix& m, int64_t r, uint16_t* out) {
  switch (m.format) {
    case WeightFormat::kBF16:
      std::memcpy(out, static_cast<const uint16_t*>(m.data) + m.index(r, 0), static_cast<size_t>(m.in) * 2);
      return;
    default:
      for (int64_t c = 0; c < m.in; ++c) out[c] = f32_to_bf16(raw_element(m, r, c));
  }
}

// Row r as whole numbers of -127 ... 127, a signed byte in the low half of each element; -> what they are to be
// multiplied by. `values` [m.in]: working memory.
float int8_row(const RawMatrix& m, int64_t r, float* values, uint16_t* out) {
  raw_row(m, r, values);
  float largest = 0, not_finite = 0;
  for (int64_t c = 0; c < m.in; ++c) {
    largest = std::max(largest, std::fabs(values[c]));
    not_finite += values[c] * 0;  // NaN for a NaN and for an infinity
  }
  const float scale = largest / 127;
  for (int64_t c = 0; c < m.in; ++c) {
    const float parts = scale > 0 && not_finite == 0 ? std::nearbyint(values[c] / scale) : 0;
    out[c] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(parts, -127.0f, 127.0f)));
  }
  return scale + not_finite;
}

// Output j of a panel from its row of signed bytes, zero-padded to whole k tiles.
void scatter_int8(const PanelMatrix& m, int64_t panel, int64_t j, const uint16_t* row) {
  uint8_t* lane = m.data + panel * m.panel_bytes() + 2 * j;
  for (int64_t p = 0; p < m.k_tiles * kTileK / 2; ++p, lane += 2 * kPanelOutputs, row += 2) {
    lane[0] = static_cast<uint8_t>(row[0]);
    lane[1] = static_cast<uint8_t>(row[1]);
  }
}

// Output j of a panel from its bf16 row, zero-padded to whole k tiles.
void scatter_bf16(const PanelMatrix& m, int64_t panel, int64_t j, const uint16_t* row) {
  auto* base = reinterpret_cast<uint32_t*>(m.data + panel * m.panel_bytes());
  uint32_t* lane = base + j;
  for (int64_t t = 0; t < m.k_tiles; ++t, lane += kPanelTileElements / 2, row += kTileK) {
    for (int64_t p = 0; p < kTileK / 2; ++p) std::memcpy(lane + p * kPanelOutputs, row + 2 * p, 4);
  }
}

constexpr uint32_t kInt4Zeros = 0x88888888;  // a word of eight weights 0

// The even nibbles of a word, side by side in the low half.
uint32_t even_nibbles(uint32_t word) {
  word &= 0x0F0F0F0Fu;
  word = (word | word >> 4) & 0x00FF00FFu;
  return (word | word >> 8) & 0xFFFFu;
}

void scatter_int4(const PanelMatrix& m, int64_t panel, int64_t j, const OutputRow& output) {
  const auto* words = static_cast<const uint32_t*>(output.matrix->data) + output.matrix->index(output.row, 0) / 8;
  const auto* scales = static_cast<const uint16_t*>(output.matrix->scale) + output.matrix->scale_index(output.row, 0);
  const int64_t front = m.front / 8, num_words = m.in / 8;
  const auto word = [&](int64_t i) { return i >= front && i - front < num_words ? words[i - front] : kInt4Zeros; };
  uint8_t* tile = m.data + panel * m.panel_bytes();
  for (int64_t t = 0; t < m.k_tiles; ++t, tile += kInt4TileBytes) {
    std::memcpy(tile + 2 * j, scales + t, 2);
    auto* lane = reinterpret_cast<uint32_t*>(tile + kPanelOutputs * 2) + j;
    for (int64_t set = 0; set < kTileK / 8; ++set) {
      const uint32_t inputs = word(set + kTileK / 8 * t);
      lane[set * kPanelOutputs] = even_nibbles(inputs) | even_nibbles(inputs >> 4) << 16;
    }
  }
}

// The inputs of a k tile: `count` from `first` on, which are the tile's from `at` on.
struct TileInputs {
  TileInputs(const PanelMatrix& w, int64_t k_tile)
      : at(k_tile == 0 ? w.front : 0),
        first(k_tile * kTileK + at - w.front),
        count(std::min(kTileK - at, w.in - first)) {}
  int64_t at, first, count;
};

}  // namespace

PanelMatrix panel_matrix(int64_t out, int64_t in, PanelFormat format, int64_t first_column) {
  const bool quantised = format == PanelFormat::kInt4 || format == PanelFormat::kScaled;
  const int64_t front = quantised ? first_column % kTileK : 0;
  CHECK(format != PanelFormat::kInt4 || (in % 8 == 0 && front % 8 == 0), "INT4 weights with ", in, " inputs from ",
        first_column);
  return {.format = format,
          .out = out,
          .in = in,
          .front = front,
          .first_scale_tile = format == PanelFormat::kScaled ? first_column / kTileK % kScaleTiles : 0,
          .num_panels = ceil_div(out, kPanelOutputs),
          .k_tiles = ceil_div(front + in, kTileK)};
}

PanelMatrix stacked_panels(std::span<const RawMatrix> stacked, OnlineQuantization quantization) {
  CHECK(!stacked.empty(), "nothing to pack");
  int64_t out = 0;
  for (const RawMatrix& raw : stacked) {
    CHECK(raw.in == stacked[0].in, "stacked matrices of ", raw.in, " and ", stacked[0].in, " inputs");
    out += raw.out;
  }
  return panel_matrix(out, stacked[0].in, panel_format(stacked, dense_format(quantization)), stacked[0].first_column);
}

PanelFormat panel_format(std::span<const RawMatrix> stacked, PanelFormat dense) {
  const int64_t columns = stacked.front().columns_per_scale(), phase = stacked.front().first_column % columns;
  const auto all = [&](WeightFormat format) {
    return std::all_of(stacked.begin(), stacked.end(),
                       [&](const RawMatrix& m) { return m.format == format && m.first_column % columns == phase; });
  };
  if (all(WeightFormat::kInt4Group32)) return PanelFormat::kInt4;
  return all(WeightFormat::kF8Block128) ? PanelFormat::kScaled : dense;
}

void pack_panels(ThreadPool& pool, const PanelMatrix& m, std::span<const OutputRow> rows) {
  CHECK(static_cast<int64_t>(rows.size()) == m.num_panels * kPanelOutputs, "rows: ", rows.size());
  std::vector<std::vector<uint16_t>> lines(static_cast<size_t>(pool.size()));
  for (auto& line : lines) line.resize(static_cast<size_t>(m.k_tiles * kTileK));  // zeros around the inputs
  std::vector<float> values(m.int8() ? static_cast<size_t>(pool.size() * m.in) : 0);
  pool.run(m.num_panels, [&](int64_t panel, int thread) {
    std::vector<uint16_t>& line = lines[static_cast<size_t>(thread)];
    for (int64_t j = 0; j < kPanelOutputs; ++j) {
      const OutputRow& output = rows[static_cast<size_t>(panel * kPanelOutputs + j)];
      if (output.matrix == nullptr) continue;
      if (m.int4()) {
        scatter_int4(m, panel, j, output);
        continue;
      }
      if (m.int8()) {
        m.scales(panel, 0)[j] = int8_row(*output.matrix, output.row, values.data() + thread * m.in, line.data());
        scatter_int8(m, panel, j, line.data());
        continue;
      }
      if (m.scaled()) {
        f8_row(*output.matrix, output.row, line.data() + m.front);
        scatter_scales(m, panel, j, output);
      } else {
        bf16_row(*output.matrix, output.row, line.data());
      }
      scatter_bf16(m, panel, j, line.data());
    }
  });
}

std::vector<OutputRow> stacked_rows(std::span<const RawMatrix> stacked) {
  std::vector<OutputRow> rows;
  for (const RawMatrix& raw : stacked) {
    for (int64_t r = 0; r < raw.out; ++r) rows.push_back({&raw, r});
  }
  rows.resize(static_cast<size_t>(ceil_div(static_cast<int64_t>(rows.size()), kPanelOutputs) * kPanelOutputs));
  return rows;
}

void pack_row_tile(const PanelMatrix& w, const Tensor& x, const int32_t* ids, int64_t first, int64_t rows,
                   uint16_t* a) {
  const int64_t m = std::min(kTileRows, rows - first);
  uint16_t* out = a + first * w.k_tiles * kTileK;
  const uint16_t* source[kTileRows];
  for (int64_t r = 0; r < m; ++r) source[r] = x.row<uint16_t>(ids != nullptr ? ids[first + r] : first + r);
  for (int64_t t = 0; t < w.k_tiles; ++t) {
    const TileInputs in(w, t);
    for (int64_t r = 0; r < m; ++r, out += kTileK) {
      if (in.count == kTileK) {
        std::memcpy(out, source[r] + in.first, kTileK * 2);
        continue;
      }
      std::memset(out, 0, kTileK * 2);
      std::memcpy(out + in.at, source[r] + in.first, static_cast<size_t>(in.count) * 2);
    }
  }
}

void pack_row_tile_terms(const PanelKernels& kernels, const PanelMatrix& w, const Tensor& x, int64_t first,
                         uint16_t* high, uint16_t* low) {
  const int64_t m = std::min(kTileRows, x.rows - first);
  const int64_t begin = first * w.k_tiles * kTileK;
  for (int64_t t = 0; t < w.k_tiles; ++t) {
    const TileInputs in(w, t);
    for (int64_t r = 0; r < m; ++r) {
      const int64_t at = begin + (t * m + r) * kTileK;
      const float* row = x.row<const float>(first + r) + in.first;
      float padded[kTileK] = {};
      if (in.count < kTileK) {
        std::memcpy(padded + in.at, row, static_cast<size_t>(in.count) * 4);
        row = padded;
      }
      kernels.split(row, high + at, low + at);
    }
  }
}

}  // namespace perigee::cpu
