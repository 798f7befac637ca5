// What loading a model on a GPU has of its own: dummy weights made there from their keys are the host's, bit for bit
// (model/dummy.h); a model whose shapes the kernels do not take is an error.
#include <gtest/gtest.h>

#include <cstring>

#include "base/soak.h"
#include "model/dummy.h"
#include "model/model.h"
#include "model/test_weights.h"
#include "ops/cuda/cuda_ops.h"

namespace perigee {
namespace {

ModelConfig quantised(Quantization quantization) {
  ModelConfig config;
  config.quantization = quantization;
  return config;
}

// An expert of `inter` inner columns, of which this rank has its part; outputs on one input must agree to the bit.
std::vector<float> run(Ops& ops, const TensorSource& source, int64_t inter, const TensorParallel& ranks,
                       bool from_keys) {
  const auto matrix = [&](const char* name, Shard shard, int64_t out, int64_t in) {
    const TensorSpec spec{name, TensorRole::kRoutedExpert, shard, out, in};
    const MatrixPart part = part_of(spec, ranks);
    return from_keys ? source.matrix_or_keys(spec, part) : source.matrix(spec, part);
  };
  const RawWeight gate = matrix("a.gate", Shard::rows(), inter, 384), up = matrix("a.up", Shard::rows(), inter, 384),
                  down = matrix("a.down", Shard::columns(), 384, inter);
  const RawExpert expert{gate.matrix, up.matrix, down.matrix};
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
    // Shards of 256 columns keep blocks and groups of scales whole; those of 80 and 48 do not.
    for (const auto& [inter, size] : {std::pair<int64_t, int64_t>{160, 1}, {512, 2}, {160, 2}, {192, 4}}) {
      const TensorParallel ranks{.rank = size - 1, .size = size};
      const std::vector<float> made = run(**ops, *source, inter, ranks, true),
                               sent = run(**ops, *source, inter, ranks, false);
      EXPECT_EQ(std::memcmp(made.data(), sent.data(), made.size() * sizeof(float)), 0)
          << "quantisation " << static_cast<int>(quantization) << ", rank " << size - 1 << " of " << size;
      EXPECT_NE(sent[0], 0);
    }
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
