// MaskBox: where a worker waits for the grammar masks of a step, which travel beside its plan (DESIGN D11).
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

  // The words of one row, once they are there.
  std::vector<uint32_t> wait(StepId step, SlotId slot) {
    std::unique_lock lock(mutex_);
    std::vector<uint32_t> found;
    ready_.wait(lock, [&] { return take(step, slot, found); });
    return found;
  }

  // Forgets everything up to `step`.
  void drop(StepId step) {
    std::lock_guard lock(mutex_);
    std::erase_if(masks_, [&](const StepMasks& message) { return message.step <= step; });
  }

 private:
  bool take(StepId step, SlotId slot, std::vector<uint32_t>& out) {
    for (StepMasks& message : masks_) {
      if (message.step != step) continue;
      for (RowMask& mask : message.rows) {
        if (mask.slot != slot) continue;
        out = std::move(mask.words);
        return true;
      }
    }
    return false;
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<StepMasks> masks_;
};

}  // namespace perigee
