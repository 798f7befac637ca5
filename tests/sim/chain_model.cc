#include "sim/chain_model.h"

#include <algorithm>

#include "sim/chain_constraint.h"

namespace perigee::sim {

Expected run_alone(const std::vector<int32_t>& prompt, const SamplingParams& sampling, int32_t max_outputs,
                   int32_t num_state_pages, const Constraint* constraint) {
  Expected expected;
  Context context;
  context.state.values.assign(static_cast<size_t>(num_state_pages), 0);
  int32_t position = 0;
  const auto read = [&](int32_t token) {
    context.cache.read(entry_of(token, position++, context));
    context.state.read(token);
  };
  for (const int32_t token : prompt) {
    if (position > 0) expected.prompt_logprobs.push_back(prompt_logprob(context));
    read(token);
  }
  const auto state = constraint != nullptr ? constraint->begin() : nullptr;
  const auto& stops = sampling.stop_ids;
  const auto is_stop = [&](int32_t id) { return std::find(stops.begin(), stops.end(), id) != stops.end(); };
  for (int32_t output = 0; output < max_outputs; ++output) {
    if (!is_finite(sampling.seed, output)) {
      expected.finish = FinishReason::kError;
      return expected;
    }
    const auto* chain = static_cast<const ChainConstraintState*>(state.get());
    const int32_t id = next_allowed(next_id(context, sampling.seed, output), [&](int32_t candidate) {
      if (chain == nullptr) return true;
      return chain->allows(candidate, max_outputs - output) && (output >= sampling.min_tokens || !is_stop(candidate));
    });
    if (state) state->accept(id);
    expected.ids.push_back(id);
    if (output >= sampling.min_tokens && is_stop(id)) {
      expected.finish = FinishReason::kStop;
      return expected;
    }
    read(id);
  }
  return expected;
}

}  // namespace perigee::sim
