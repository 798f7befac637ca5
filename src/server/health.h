// Readiness: would a request be accepted now, and if not, why. Liveness: is this process worth keeping.
//
// A supervisor restarts what is not live and routes around what is not ready, so readiness gives way first.
#pragma once

#include <string>

#include "base/json.h"
#include "engine/messages.h"

namespace perigee {

struct HealthInputs {
  bool loaded = false;
  std::string phase = "starting";  // while loading
  double percent = 0;
  bool draining = false;
  EngineStats stats;    // meaningful once loaded
  double stall_s = 60;  // work in flight and no step for longer than this: not live
};

struct Readiness {
  bool ready = false;
  Json body;  // {ready, phase, percent, reasons, running, waiting, last_step_age_s}
};

// Not ready: loading, draining, a lost device, or work in flight and no step for 10 s (or stall_s when that is less).
Readiness check_readiness(const HealthInputs& inputs);

// False when the engine is stuck: its thread or its worker has finished no step for stall_s while work is in flight. A
// loading or draining server is alive. A bug or a lost device ends the process instead.
bool check_liveness(const HealthInputs& inputs);

}  // namespace perigee
