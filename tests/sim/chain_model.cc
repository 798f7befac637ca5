#include "sim/chain_model.h"

#include <algorithm>

namespace perigee::sim {

Expected run_alone(const std::vector<int32_t>& prompt, const SamplingParams& sampling, int32_t max_outputs) {
  Expected expected;
  Reading reading;
  int32_t position = 0;
  for (const int32_t token : prompt) {
    if (position > 0) expected.prompt_logprobs.push_back(prompt_logprob(reading));
    reading.read(entry_of(token, position++, reading));
  }
  for (int32_t output = 0; output < max_outputs; ++output) {
    if (!is_finite(sampling.seed, output)) {
      expected.finish = FinishReason::kError;
      return expected;
    }
    const int32_t id = next_id(reading, sampling.seed, output);
    expected.ids.push_back(id);
    const auto& stops = sampling.stop_ids;
    if (output >= sampling.min_tokens && std::find(stops.begin(), stops.end(), id) != stops.end()) {
      expected.finish = FinishReason::kStop;
      return expected;
    }
    reading.read(entry_of(id, position++, reading));
  }
  return expected;
}

}  // namespace perigee::sim
