// Worker: one rank's hands. Plan in, batch built, model run, ids sampled, result out; on a thread of its own.
//
// The worker owns what only the device knows while plans are in flight: each slot's length, newest id, block table,
// penalty counts (DESIGN D4). It keeps no queue beyond two plans and knows no requests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/result.h"
#include "control/plan.h"
#include "model/model.h"

namespace perigee {

enum class Device { kCpu, kRef };

struct WorkerConfig {
  Device device = Device::kCpu;
  LoadOptions load;
  int num_threads = 0;            // 0: one per core
  int64_t cache_bytes = 1 << 30;  // page pool
  int32_t max_sequences = 128;
  bool deterministic = false;
  bool allow_amx = true;  // false forces a slower instruction set (tests)
  bool allow_avx512 = true;
};

class Worker {
 public:
  // Loads the model and reserves the page pool. `on_result` is called on the worker's thread.
  static Result<std::unique_ptr<Worker>> create(const WorkerConfig& config,
                                                std::function<void(StepResult&&)> on_result);
  ~Worker();

  void submit(StepPlan plan);       // at most kMaxPlansInFlight without a result
  void set_masks(StepMasks masks);  // for the step's sampled rows; before or while its forward pass runs
  const Model& model() const;
  int32_t num_pages() const;
  int32_t state_pages() const;   // of those, one sequence's recurrent state takes so many; 0: the model has none
  double last_build_us() const;  // time to turn the newest plan into a batch

 private:
  struct Impl;
  explicit Worker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee
