// Rank: one device with its copy of the model, its pages and slots, and the phases of a step. A RankGroup (src/engine)
// has one or several, each on a thread of its own, and everything here runs on that thread unless noted.
//
// The start has three phases: load (the model, then a warm-up with the largest steps), reserve (the page pool, with as
// many pages as every rank of the group has room for; graphs), run. A step has six. Of the two steps in flight the
// host may be in a phase of the newer one while the device still works on the older:
//
//   phase    reads                               writes                                       the work is done by
//   batch    plan: starts, appends, rows         host slots: admission, block table; Batch    host
//   apply    plan, Batch                         device slots; batch arrays; state pages      device
//   forward  batch arrays, weights, pages        pages, ring, logits; host slots: length      device
//   mask     masks of the port                   mask bits (only of plans with masked rows)   host, then device
//   sample   logits, mask bits, slots: params    slots: newest id, counts; sampled ids        device
//   report   sampled ids, log-probabilities      StepResult, to the port                      host
//
// On the CPU backends the device is the host: each phase is complete when it returns. A rank knows no requests and no
// other rank. What changes with a token (length, newest id, penalty counts) is the rank's (DESIGN D4).
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "exec/rank_device.h"
#include "exec/rank_port.h"

namespace perigee {

class Rank {
 public:
  // Loads the model and warms up. Errors say what is wrong and what to change.
  static Result<std::unique_ptr<Rank>> load(RankConfig config, std::unique_ptr<RankDevice> device);

  // After load(): pages there is room for.
  int32_t max_pages() const { return max_pages_; }
  // Requires num_pages <= max_pages().
  Status reserve(int32_t num_pages);
  // Executes what the port brings until it is closed, or aborted, or the device is lost.
  void run(RankPort& port);

  const RankParts& parts() const { return parts_; }
  uint8_t* pages() const { return device_->pages(); }  // after reserve(); see RankDevice
  bool lost() const { return lost_; }
  double last_build_us() const { return build_us_.load(std::memory_order_relaxed); }  // any thread: batch and apply

 private:
  Rank(RankConfig config, std::unique_ptr<RankDevice> device);
  void launch(const StepPlan& plan, RankPort& port);
  const Batch& build(const StepPlan& plan);
  bool wait(RankPort& port);
  void report(RankPort& port);
  void lose(StepId step, const std::string& why, RankPort& port);
  void fail();
  int32_t oldest() const { return num_in_flight_ == kMaxPlansInFlight ? turn_ : 1 - turn_; }

  RankParts parts_;
  std::unique_ptr<RankDevice> device_;  // its memory goes before the ops that made it
  int32_t max_pages_ = 0;
  std::array<const StepPlan*, kMaxPlansInFlight> in_flight_ = {};  // by buffer
  int32_t num_in_flight_ = 0, turn_ = 0;                           // of the next step
  bool lost_ = false;                                              // the device: nothing is computed any more
  StepResult result_;  // of the step that is reported; else memory for the next one
  std::atomic<double> build_us_{0};
};

}  // namespace perigee
