// MaskBox: where a rank waits for the grammar masks of a step, which travel beside its plan (DESIGN D11).
//
// Whoever submits a plan with masked rows sends exactly one StepMasks for that step, early or late. A row without an
// entry there belongs to a sequence that has ended meanwhile: it samples freely and nobody reads its id. So a cancelled
// sequence costs nothing but its entry, and the message may be empty, never absent. close() ends every wait: a rank
// that is told to stop does not hang on a message that will not come.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "control/plan.h"

namespace perigee {

// Of one row; none where it has no entry.
inline std::span<const uint32_t> words_of(const StepMasks& masks, SlotId slot) {
  for (const RowMask& row : masks.rows)
    if (row.slot == slot) return row.words;
  return {};
}

class MaskBox {
 public:
  using Message = std::shared_ptr<const StepMasks>;  // which the ranks of a group share

  void put(Message masks) {
    {
      std::lock_guard lock(mutex_);
      masks_.push_back(std::move(masks));
    }
    ready_.notify_all();
  }

  // The step's message, once it is there; one without entries after close().
  Message wait(StepId step) {
    std::unique_lock lock(mutex_);
    Message found;
    ready_.wait(lock, [&] { return closed_ || (found = of(step)) != nullptr; });
    return found != nullptr ? found : std::make_shared<const StepMasks>();
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
    std::erase_if(masks_, [&](const Message& message) { return message->step <= step; });
  }

 private:
  Message of(StepId step) const {
    for (const Message& message : masks_)
      if (message->step == step) return message;
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Message> masks_;
  bool closed_ = false;
};

}  // namespace perigee
