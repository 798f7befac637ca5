#include "main/context_bench.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

RankConfig tiny(const char* model, int32_t size, int32_t dcp_size) {
  RankConfig config;
  config.device = Device::kCpu;
  config.load.path = model;
  config.cache_bytes = 64 << 20;
  config.load.num_threads = 1;
  config.size = size;
  config.limits.dcp_size = dcp_size;
  config.layout = RankLayout::kTensorParallel;
  return config;
}

// Recurrent layers, too, begin at a context that nothing was computed of.
TEST(ContextBench, MeasuresCellsThatFitAndNamesTheOthers) {
  std::vector<int32_t> told;
  const ContextRequest request{.batches = {1, 3},
                               .contexts = {1, 64, 65, 1000, 1 << 20},
                               .warm_steps = 1,
                               .steps = 2,
                               .on_cell = [&](const ContextCell& cell) { told.push_back(cell.context); }};
  for (const char* model : {"models/tiny-k2", "models/tiny-kimi-linear"})
    for (const int32_t dcp_size : {1, 2}) {
      told.clear();
      const auto cells = measure_contexts(tiny(model, 2, dcp_size), request);
      ASSERT_TRUE(cells.ok()) << cells.error().message;
      ASSERT_EQ(cells->size(), 10u);
      EXPECT_EQ(told, (std::vector<int32_t>{1, 64, 65, 1000, 1 << 20, 1, 64, 65, 1000, 1 << 20}));
      for (const ContextCell& cell : *cells) {
        const bool fits = cell.context < 1 << 20;
        EXPECT_EQ(cell.why_none.empty(), fits) << cell.context << ": " << cell.why_none;
        EXPECT_EQ(cell.step_us > 0 && cell.eager_us > 0, fits) << cell.context;
      }
    }
}

}  // namespace
}  // namespace perigee
