// MaskBox: where a rank waits for the grammar masks of a step, which travel beside its plan (DESIGN D11).
//
// Whoever submits a plan with masked rows sends exactly one StepMasks for that step, early or late. A row without an
// entry there belongs to a sequence that has ended meanwhile: it samples freely and nobody reads its id. So a cancelled
// sequence costs nothing but its entry, and the message may be empty, never absent. close() ends every wait: a rank
// that is told to stop does not hang on a message that will not come.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "control/plan.h"

namespace perigee {

class MaskBox {
 public:
  void put(StepMasks masks) {
    {
      std::lock_guard lock(mutex_);
      masks_.push_back(std::move(masks));
    }
    ready_.notify_all();
  }

  // The words of one row, once the step's message is there; none when it has no entry for the row, or after close().
  std::vector<uint32_t> wait(StepId step, SlotId slot) {
    std::unique_lock lock(mutex_);
    std::vector<uint32_t> found;
    ready_.wait(lock, [&] { return closed_ || take(step, slot, found); });
    return found;
  }

  void close() {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    ready_.notify_all();
  }

  // Forgets everything up to `step`.
  void drop(StepId step) {
    std::lock_guard lock(mutex_);
    std::erase_if(masks_, [&](const StepMasks& message) { return message.step <= step; });
  }

 private:
  // Whether the step's message is there; its words for the slot go to `out`.
  bool take(StepId step, SlotId slot, std::vector<uint32_t>& out) {
    for (StepMasks& message : masks_) {
      if (message.step != step) continue;
      for (RowMask& mask : message.rows)
        if (mask.slot == slot) out = std::move(mask.words);
      return true;
    }
    return false;
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<StepMasks> masks_;
  bool closed_ = false;
};

}  // namespace perigee
