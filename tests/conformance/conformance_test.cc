// Every op of a backend against its definition in `ref`, over generated shapes, on every instruction set present.
#include "backends.h"
#include "ops/place_batch.h"

namespace perigee {
namespace {

class InstructionSet : public testing::TestWithParam<Isa> {};

// What the tests below leave out is reported as skipped.
TEST_P(InstructionSet, IsAmongTheBackends) {
  if (gpu_sanitizer()) GTEST_SKIP() << "GPU backends alone, under a checker of their accesses";
  if (const std::string why = why_not_on(GetParam()); !why.empty()) GTEST_SKIP() << why;
  const std::vector<Backend> all = backends();
  const auto named = [](const Backend& backend) { return backend.name == isa_name(GetParam()); };
  const auto found = std::find_if(all.begin(), all.end(), named);
  ASSERT_NE(found, all.end());
  EXPECT_EQ(found->ops->name(), str_cat("cpu-", isa_name(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(, InstructionSet, testing::ValuesIn(kAllIsas),
                         [](const auto& info) { return isa_name(info.param); });

TEST(Conformance, Linear) {
  const auto ref = make_ref_ops();
  for (Backend& backend : backends())
    for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF32, WeightFormat::kF8Block128})
      for (const int64_t rows : few_if_gpu_sanitizer(ends_if_sanitized<int64_t>({1, 3, 16, 30, 37}), {3, 16, 30, 37}))
        for (const auto& [out, in] : few_if_gpu_sanitizer<std::pair<int64_t, int64_t>>(
                 {{16, 32}, {576, 256}, {100, 72}, {2304, 128}, {64, 776}, {136, 2200}, {72, 4104}},
                 {{100, 72}, {136, 2200}})) {
          const Stored w = store(format, out, in, fnv1a("linear") + static_cast<uint64_t>(out));
          poison(*backend.ops, 4 << 20);
          ref->begin_step();
          const Tensor got =
              backend.ops->linear(activation(*backend.ops, rows, in, 5), backend.ops->pack_linear(w.raw), DType::kF32);
          const Tensor wanted = ref->linear(activation(*ref, rows, in, 5), ref->pack_linear(w.raw), DType::kF32);
          expect_close(fetch(*backend.ops, got), fetch(*ref, wanted),
                       str_cat(backend.name, " linear ", rows, "x", out, "x", in));
        }
}

// The scales are multiplied in after the sums, where a backend does not say otherwise: few rows, or many outputs.
TEST(Conformance, Fp8LinearIsNotRounded) {
  constexpr double kExact = 1e-5;
  const auto ref = make_ref_ops();
  struct Case {
    int64_t out, in, rows;
    double bound = kExact;
  };
  const std::vector<Case> few = {{136, 2200, 40}, {6144, 328, 40}, {576, 256, 130, kBound}};
  const std::vector<Case> all = {{576, 256, 1},   {136, 2200, 40},  {576, 328, 64},          {6144, 328, 40},
                                 {6144, 328, 65}, {6200, 136, 512}, {576, 256, 130, kBound}, {6200, 136, 513, kBound}};
  for (Backend& backend : backends())
    for (const Case& c : kSanitized ? few : few_if_gpu_sanitizer(all, few))
      for (const DType out : {DType::kF32, DType::kBF16}) {
        const Stored w = store(WeightFormat::kF8Block128, c.out, c.in, 53);
        poison(*backend.ops, 32 << 20);
        ref->begin_step();
        const Tensor got =
            backend.ops->linear(activation(*backend.ops, c.rows, c.in, 5), backend.ops->pack_linear(w.raw), out);
        const Tensor wanted = ref->linear(activation(*ref, c.rows, c.in, 5), ref->pack_linear(w.raw), DType::kF32);
        expect_close(fetch(*backend.ops, got), fetch(*ref, wanted),
                     str_cat(backend.name, " fp8 linear ", c.rows, "x", c.out, "x", c.in),
                     out == DType::kF32 ? c.bound : kBound);
      }
}

// Few rows and so many tiles that a GPU's blocks take several; a sanitizer has no time for the CPU's.
TEST(Conformance, LinearOfManyTiles) {
  constexpr int64_t kOut = 4360, kIn = 2048;
  const auto ref = make_ref_ops();
  for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF8Block128}) {
    const Stored w = store(format, kOut, kIn, 57);
    for (Backend& backend : backends())
      for (const int64_t rows : {1, 8}) {
        if (kSanitized && !backend.ops->on_device()) continue;
        poison(*backend.ops, 4 << 20);
        ref->begin_step();
        const auto run = [&](Ops& ops) {
          return fetch(ops, ops.linear(activation(ops, rows, kIn, 5), ops.pack_linear(w.raw), DType::kF32));
        };
        expect_close(run(*backend.ops), run(*ref),
                     str_cat(backend.name, " format ", static_cast<int>(format), " rows ", rows));
      }
  }
}

// Deterministic: the first rows of many have the bits that they have among few, whichever kernels serve them and
// however many columns a warp of a GPU asks for at once.
TEST(Conformance, LinearDoesNotDependOnTheNumberOfRows) {
  struct Case {
    WeightFormat format;
    int64_t out, in;
  };
  constexpr auto kBF16 = WeightFormat::kBF16, kFp8 = WeightFormat::kF8Block128;
  const std::vector<Case> on_a_gpu = few_if_gpu_sanitizer<Case>({{kBF16, 2112, 7168},
                                                                 {kBF16, 4200, 7168},
                                                                 {kBF16, 5632, 2048},
                                                                 {kBF16, 7168, 1016},
                                                                 {kBF16, 72, 16392},
                                                                 {kFp8, 2112, 7168},
                                                                 {kFp8, 4200, 7168}},
                                                                {{kBF16, 136, 4104}});
  const std::vector<Case> on_a_cpu = {{kBF16, 136, 1032}, {WeightFormat::kF32, 72, 264}, {kFp8, 264, 384}};
  for (Backend& backend : backends()) {
    if (backend.ops->on_device() && backend.name != "cuda_fixed") continue;
    Ops& ops = *backend.ops;
    for (const Case& c : ops.on_device() ? on_a_gpu : on_a_cpu) {
      const Stored stored = ops.on_device() ? Stored() : store(c.format, c.out, c.in, 3);
      const RawMatrix made{.format = c.format, .out = c.out, .in = c.in, .data_key = 3, .scale_key = 4};
      const LinearWeight w = ops.pack_linear(ops.on_device() ? made : stored.raw);
      const auto run = [&](int64_t rows) {
        poison(ops, 8 << 20);
        return fetch(ops, ops.linear(activation(ops, rows, c.in, 5), w, DType::kF32)).at;
      };
      const std::vector<float> many = run(200);
      for (const int64_t rows : {1, 2, 5, 8, 9, 40}) {
        const std::vector<float> few = run(rows);
        for (size_t i = 0; i < few.size(); ++i)
          ASSERT_EQ(few[i], many[i]) << c.out << "x" << c.in << " rows " << rows << " at " << i;
      }
    }
  }
}

// Stacks of FP8 matrices keep their scales wherever the seams are.
TEST(Conformance, StackedFp8Linear) {
  const auto ref = make_ref_ops();
  for (Backend& backend : backends())
    for (const int64_t first : {72, 100})
      for (const int64_t rows : ends_if_sanitized<int64_t>({1, 40, 12})) {
        const Stored a = store(WeightFormat::kF8Block128, first, 328, 51),
                     b = store(WeightFormat::kF8Block128, 136, 328, 52);
        const std::vector<RawMatrix> stack = {a.raw, b.raw};
        poison(*backend.ops, 4 << 20);
        ref->begin_step();
        const auto run = [&](Ops& ops) {
          return fetch(ops, ops.linear(activation(ops, rows, 328, 5), ops.pack_linear(stack), DType::kF32));
        };
        expect_close(run(*backend.ops), run(*ref), str_cat(backend.name, " stack after ", first, " rows ", rows));
      }
}

// Values that bf16 does not hold: a wide input is not rounded to it, and FP8 weights keep their scales.
TEST(Conformance, WideLinearIsExactToSixteenBits) {
  const auto ref = make_ref_ops();
  const auto wide = [](Ops& ops, int64_t rows, int64_t cols) {
    const Tensor t = ops.arena().tensor(DType::kF32, rows, cols);
    for (int64_t i = 0; i < rows * cols; ++i)
      static_cast<float*>(t.data)[i] = 2 * random_unit(77, static_cast<uint64_t>(i)) - 1;
    return t;
  };
  for (Backend& backend : backends()) {
    if (backend.ops->wide_dtype() != DType::kF32) continue;
    for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF8Block128})
      for (const int64_t in : ends_if_sanitized<int64_t>({128, 2048 + 128, 576}))
        for (const int64_t rows : ends_if_sanitized<int64_t>({1, 300, 17})) {
          const Stored w = store(format, 200, in, 78);
          poison(*backend.ops, 16 << 20);
          ref->begin_step();
          expect_close(fetch(*backend.ops, backend.ops->linear(wide(*backend.ops, rows, in),
                                                               backend.ops->pack_linear(w.raw), DType::kF32)),
                       fetch(*ref, ref->linear(wide(*ref, rows, in), ref->pack_linear(w.raw), DType::kF32)),
                       str_cat(backend.name, " wide linear, inputs ", in, " rows ", rows), 1e-5);
        }
  }
}

