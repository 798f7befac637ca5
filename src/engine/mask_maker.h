// MaskMaker: the masks of a step's constrained rows (control/mask_jobs.h), made on a few threads where there are many.
#pragma once

#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "control/mask_jobs.h"

namespace perigee {

class MaskMaker {
 public:
  // Called when every job's state may be read, by one thread. Jobs whose constraint allows nothing have no entry: their
  // sequences are added to `stuck`.
  StepMasks make(StepId step, const std::vector<MaskJob>& jobs, int64_t vocab, std::vector<SequenceId>& stuck);

 private:
  std::unique_ptr<ThreadPool> pool_;  // from the first step with several such rows on
};

}  // namespace perigee
