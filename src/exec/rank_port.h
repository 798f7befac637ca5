// RankPort: a rank's side of its group: plans and masks in, results out, and the group's abort word.
//
// Every wait of a rank ends when the group aborts, because another rank is lost: waits in here by close(), all others
// by reading aborted().
#pragma once

#include <fmt/core.h>

#include <atomic>
#include <functional>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/queue.h"
#include "control/plan.h"
#include "exec/mask_box.h"

namespace perigee {

// The text of a loss: what failed, and where.
inline std::string lost_in_step(const std::string& why, StepId step, int32_t rank) {
  return fmt::format("{}, in step {} of rank {}", why, step.value, rank);
}

class RankPort {
 public:
  // Takes the result, and leaves another in its place, whose memory serves the next one.
  using OnResult = std::function<void(StepResult&)>;

  // Both outlive the port. `on_result` is called on the rank's thread.
  RankPort(const std::atomic<bool>& abort, OnResult on_result) : abort_(abort), on_result_(std::move(on_result)) {}

  // --- Any thread ---
  // The plan stays as it is until the rank has reported its result. False after close(), or when the rank already has
  // kMaxPlansInFlight to begin.
  bool send(const StepPlan& plan) { return plans_.try_push(&plan); }
  void send(MaskBox::Message masks) { masks_.put(std::move(masks)); }
  // Nothing more will be sent: the rank ends once it has run what it has, or at once when the abort word is set.
  void close() {
    plans_.close();
    masks_.close();
  }

  // --- The rank's thread ---
  const StepPlan* wait_for_plan() { return plans_.pop().value_or(nullptr); }  // null: the end
  const StepPlan* next_plan() { return plans_.try_pop().value_or(nullptr); }  // null: none there now
  MaskBox& masks() { return masks_; }
  bool aborted() const { return abort_.load(std::memory_order_relaxed); }
  // Exactly once for each plan, in their order, unless aborted. The plan is not read afterwards.
  void report(StepResult& result) { on_result_(result); }

 private:
  const std::atomic<bool>& abort_;
  const OnResult on_result_;
  BoundedQueue<const StepPlan*> plans_{kMaxPlansInFlight};
  MaskBox masks_;
};

}  // namespace perigee
