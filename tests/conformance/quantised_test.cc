// Backends that quantise weights at load, beside the definition on the numbers that they then stand for.
#include "backends.h"

namespace perigee {
namespace {

// INT8 with a scale for each row, back in f32. How it rounds is the backend's: a weight between two parts must not
// differ.
Stored rounded(const Stored& from) {
  const RawMatrix& m = from.raw;
  Stored out;
  out.data.resize(static_cast<size_t>(m.out * m.in) * sizeof(float));
  auto* row = reinterpret_cast<float*>(out.data.data());
  for (int64_t r = 0; r < m.out; ++r, row += m.in) {
    raw_row(m, r, row);
    float largest = 0;
    for (int64_t c = 0; c < m.in; ++c) largest = std::max(largest, std::fabs(row[c]));
    for (int64_t c = 0; c < m.in; ++c) row[c] = std::nearbyint(row[c] / (largest / 127)) * (largest / 127);
  }
  out.raw = {.format = WeightFormat::kF32, .out = m.out, .in = m.in, .data = out.data.data()};
  return out;
}

std::vector<Backend> quantising_backends() {
  std::vector<Backend> out;
  for (const Isa isa : isas_under_test()) {
    auto ops = make_cpu_ops({.num_threads = 2, .isa = isa, .quantization = OnlineQuantization::kInt8PerChannel});
    CHECK(ops.ok(), ops.error().message);
    out.push_back({isa_name(isa), std::move(*ops)});
  }
  return out;
}

constexpr double kExact = 1e-5;

TEST(OnlineInt8, LinearIsThatOfTheRoundedWeights) {
  if (gpu_sanitizer()) GTEST_SKIP() << "for the CPU";
  const auto ref = make_ref_ops();
  for (Backend& backend : quantising_backends())
    for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF32})
      for (const auto& [out, in] : {std::pair<int64_t, int64_t>{576, 256}, {100, 72}, {136, 2200}})
        for (const int64_t rows : {1, 4, 37}) {
          const Stored w = store(format, out, in, 61), whole = rounded(w);
          poison(*backend.ops, 4 << 20);
          ref->begin_step();
          const auto run = [&, in = in](Ops& ops, const Stored& weight) {
            return fetch(ops, ops.linear(activation(ops, rows, in, 5), ops.pack_linear(weight.raw), DType::kF32));
          };
          expect_close(run(*backend.ops, w), run(*ref, whole), str_cat(backend.name, " ", rows, "x", out, "x", in),
                       kExact);
        }
}

TEST(OnlineInt8, ExpertsAreThoseOfTheRoundedWeights) {
  if (gpu_sanitizer()) GTEST_SKIP() << "for the CPU";
  constexpr int64_t kExperts = 3, kHidden = 160, kInter = 72;
  const auto ref = make_ref_ops();
  std::vector<Stored> stored, whole;
  for (uint64_t i = 0; i < 3 * kExperts; ++i) {
    const bool down = i % 3 == 2;
    stored.push_back(store(WeightFormat::kBF16, down ? kHidden : kInter, down ? kInter : kHidden, 70 + 2 * i));
    whole.push_back(rounded(stored.back()));
  }
  const auto experts = [](const std::vector<Stored>& from) {
    std::vector<RawExpert> out;
    for (size_t i = 0; i < from.size(); i += 3) out.push_back({from[i].raw, from[i + 1].raw, from[i + 2].raw});
    return out;
  };
  for (Backend& backend : quantising_backends())
    for (const int64_t rows : {1, 5, 70}) {
      std::vector<int32_t> ids;
      std::vector<float> weights;
      for (int64_t i = 0; i < 2 * rows; ++i) {
        ids.push_back(static_cast<int32_t>((i * 5 + i / 7) % kExperts));
        weights.push_back(0.25f + 0.5f * static_cast<float>(i % 3));
      }
      const Routing routing{.num_tokens = rows, .top_k = 2, .ids = ids.data(), .weights = weights.data()};
      poison(*backend.ops, 16 << 20);
      ref->begin_step();
      const auto run = [&](Ops& ops, const std::vector<Stored>& from) {
        return fetch(ops, ops.moe_experts(activation(ops, rows, kHidden, 6), routing, ops.pack_experts(experts(from))));
      };
      expect_close(run(*backend.ops, stored), run(*ref, whole), str_cat(backend.name, " rows ", rows));
    }
}

}  // namespace
}  // namespace perigee
