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

class OpObserver;

enum class Device { kCpu, kRef, kCuda };

struct WorkerConfig {
  Device device = Device::kCpu;
  LoadOptions load;
  int num_threads = 0;            // 0: as many as available_cores()
  int64_t cache_bytes = 1 << 30;  // page pool; on a GPU 0: what memory_share leaves beside weights and workspace
  double memory_share = 0.9;      // of the GPU's memory, with what others have of it
  bool fp8_cache = false;         // latents as e4m3
  int32_t max_sequences = 128;
  int32_t max_step_tokens = 2048;
  bool deterministic = false;
  std::optional<Isa> isa;          // of the CPU backend; none: the best one of this machine
  int64_t fail_at_step = -1;       // tests: the device is lost in this step; < 0: never
  OpObserver* observer = nullptr;  // of the model's ops (ops/observed_ops.h); none costs nothing
  std::function<std::unique_ptr<Model>(Ops&)> make_model;  // tests: the model, in place of load
};

class Worker {
 public:
  // Loads the model and reserves the page pool. `on_result` is called on the worker's thread. Devices: kCpu, kRef;
  // make_cuda_worker() in exec/cuda makes those of a GPU.
  static Result<std::unique_ptr<Worker>> create(const WorkerConfig& config,
                                                std::function<void(StepResult&&)> on_result);
  virtual ~Worker() = default;

  virtual void submit(StepPlan plan) = 0;  // at most kMaxPlansInFlight without a result
  // Exactly once for each plan with masked rows, before, while or after its forward pass runs (mask_box.h). A row
  // without an entry samples freely: its sequence has ended.
  virtual void set_masks(StepMasks masks) = 0;
  virtual const Model& model() const = 0;
  virtual int32_t num_pages() const = 0;
  virtual int32_t state_pages() const = 0;   // of those, one sequence's recurrent state takes so many; 0: it has none
  virtual double last_build_us() const = 0;  // time to turn the newest plan into a batch
};

}  // namespace perigee
