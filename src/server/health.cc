#include "server/health.h"

#include <fmt/core.h>

#include <algorithm>

namespace perigee {

namespace {

constexpr double kReadyStallSeconds = 10;

}  // namespace

bool check_liveness(const HealthInputs& inputs) {
  return !inputs.loaded || inputs.stats.stalled_s <= inputs.stall_s;
}

Readiness check_readiness(const HealthInputs& inputs) {
  Json::Array reasons;
  const SchedulerGauges& gauges = inputs.stats.scheduler;
  const double age_s = inputs.stats.steps > 0 ? std::max(0.0, inputs.stats.now_s - inputs.stats.last_step_s) : 0.0;
  if (!inputs.loaded)
    reasons.emplace_back(fmt::format("loading: {}, {} %", inputs.phase, static_cast<int>(inputs.percent)));
  if (inputs.loaded && inputs.stats.lost) reasons.emplace_back("lost: a device has failed, and the process ends");
  if (inputs.draining) reasons.emplace_back("draining: the server is shutting down");
  const double stalled_s = inputs.loaded ? inputs.stats.stalled_s : 0;
  if (stalled_s > std::min(kReadyStallSeconds, inputs.stall_s))
    reasons.emplace_back(fmt::format("stalled: no step for {} s with work in flight", static_cast<int>(stalled_s)));
  const char* phase = !inputs.loaded ? inputs.phase.c_str() : inputs.draining ? "draining" : "serving";
  Readiness out;
  out.ready = reasons.empty();
  out.body = Json(Json::Object{{"ready", out.ready},
                               {"phase", phase},
                               {"percent", inputs.loaded ? 100.0 : inputs.percent},
                               {"reasons", Json(std::move(reasons))},
                               {"running", static_cast<int64_t>(gauges.running)},
                               {"waiting", static_cast<int64_t>(gauges.waiting + gauges.awaiting)},
                               {"last_step_age_s", age_s}});
  return out;
}

}  // namespace perigee
