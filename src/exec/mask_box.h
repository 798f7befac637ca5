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

#include "base/check.h"
#include "control/plan.h"

namespace perigee {

// Reads the entries of a message beside the plan's masked rows, which both have in the same order.
class MaskCursor {
 public:
  explicit MaskCursor(const StepMasks& masks) : rows_(masks.rows) {}

  // Of the plan's next masked row; none where it has no entry.
  std::span<const uint32_t> of(SlotId slot) {
    if (next_ == rows_.size() || rows_[next_].slot != slot) return {};
    return rows_[next_++].words;
  }
  // After the last row: a row whose entry was passed over would sample freely.
  void check_end() const {
    CHECK(next_ == rows_.size(), "the masks of slot ", rows_[next_].slot, " are not in the order of the plan's rows");
  }

 private:
  std::span<const RowMask> rows_;
  size_t next_ = 0;
};

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