TEST(Conformance, DenseMlp) {
  const auto ref = make_ref_ops();
  for (Backend& backend : backends())
    for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF8Block128})
      for (const int64_t rows : ends_if_sanitized<int64_t>({1, 5, 130, 40})) {
        const Stored gate = store(format, 200, 256, 1), up = store(format, 200, 256, 2);
        const Stored down = store(format, 256, 200, 3);
        const auto run = [&](Ops& ops) {
          const MlpWeights w{.gate_up = ops.pack_gate_up(gate.raw, up.raw), .down = ops.pack_linear(down.raw)};
          return fetch(ops, ops.dense_mlp(activation(ops, rows, 256, 6), w, DType::kF32));
        };
        poison(*backend.ops, 4 << 20);
        ref->begin_step();
        expect_close(run(*backend.ops), run(*ref),
                     str_cat(backend.name, " dense_mlp, format ", static_cast<int>(format), " rows ", rows));
      }
}

TEST(Conformance, NormActivationRopeEmbed) {
  const auto ref = make_ref_ops();
  std::vector<float> weight(192);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = 1 + 0.25f * value_at(9, static_cast<int64_t>(i));
  const Rope rope{.inv_freq = [] {
    std::vector<float> f(32);
    for (size_t i = 0; i < f.size(); ++i) f[i] = std::pow(50000.0f, -static_cast<float>(i) / 32);
    return f;
  }()};
  const std::vector<int32_t> positions = {0, 1, 77, 4095, 100000};
  const Stored table = store(WeightFormat::kBF16, 50, 192, 3);
  const std::vector<int32_t> tokens = {0, 49, 7, 7, 1};
  for (Backend& backend : backends()) {
    Ops& cpu = *backend.ops;
    poison(cpu, 4 << 20);
    ref->begin_step();
    const auto vector = [](Ops& ops, const std::vector<float>& values) { return ops.pack_vector(values); };
    expect_close(fetch(cpu, cpu.rms_norm(activation(cpu, 5, 192, 1, DType::kF32), vector(cpu, weight), 1e-5f)),
                 fetch(*ref, ref->rms_norm(activation(*ref, 5, 192, 1, DType::kF32), weight, 1e-5f)),
                 backend.name + " rms_norm");
    expect_close(
        fetch(cpu, cpu.rms_norm(activation(cpu, 5, 192, 1, DType::kF32), vector(cpu, weight), 1e-5f, cpu.wide_dtype())),
        fetch(*ref, ref->rms_norm(activation(*ref, 5, 192, 1, DType::kF32), weight, 1e-5f)),
        backend.name + " wide norm", cpu.wide_dtype() == DType::kF32 ? 1e-6 : kBound);
    const Tensor sum = activation(cpu, 5, 192, 1, DType::kF32), ref_sum = activation(*ref, 5, 192, 1, DType::kF32);
    expect_close(fetch(cpu, cpu.add_norm(sum, activation(cpu, 5, 192, 4, DType::kF32), vector(cpu, weight), 1e-5f)),
                 fetch(*ref, ref->add_norm(ref_sum, activation(*ref, 5, 192, 4, DType::kF32), weight, 1e-5f)),
                 backend.name + " add_norm");
    expect_close(fetch(cpu, sum), fetch(*ref, ref_sum), backend.name + " sum of add_norm", 0);
    cpu.add(sum, activation(cpu, 5, 192, 7, DType::kF32));
    ref->add(ref_sum, activation(*ref, 5, 192, 7, DType::kF32));
    expect_close(fetch(cpu, sum), fetch(*ref, ref_sum), backend.name + " add", 0);
    const Tensor wide = cpu.arena().tensor(cpu.wide_dtype(), 5, 192),
                 ref_wide = ref->arena().tensor(DType::kF32, 5, 192);
    cpu.add_norm(sum, activation(cpu, 5, 192, 8, DType::kF32), vector(cpu, weight), 1e-5f, wide);
    ref->add_norm(ref_sum, activation(*ref, 5, 192, 8, DType::kF32), weight, 1e-5f, ref_wide);
    expect_close(fetch(cpu, wide), fetch(*ref, ref_wide), backend.name + " wide add_norm",
                 cpu.wide_dtype() == DType::kF32 ? 1e-6 : kBound);
    expect_close(fetch(cpu, cpu.silu_mul(activation(cpu, 5, 192, 2, DType::kF32))),
                 fetch(*ref, ref->silu_mul(activation(*ref, 5, 192, 2, DType::kF32))), backend.name + " silu_mul");
    const Tensor a = activation(cpu, 5, 2 * 192, 3), b = activation(*ref, 5, 2 * 192, 3);
    cpu.rope(a, 192, 128, place(cpu, positions),
             {.inv_freq = cpu.pack_vector(rope.inv_freq), .cos_sin_factor = rope.cos_sin_factor});
    ref->rope(b, 192, 128, positions, rope);
    expect_close(fetch(cpu, a), fetch(*ref, b), backend.name + " rope");
    expect_close(fetch(cpu, cpu.embed(cpu.pack_embed(table.raw), place(cpu, tokens))),
                 fetch(*ref, ref->embed(ref->pack_embed(table.raw), tokens)), backend.name + " embed", 0);
    expect_close(fetch(cpu, cpu.gather_rows(activation(cpu, 5, 192, 1, DType::kF32), place(cpu, {4, 0, 4}))),
                 fetch(*ref, ref->gather_rows(activation(*ref, 5, 192, 1, DType::kF32), std::vector<int32_t>{4, 0, 4})),
                 backend.name + " gather_rows", 0);
    expect_close(fetch(cpu, cpu.gather_rows(activation(cpu, 5, 192, 1, cpu.wide_dtype()), place(cpu, {4, 0, 4}))),
                 fetch(*ref, ref->gather_rows(activation(*ref, 5, 192, 1, DType::kF32), std::vector<int32_t>{4, 0, 4})),
                 backend.name + " gather_rows of activations", 0);
  }
}

