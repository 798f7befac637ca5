// PlanWorker: what the workers of all devices have in common: the loaded model, the sizes of its memory, the host's
// view of the slots, and a thread that takes plans from a queue.
//
// A derived class makes its Ops, calls load(), reserves the device's memory, then begin(); its destructor calls end()
// first, so that the thread is gone before anything it uses.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "base/queue.h"
#include "exec/batch_builder.h"
#include "exec/mask_box.h"
#include "exec/slots.h"
#include "exec/worker.h"

namespace perigee {

class PlanWorker : public Worker {
 public:
  using OnResult = std::function<void(StepResult&&)>;

  PlanWorker(const WorkerConfig& config, OnResult on_result) : config_(config), on_result_(std::move(on_result)) {}

  void submit(StepPlan plan) override;
  void set_masks(StepMasks masks) override { masks_.put(std::move(masks)); }
  const Model& model() const override { return *model_; }
  int32_t num_pages() const override { return num_pages_; }
  int32_t state_pages() const override { return static_cast<int32_t>(layout_.state_pages()); }
  double last_build_us() const override { return build_us_.load(std::memory_order_relaxed); }

 protected:
  static constexpr int32_t kRingTokens = 1;  // without speculation one token a sequence is uncertain at a time

  // Loads the model for `ops`.
  Status load(std::unique_ptr<Ops> ops);
  // Sizes the pool, and the slots with it; again to make it smaller. kBadInput names the flag when the pages are too
  // few for any work.
  Status set_pool(int64_t bytes);
  void begin();
  void end();
  virtual void run() = 0;  // the thread, until plans_ is closed and empty

  // Starts, block appends and the batch of a plan; its time is last_build_us(). Valid until the next call.
  const Batch& build(const StepPlan& plan);
  // Tells so in place of the step's result. Nothing may be computed or told after it.
  void lose_device(StepId step, const std::string& why) const;
  // What steps outside of graphs run on.
  Ops& step_ops() const { return observed_ ? *observed_ : *ops_; }
  int64_t least_pages() const { return 2 + layout_.state_pages(); }  // for any work
  int64_t page_pool_bytes() const { return num_pages_ * layout_.page_bytes(); }
  int64_t ring_bytes() const { return config_.max_sequences * layout_.ring_slot_bytes(kRingTokens); }
  int32_t max_blocks() const;                                                                      // of one sequence
  int32_t max_tokens() const { return std::max(config_.max_step_tokens, config_.max_sequences); }  // of a step
  int32_t most_logit_rows() const { return std::min(max_logit_rows(config_.max_sequences), max_tokens()); }

  const WorkerConfig config_;
  const OnResult on_result_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Ops> observed_;  // null without an observer
  std::unique_ptr<Model> model_;
  CacheLayout layout_;
  int32_t num_pages_ = 0;
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<BatchBuilder> builder_;
  BoundedQueue<StepPlan> plans_{kMaxPlansInFlight};
  MaskBox masks_;
  std::atomic<double> build_us_{0};

 private:
  std::thread thread_;
};

}  // namespace perigee
