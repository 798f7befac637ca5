// RankGroup: the ranks of one engine, each on a thread of its own, as one executor.
//
// Start: every rank loads and warms up; all meet; each reserves as many pages as every one of them has room for; all
// meet again. If one fails, the others end at their next meeting, and the error is that of the failed rank with the
// lowest number. One that shows no sign of life for too long has failed.
//
// A step: every rank reads the same plan, in place. Its result is rank 0's, and comes when all have reported the step,
// so that pages are free on every rank when the scheduler hears of it.
//
// A loss: the first rank that loses its device, or does not report for too long (RankTimeouts), ends the group. It
// sets the abort word, which every wait of a rank reads, so that no rank waits for ever for one that is gone, and then
// tells the owner once, in place of a result. A thread that does not end by itself is left behind: it holds what it
// uses, and can no longer tell anything. The process should end without it.
//
//   thread            does
//   owner             create, submit, set_masks, destroy
//   one a rank        the phases of rank.h; whichever reports a step last calls on_step
//   watch             looks at how far the ranks are; only with several ranks or a limit on a step
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/executor.h"
#include "engine/lag_watch.h"
#include "exec/rank.h"

namespace perigee {

struct RankGroupConfig {
  RankConfig rank;  // of each, except its number; rank.size of them
  RankTimeouts timeouts;
  bool compare = false;                // check that all ranks have sampled the same
  std::vector<OpObserver*> observers;  // of each rank's ops and waits; of none where there are fewer
};

class RankGroup final : public Executor {
 public:
  // Called on the rank's thread.
  using MakeDevice = std::function<Result<std::unique_ptr<RankDevice>>(const RankConfig&)>;

  static Result<std::unique_ptr<Executor>> create(const RankGroupConfig& config, OnStep on_step);
  // The same with devices of another make: tests.
  static Result<std::unique_ptr<Executor>> create(const RankGroupConfig& config, OnStep on_step,
                                                  MakeDevice make_device);
  // Ends once what was submitted has run, or, after a loss, within RankTimeouts::end_s.
  ~RankGroup() override;

  void submit(Step step) override;
  void set_masks(StepMasks masks) override;
  const ModelInfo& model() const override;
  int64_t weight_bytes() const override;
  int32_t num_pages() const override;
  int32_t state_pages() const override;
  Result<std::vector<RankPages>> pages(const AreaUse& areas) const override;
  double last_build_us() const override;

 private:
  struct State;
  explicit RankGroup(std::shared_ptr<State> state);
  const std::shared_ptr<State> state_;
};

}  // namespace perigee