// A draft model reads hidden states side by side; their norms may be its residual stream.
TEST(Conformance, HiddenStatesForADraft) {
  auto ref = make_ref_ops();
  constexpr int64_t kRows = 5, kWidth = 192;
  std::vector<float> weight(kWidth);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = 1 + 0.5f * value_at(3, static_cast<int64_t>(i));
  const auto tapped = [](Ops& ops) {
    const Tensor taps = ops.arena().tensor(ops.wide_dtype(), kRows, 2 * kWidth);
    for (const int64_t tap : {0, 1})
      ops.tap(activation(ops, kRows, kWidth, static_cast<uint64_t>(40 + tap), DType::kF32),
              taps.columns(tap * kWidth, kWidth));
    return taps;
  };
  const Tensor wanted = tapped(*ref);
  for (Backend& backend : backends()) {
    Ops& ops = *backend.ops;
    const Tensor taps = tapped(ops);
    expect_close(fetch(ops, taps), fetch(*ref, wanted), backend.name + " tap");
    const auto norm = [&](Ops& by, const Tensor& x, std::span<const float> weights, DType out) {
      return fetch(by, by.rms_norm(x, weights, 1e-5f, out));
    };
    const VectorWeight own = ops.pack_vector(weight);
    const Tensor half = taps.columns(kWidth, kWidth), wanted_half = wanted.columns(kWidth, kWidth);
    const Values want = norm(*ref, wanted_half, weight, DType::kF32);
    expect_close(norm(ops, half, own, DType::kF32), want, backend.name + " norm of a tap");
    expect_close(norm(ops, half, own, ops.wide_dtype()), want, backend.name + " rounded norm of a tap");
    const Tensor x = activation(ops, kRows, kWidth, 41, DType::kF32);
    expect_close(norm(ops, x, own, DType::kF32), want, backend.name + " norm as a residual");
  }
}

