// Stored matrices of every format with seeded contents, and a machine of one instruction set, for matrix tests.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "base/rng.h"
#include "ops/cpu/context.h"
#include "ops/cpu/test_isa.h"
#include "ops/weights.h"

namespace perigee::cpu {

class TestRandom {
 public:
  explicit TestRandom(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float uniform() { return static_cast<float>(bits()) * 0x1p-31f - 1.0f; }  // [-1, 1)

 private:
  uint64_t state_;
};

// Owns the bytes of a RawMatrix.
struct TestMatrix {
  RawMatrix raw;
  std::vector<uint32_t> data;
  std::vector<uint32_t> scale;
};

inline std::unique_ptr<TestMatrix> test_matrix(WeightFormat format, int64_t out, int64_t in, uint64_t seed) {
  auto m = std::make_unique<TestMatrix>();
  TestRandom random(seed);
  const auto n = static_cast<size_t>(out * in);
  m->data.resize(n + 1);
  m->scale.resize(n + 1);
  auto* halves = reinterpret_cast<uint16_t*>(m->data.data());
  auto* bytes = reinterpret_cast<uint8_t*>(m->data.data());
  for (size_t i = 0; i < n; ++i) {
    const float value = random.uniform();
    switch (format) {
      case WeightFormat::kF32: reinterpret_cast<float*>(m->data.data())[i] = value; break;
      case WeightFormat::kBF16: halves[i] = f32_to_bf16(value); break;
      case WeightFormat::kF16: halves[i] = static_cast<uint16_t>((random.bits() & 0x83FFu) | 0x3800u); break;
      case WeightFormat::kF8Block128: bytes[i] = f32_to_f8e4m3(value); break;
      case WeightFormat::kInt4Group32: m->data[i] = random.bits(); break;
    }
  }
  for (size_t i = 0; i < n; ++i) {
    const float value = random.uniform() * 0.125f;
    if (format == WeightFormat::kF8Block128) reinterpret_cast<float*>(m->scale.data())[i] = value;
    if (format == WeightFormat::kInt4Group32) reinterpret_cast<uint16_t*>(m->scale.data())[i] = f32_to_bf16(value);
  }
  m->raw = {.format = format, .out = out, .in = in, .data = m->data.data(), .scale = m->scale.data()};
  return m;
}

// A [rows, cols] bf16 tensor; columns beyond, up to the stride, are NaN.
struct TestRows {
  TestRows(int64_t rows, int64_t cols, int64_t stride, uint64_t seed)
      : bits(static_cast<size_t>(rows * stride), 0x7FC0),
        tensor{.data = bits.data(), .dtype = DType::kBF16, .rows = rows, .cols = cols, .row_stride = stride} {
    TestRandom random(seed);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) tensor.row<uint16_t>(r)[c] = f32_to_bf16(random.uniform());
    }
  }
  std::vector<uint16_t> bits;
  Tensor tensor;
};

// The memory of a CpuContext is full of NaN before anything is computed.
class TestCpu {
 public:
  TestCpu(Isa isa, int num_threads) : isa_(isa), pool_(num_threads) {
    for (Arena* arena : {&arena_, &scratch_}) {
      std::ranges::fill(arena->array<float>(4 << 20), NAN);
      arena->reset();
    }
  }
  CpuContext context() { return {.pool = pool_, .arena = arena_, .scratch = scratch_, .isa = isa_}; }
  ThreadPool& pool() { return pool_; }

 private:
  Isa isa_;
  ThreadPool pool_;
  Arena arena_, scratch_;
};

}  // namespace perigee::cpu
