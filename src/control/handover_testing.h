// Test only: what the tests of leases and imports share.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control/scheduler_testing.h"
#include "control/sequence.h"

namespace perigee {

inline constexpr int32_t kTestStatePages = 3;

inline SchedulerConfig hybrid_config() {
  SchedulerConfig config = small_config();
  config.num_pages = 64;
  config.state_pages = kTestStatePages;
  config.attention_alignment = 64;
  return config;
}

// Each test for a model without recurrent layers and for one with them.
class EachModel : public testing::TestWithParam<bool> {
 public:
  static std::string name(const testing::TestParamInfo<bool>& info) { return info.param ? "Hybrid" : "Attention"; }

 protected:
  static SchedulerConfig config() { return GetParam() ? hybrid_config() : small_config(); }
  static int32_t state_pages() { return GetParam() ? kTestStatePages : 0; }
};

// Sequence `id`, which comes at that second.
inline Submit request(int64_t id, std::vector<int32_t> prompt, int32_t max_tokens = 1) {
  SamplingParams sampling;
  sampling.max_tokens = max_tokens;
  return {.sequence = SequenceId(id),
          .prompt = std::make_shared<std::vector<int32_t>>(std::move(prompt)),
          .sampling = std::make_shared<SamplingParams>(sampling),
          .arrival_s = static_cast<double>(id)};
}

}  // namespace perigee