// A row of many has the bits that it has alone: long rows and ones that end within a vector of threads.
TEST(Conformance, NormsDoNotDependOnTheNumberOfRows) {
  for (Backend& backend : backends())
    for (const int64_t cols : few_if_gpu_sanitizer<int64_t>({192, 2304, 7168}, {2304})) {
      Ops& ops = *backend.ops;
      ops.begin_step();
      constexpr int64_t kRows = 600, kRow = 431;
      const std::vector<float> ones(static_cast<size_t>(cols), 1.25f);
      const VectorWeight weight = ops.pack_vector(ones);
      const Tensor x = activation(ops, kRows, cols, 1, DType::kF32), y = activation(ops, kRows, cols, 2, DType::kF32);
      const Tensor row = ops.arena().tensor(DType::kF32, 1, cols), addend = ops.arena().tensor(DType::kF32, 1, cols);
      ops.copy(row.data, x.row<float>(kRow), static_cast<size_t>(cols) * 4);
      ops.copy(addend.data, y.row<float>(kRow), static_cast<size_t>(cols) * 4);
      const Values many = fetch(ops, ops.add_norm(x, y, weight, 1e-5f));
      const Values one = fetch(ops, ops.add_norm(row, addend, weight, 1e-5f));
      for (int64_t c = 0; c < cols; ++c)
        ASSERT_EQ(many.at[static_cast<size_t>(kRow * cols + c)], one.at[static_cast<size_t>(c)])
            << backend.name << " " << cols << " column " << c;
    }
}

