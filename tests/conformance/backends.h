// What the tests of operations share: every backend of this machine, inputs, weights as files hold them, and the
// comparison with the definition.
//
// Bound: ||backend - ref|| / ||ref|| <= kBound with bf16 inputs on both sides; outputs lie in memory poisoned with NaN
// before, so that an element that is not written cannot pass.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/soak.h"
#include "ops/cpu/test_isa.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/ops.h"

namespace perigee {

inline constexpr double kBound = 8e-3;  // bf16 has 8 bits: one rounding is 2^-9 = 2e-3

struct Backend {
  std::string name;
  std::unique_ptr<Ops> ops;
};

inline std::vector<Backend> backends() {
  std::vector<Backend> out;
  if (!gpu_sanitizer())
    for (const Isa isa : isas_under_test()) {
      auto ops = make_cpu_ops({.num_threads = 2, .isa = isa});
      CHECK(ops.ok(), ops.error().message);
      out.push_back({isa_name(isa), std::move(*ops)});
    }
  const auto add_cuda = [&out](const char* name, CudaOptions kernels) {
    kernels.separate_arrays = gpu_sanitizer();
    kernels.no_library = gpu_sanitizer_of_own_kernels();
    if (auto ops = make_cuda_ops(kernels); ops.ok()) out.push_back({name, std::move(*ops)});
  };
  add_cuda("cuda", {});
  add_cuda("cuda_fixed", {.deterministic = true});
  add_cuda("cuda_portable", {.portable = true});
  CHECK(!out.empty(), "no backend to test: under a checker of GPU accesses there must be a GPU");
  return out;
}

// Values that bf16 holds exactly, so that both backends see the same input.
inline float value_at(uint64_t key, int64_t i) {
  return bf16_to_f32(f32_to_bf16(2 * random_unit(key, static_cast<uint64_t>(i)) - 1));
}

inline Tensor activation(Ops& ops, int64_t rows, int64_t cols, uint64_t key, DType dtype) {
  const Tensor t = ops.arena().tensor(dtype, rows, cols);
  std::vector<uint8_t> host(static_cast<size_t>(rows * cols * dtype_bytes(dtype)));
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float v = value_at(key, i);
    if (dtype == DType::kF32)
      reinterpret_cast<float*>(host.data())[i] = v;
    else
      reinterpret_cast<uint16_t*>(host.data())[i] = f32_to_bf16(v);
  }
  ops.copy(t.data, host.data(), host.size());
  return t;
}

inline Tensor activation(Ops& ops, int64_t rows, int64_t cols, uint64_t key) {
  return activation(ops, rows, cols, key, ops.activation_dtype());
}

// A contiguous tensor's numbers, on the host.
struct Values {
  int64_t rows = 0, cols = 0;
  std::vector<float> at;
};

inline Values fetch(Ops& ops, const Tensor& t) {
  CHECK(t.contiguous());
  std::vector<uint8_t> host(static_cast<size_t>(t.rows * t.cols * dtype_bytes(t.dtype)));
  ops.copy(host.data(), t.data, host.size());
  Values out{.rows = t.rows, .cols = t.cols, .at = std::vector<float>(static_cast<size_t>(t.rows * t.cols))};
  for (size_t i = 0; i < out.at.size(); ++i)
    out.at[i] = t.dtype == DType::kF32 ? reinterpret_cast<const float*>(host.data())[i]
                                       : bf16_to_f32(reinterpret_cast<const uint16_t*>(host.data())[i]);
  return out;
}

template <typename T>
std::vector<T> fetch(Ops& ops, const T* from, int64_t count) {
  std::vector<T> out(static_cast<size_t>(count));
  ops.copy(out.data(), from, out.size() * sizeof(T));
  return out;
}

// Ids where the backend reads them.
inline std::span<const int32_t> place(Ops& ops, const std::vector<int32_t>& ids) {
  const std::span<int32_t> there = ops.arena().array<int32_t>(std::ssize(ids));
  ops.copy(there.data(), ids.data(), ids.size() * sizeof(int32_t));
  return there;
}

inline void expect_close(const Values& got, const Values& wanted, const std::string& what, double bound = kBound) {
  ASSERT_EQ(got.rows, wanted.rows) << what;
  ASSERT_EQ(got.cols, wanted.cols) << what;
  double error = 0, norm = 0;
  for (int64_t r = 0; r < got.rows; ++r)
    for (int64_t c = 0; c < got.cols; ++c) {
      const auto i = static_cast<size_t>(r * got.cols + c);
      const double a = got.at[i], b = wanted.at[i];
      ASSERT_TRUE(std::isfinite(a)) << what << " row " << r << " column " << c;
      error += (a - b) * (a - b);
      norm += b * b;
    }
  EXPECT_LE(std::sqrt(error / std::max(norm, 1e-30)), bound) << what;
}

// Fills the arena's memory with NaN, then hands it out again. A checker is to see that nobody wrote it.
inline void poison(Ops& ops, int64_t bytes) {
  ops.begin_step();
  if (gpu_sanitizer()) return;
  const std::vector<uint32_t> nans(static_cast<size_t>(bytes / 4), 0x7FC07FC0u);
  ops.copy(ops.arena().array<uint32_t>(bytes / 4).data(), nans.data(), nans.size() * 4);
  ops.begin_step();
}

// Stored bytes of one matrix.
struct Stored {
  std::vector<uint8_t> data, scale;
  RawMatrix raw;
};

inline Stored store(WeightFormat format, int64_t out, int64_t in, uint64_t key) {
  Stored s;
  s.raw = {.format = format, .out = out, .in = in};
  const float gain = 1.0f / std::sqrt(static_cast<float>(in));
  const auto fill = [&](auto convert, size_t width) {
    s.data.resize(static_cast<size_t>(out * in) * width);
    for (int64_t i = 0; i < out * in; ++i) {
      const auto bits = convert(value_at(key, i) * gain);
      std::copy_n(reinterpret_cast<const uint8_t*>(&bits), width, s.data.data() + static_cast<size_t>(i) * width);
    }
  };
  const auto scales = [&](int64_t count, auto convert, size_t width, float base) {
    s.scale.resize(static_cast<size_t>(count) * width);
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = convert(base * (1 + 0.25f * value_at(key + 1, i)));
      std::copy_n(reinterpret_cast<const uint8_t*>(&bits), width, s.scale.data() + static_cast<size_t>(i) * width);
    }
  };
  if (format == WeightFormat::kF32) fill([](float v) { return v; }, 4);
  if (format == WeightFormat::kBF16) fill([](float v) { return f32_to_bf16(v); }, 2);
  if (format == WeightFormat::kF8Block128) {
    fill([&](float v) { return f32_to_f8e4m3(v / gain * 448); }, 1);
    scales((out + 127) / 128 * ((in + 127) / 128), [](float v) { return v; }, 4, gain / 448);
  }
  if (format == WeightFormat::kInt4Group32) {
    s.data.resize(static_cast<size_t>(out * in / 2));
    for (size_t i = 0; i < s.data.size(); ++i) s.data[i] = static_cast<uint8_t>(random_u64(key, i));
    scales(
        out * in / 32, [](float v) { return f32_to_bf16(v); }, 2, gain / 4.6f);
  }
  s.raw.data = s.data.data();
  s.raw.scale = s.scale.data();
  return s;
}

}  // namespace perigee
