#include "ops/cpu/cpu_ops.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ops/cpu/matrix_test_util.h"

namespace perigee {
namespace {

using cpu::test_matrix;
using cpu::TestMatrix;
using cpu::TestRows;

TEST(CpuOps, OptionsAreCheckedAndChooseTheInstructionSet) {
  EXPECT_FALSE(make_cpu_ops({.num_threads = -1}).ok());
  const Result<std::unique_ptr<Ops>> avx2 = make_cpu_ops({.num_threads = 1, .isa = Isa::kAvx2});
  ASSERT_TRUE(avx2.ok()) << avx2.error().message;
  EXPECT_STREQ((*avx2)->name(), "cpu-avx2");
  EXPECT_EQ((*avx2)->activation_dtype(), DType::kBF16);
}

// A dense and a routed MLP, as a step has them: the same bits for 1 and 3 threads, and no memory after the first step.
TEST(CpuOps, StepsRepeatWithoutNewMemoryOnAnyNumberOfThreads) {
  for (const Isa isa : isas_under_test()) {
    std::vector<std::unique_ptr<TestMatrix>> raw;
    std::vector<RawExpert> experts;
    for (uint64_t e = 0; e < 8; ++e) {
      for (const auto& [out, in] : {std::pair{64, 96}, {64, 96}, {96, 64}})
        raw.push_back(test_matrix(WeightFormat::kInt4Group32, out, in, 3 * e));
      experts.push_back({raw[3 * e]->raw, raw[3 * e + 1]->raw, raw[3 * e + 2]->raw});
    }
    const RawMatrix gate_up[] = {raw[0]->raw, raw[1]->raw};
    const TestRows x(37, 96, 96, 1);
    std::vector<float> first;
    for (const int threads : {1, 3}) {
      CpuOps ops(isa, threads);
      MoeWeights w;
      w.router.num_experts = 8;
      w.router.hidden = 96;
      w.router.top_k = 2;
      std::vector<float> router(8 * 96);
      for (size_t i = 0; i < router.size(); ++i) router[i] = static_cast<float>(i * 37 % 101) * 0.01f;
      w.router.weight = std::move(router);
      w.experts = ops.pack_experts(experts);
      w.shared = {.gate_up = ops.pack_linear(gate_up), .down = ops.pack_linear(raw[2]->raw)};
      int64_t growths = 0;
      for (int step = 0; step < 4; ++step) {
        ops.begin_step();
        const Tensor y = ops.moe(x.tensor, w);
        const float* values = y.row<float>(0);
        if (first.empty()) first.assign(values, values + 37 * 96);
        ASSERT_EQ(std::memcmp(values, first.data(), first.size() * 4), 0) << isa_name(isa) << " " << threads;
        if (step == 1) growths = ops.arena().num_growths();
        if (step > 1) {
          ASSERT_EQ(ops.arena().num_growths(), growths);
        }
      }
    }
  }
}

}  // namespace
}  // namespace perigee