// What a GPU reads in fours otherwise: a number of columns that is none, and rope of rows that are f32.
TEST(Conformance, NormAndRopeOfOddRows) {
  const auto ref = make_ref_ops();
  const std::vector<float> weight(190, 0.75f), inv_freq = {1, 0.1f, 0.01f};
  const std::vector<int32_t> positions = {0, 1, 77, 4095, 100000};
  for (Backend& backend : backends()) {
    Ops& ops = *backend.ops;
    poison(ops, 4 << 20);
    ref->begin_step();
    const VectorWeight there = ops.pack_vector(weight);
    expect_close(fetch(ops, ops.rms_norm(activation(ops, 5, 190, 1, DType::kF32), there, 1e-5f)),
                 fetch(*ref, ref->rms_norm(activation(*ref, 5, 190, 1, DType::kF32), weight, 1e-5f)),
                 backend.name + " rms_norm");
    const Tensor sum = activation(ops, 5, 190, 1, DType::kF32), ref_sum = activation(*ref, 5, 190, 1, DType::kF32);
    expect_close(fetch(ops, ops.add_norm(sum, activation(ops, 5, 190, 4, DType::kF32), there, 1e-5f)),
                 fetch(*ref, ref->add_norm(ref_sum, activation(*ref, 5, 190, 4, DType::kF32), weight, 1e-5f)),
                 backend.name + " add_norm");
    const Tensor a = activation(ops, 5, 30, 3, DType::kF32), b = activation(*ref, 5, 30, 3, DType::kF32);
    ops.rope(a, 10, 4, place(ops, positions), {.inv_freq = ops.pack_vector(inv_freq)});
    ref->rope(b, 10, 4, positions, {.inv_freq = inv_freq});
    expect_close(fetch(ops, a), fetch(*ref, b), backend.name + " rope", 1e-4);
  }
}

