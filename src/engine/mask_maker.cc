#include "engine/mask_maker.h"

#include <algorithm>

#include "base/cgroup.h"

namespace perigee {
namespace {

// Masks of 64 rows with three drafts each are 256 times some tens of microseconds, which no step should wait for. More
// threads would take cores from the ranks.
int num_threads() {
  return std::clamp(available_cores() / 2, 1, 8);
}

}  // namespace

StepMasks MaskMaker::make(StepId step, const std::vector<MaskJob>& jobs, int64_t vocab,
                          std::vector<SequenceId>& stuck) {
  StepMasks masks{.step = step, .rows = std::vector<RowMask>(jobs.size())};
  if (!pool_ && jobs.size() > 1) pool_ = std::make_unique<ThreadPool>(num_threads());
  const auto make_one = [&](int64_t i, int) {
    const MaskJob& job = jobs[static_cast<size_t>(i)];
    RowMask& row = masks.rows[static_cast<size_t>(i)];
    row.slot = job.slot;
    if (!make_masks(job, vocab, row.words)) row.words.clear();
  };
  if (jobs.size() == 1)
    make_one(0, 0);
  else if (!jobs.empty())
    pool_->run(std::ssize(jobs), make_one);
  for (size_t i = 0; i < jobs.size(); ++i)
    if (masks.rows[i].words.empty()) stuck.push_back(jobs[i].sequence);
  std::erase_if(masks.rows, [](const RowMask& row) { return row.words.empty(); });
  return masks;
}

}  // namespace perigee
