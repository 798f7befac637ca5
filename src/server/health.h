// Readiness: would a request be accepted now, and if not, why.
#pragma once

#include <string>

#include "base/json.h"
#include "engine/engine.h"

namespace perigee {

struct HealthInputs {
  bool loaded = false;
  std::string phase = "starting";  // while loading
  double percent = 0;
  bool draining = false;
  EngineStats stats;    // meaningful once loaded
  double stall_s = 60;  // work in flight and no step for longer than this is a stall
};

struct Readiness {
  bool ready = false;
  Json body;  // {ready, phase, percent, reasons, running, waiting, last_step_age_s}
};

Readiness check_readiness(const HealthInputs& inputs);

}  // namespace perigee