// A paged cache with its unused slots poisoned, written through write_latent.
struct Cache {
  Buffer memory;
  LatentLayer layer;
  std::vector<int32_t> pages;
};

// A batch of one sequence.
struct OneSequence {
  SequenceRows rows;
  std::vector<int32_t> positions;
  Batch batch;
  explicit OneSequence(const SequenceRows& sequence) : rows(sequence) {
    for (int32_t i = 0; i < rows.num_tokens; ++i) positions.push_back(rows.position + i);
    batch = {.positions = positions, .sequences = {&rows, 1}};
  }
};

// Latents whose tiles differ in magnitude, each token's otherwise.
Tensor uneven_latents(Ops& ops, int64_t tokens, int64_t latent) {
  const Tensor c = ops.arena().tensor(ops.on_device() ? DType::kBF16 : DType::kF32, tokens, latent);
  std::vector<uint8_t> host(static_cast<size_t>(tokens * latent * dtype_bytes(c.dtype)));
  for (int64_t i = 0; i < tokens * latent; ++i) {
    const int64_t row = i / latent, tile = i % latent / kLatentTile;
    const float v = value_at(31, i) * std::exp2(-static_cast<float>((row + tile) % 4));
    if (c.dtype == DType::kF32)
      reinterpret_cast<float*>(host.data())[i] = v;
    else
      reinterpret_cast<uint16_t*>(host.data())[i] = f32_to_bf16(v);
  }
  ops.copy(c.data, host.data(), host.size());
  return c;
}

Cache make_cache(Ops& ops, int64_t tokens, const MlaShape& shape, LatentFormat format) {
  Cache cache;
  const int64_t blocks = (tokens + 63) / 64;
  const int64_t row_bytes = latent_row_bytes(format, shape.latent, shape.rope);
  const uint32_t nan = format == LatentFormat::kF8E4M3    ? 0x7F7F7F7Fu
                       : format == LatentFormat::kF8Tiles ? 0xFFFFFFFFu
                                                          : 0x7FC07FC0u;
  const std::vector<uint32_t> nans(static_cast<size_t>((blocks + 1) * 64 * row_bytes / 4), nan);
  cache.memory = ops.make_buffer(nans.size() * 4);
  ops.copy(cache.memory.data(), nans.data(), nans.size() * 4);
  cache.layer = {.base = cache.memory.data(), .page_bytes = 64 * row_bytes, .row_bytes = row_bytes, .format = format};
  if (format == LatentFormat::kF8E4M3) cache.layer.scale = 0.37f;
  for (int64_t b = 0; b < blocks; ++b) cache.pages.push_back(static_cast<int32_t>(blocks - b));  // out of order
  const OneSequence all({.num_tokens = static_cast<int32_t>(tokens), .pages = cache.pages.data()});
  const PlacedBatch placed(all.batch, ops);
  const Tensor c = format == LatentFormat::kF8Tiles ? uneven_latents(ops, tokens, shape.latent)
                                                    : activation(ops, tokens, shape.latent, 31);
  ops.write_latent(c, activation(ops, tokens, shape.rope, 32, DType::kF32), placed.batch(), cache.layer);
  return cache;
}

struct MlaCase {
  int64_t heads = 0, context = 0, fresh = 0;
  MlaForm form = MlaForm::kAbsorbed;
  std::optional<LatentFormat> cache = {};  // none: numbers as the backend computes with them
  bool usual = true;                       // the geometry of the family, else one that kernels of their own serve
  MlaShape shape() const {
    if (!usual) return {.heads = heads, .nope = 64, .rope = 32, .value = 64, .latent = 256, .softmax_scale = 0.1f};
    return {.heads = heads, .nope = 128, .rope = 64, .value = 128, .latent = 512, .softmax_scale = 0.1447f};
  }
};

