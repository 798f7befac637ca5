// What loading a model on a GPU has of its own: dummy weights made there from their keys are the host's, bit for bit
// (model/dummy.h); a model whose shapes the kernels do not take is an error.
#include <gtest/gtest.h>

#include <cstring>

#include "base/soak.h"
#include "model/dummy.h"
#include "model/model.h"
#include "model/test_checkpoint.h"
#include "ops/cuda/cuda_ops.h"

namespace perigee {
namespace {

ModelConfig quantised(Quantization quantization) {
  ModelConfig config;
  config.quantization = quantization;
  return config;
}

// Experts of two tensors each way; their outputs on one input must agree to the bit.
std::vector<float> run(Ops& ops, const TensorSource& source, bool from_keys) {
  const auto matrix = [&](const char* name, int64_t out, int64_t in) {
    const TensorSpec spec{name, TensorRole::kRoutedExpert, out, in};
    return from_keys ? source.matrix_or_keys(spec) : source.matrix(spec);
  };
  const RawWeight gate = matrix("a.gate", 136, 384), up = matrix("a.up", 136, 384), down = matrix("a.down", 384, 136);
  const RawWeight wide = matrix("a.down_wide", 384, 160);
  const bool int4 = gate.matrix.format == WeightFormat::kInt4Group32;
  const RawWeight gate_wide = matrix("a.gate_wide", 160, 384), up_wide = matrix("a.up_wide", 160, 384);
  const RawExpert expert =
      int4 ? RawExpert{gate_wide.matrix, up_wide.matrix, wide.matrix} : RawExpert{gate.matrix, up.matrix, down.matrix};
  const ExpertWeights packed = ops.pack_experts({&expert, 1});
  ops.begin_step();
  const Tensor x = ops.arena().tensor(DType::kBF16, 3, 384);
  std::vector<uint16_t> values(3 * 384);
  for (size_t i = 0; i < values.size(); ++i) values[i] = f32_to_bf16(static_cast<float>(i % 37) - 18.0f);
  ops.copy(x.data, values.data(), values.size() * 2);
  const std::vector<int32_t> ids = {0, 0, 0};
  const std::vector<float> weights = {1, 0.5f, 2};
  Routing routing{.num_tokens = 3, .top_k = 1};
  routing.ids = ops.arena().array<int32_t>(3).data();
  routing.weights = ops.arena().array<float>(3).data();
  ops.copy(routing.ids, ids.data(), 12);
  ops.copy(routing.weights, weights.data(), 12);
  const Tensor y = ops.moe_experts(x, routing, packed);
  std::vector<float> out(3 * 384);
  ops.copy(out.data(), y.data, out.size() * sizeof(float));
  return out;
}

TEST(DummyWeights, MadeOnTheGpuAreTheHosts) {
  const auto ops = make_cuda_ops({.separate_arrays = gpu_sanitizer(), .no_library = gpu_sanitizer_of_own_kernels()});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  for (const Quantization quantization :
       {Quantization::kNone, Quantization::kInt4Group32, Quantization::kFp8Block128}) {
    const auto source = make_dummy_source(2);
    ASSERT_TRUE(source->verify({}, quantised(quantization)).ok());
    const std::vector<float> made = run(**ops, *source, true), sent = run(**ops, *source, false);
    EXPECT_EQ(std::memcmp(made.data(), sent.data(), made.size() * sizeof(float)), 0)
        << "quantisation " << static_cast<int>(quantization);
    EXPECT_NE(sent[0], 0);
  }
}

TEST(CudaLimits, AModelBeyondThemIsALoadError) {
  const auto ops = make_cuda_ops({});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  const auto model = load_model({.path = folder.path(), .format = LoadFormat::kDummy}, **ops);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.error().message,
            "config.json: kv_lora_rank: --device cuda expects a multiple of 128, at most 512, found 32; --device cpu "
            "takes any");
}

}  // namespace
}  // namespace perigee