std::vector<MlaCase> mla_cases(std::optional<LatentFormat> cache) {
  std::vector<MlaCase> cases;
  const std::vector<std::pair<int64_t, int64_t>> lengths =
      ends_if_sanitized<std::pair<int64_t, int64_t>>({{1, 1}, {65, 1}, {1100, 1}, {130, 67}});
  const int64_t few_rows = cache == LatentFormat::kF8Tiles ? 9 : 67;  // racecheck takes minutes of the kernel for these
  for (const int64_t heads : few_if_gpu_sanitizer<int64_t>({1, kSanitized ? 3 : 20}, {20}))
    for (const auto& [context, fresh] : few_if_gpu_sanitizer(lengths, {{65, 1}, {130, few_rows}}))
      for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kExpanded})
        for (const bool usual : {true, false}) cases.push_back({heads, context, fresh, form, cache, usual});
  return cases;
}

Values run_mla_attend(Ops& ops, const MlaCase& c) {
  const MlaShape shape = c.shape();
  const Stored up = store(WeightFormat::kBF16, c.heads * (shape.nope + shape.value), shape.latent, 41);
  Cache cache = make_cache(ops, c.context, shape, c.cache.value_or(latent_format(ops.activation_dtype())));
  const OneSequence one({.num_tokens = static_cast<int32_t>(c.fresh),
                         .position = static_cast<int32_t>(c.context - c.fresh),
                         .pages = cache.pages.data(),
                         .form = c.form});
  const PlacedBatch placed(one.batch, ops);
  const Tensor q = activation(ops, c.fresh, c.heads * shape.q_head(), 42, ops.wide_dtype());
  return fetch(ops, ops.mla_attend(q, ops.pack_mla_up(up.raw, shape), shape, placed.batch(), cache.layer));
}

void check_mla_attend(Backend& backend, const MlaCase& c) {
  const auto ref = make_ref_ops();
  poison(*backend.ops, 16 << 20);
  expect_close(run_mla_attend(*backend.ops, c), run_mla_attend(*ref, c),
               str_cat(backend.name, " mla heads ", c.heads, " context ", c.context, " new ", c.fresh, " form ",
                       static_cast<int>(c.form), " ", c.cache ? latent_format_name(*c.cache) : ""),
               2e-2);
}

TEST(Conformance, MlaAttend) {
  for (Backend& backend : backends())
    for (const MlaCase& c : mla_cases({})) check_mla_attend(backend, c);
}

TEST(Conformance, MlaAttendOverAnFp8Cache) {
  for (Backend& backend : backends())
    for (const MlaCase& c : mla_cases(LatentFormat::kF8E4M3)) check_mla_attend(backend, c);
}

TEST(Conformance, MlaAttendOverRecordsWithScalesOfTheirOwn) {
  for (Backend& backend : backends())
    for (const MlaCase& c : mla_cases(LatentFormat::kF8Tiles)) check_mla_attend(backend, c);
}

// On a GPU: expanded in three pieces of keys, absorbed over lists that are cut.
TEST(Conformance, MlaAttendOfAnExtendOnManyCachedTokens) {
  MlaCase c{.heads = 2, .context = 20'037, .fresh = 37};
  Values wanted;
  for (Backend& backend : backends()) {
    if (!backend.name.starts_with("cuda") || gpu_sanitizer()) continue;
    c.form = MlaForm::kAbsorbed;
    if (wanted.at.empty()) wanted = run_mla_attend(*make_ref_ops(), c);
    for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kExpanded}) {
      c.form = form;
      poison(*backend.ops, 16 << 20);
      expect_close(run_mla_attend(*backend.ops, c), wanted, str_cat(backend.name, " form ", static_cast<int>(form)),
                   2e-2);
    }
  }
}

}  // namespace
}  // namespace perigee
