#include "control/checkpoints.h"

#include <utility>

#include "base/check.h"
#include "control/faults.h"

namespace perigee {

Checkpoints::Checkpoints(BlockPool& pool) : pool_(pool), entries_(static_cast<size_t>(pool.num_pages())) {}

CheckpointRef Checkpoints::at(PageId block) const {
  return {block, entry(block).serial};
}

CheckpointRef Checkpoints::attach(PageId block, std::vector<PageHandle> pages) {
  CHECK(entry(block).serial == 0, "block in page ", block, " has a checkpoint");
  CHECK(!pages.empty(), "a checkpoint without pages");
  int32_t* link = &entry(block).first;
  for (const PageHandle& handle : pages) {
    Entry& added = entry(handle.page());
    CHECK(added.block == kNil, "page ", handle.page(), " is in two checkpoints");
    added.block = block.value;
    *link = handle.page().value;
    link = &added.next;
    pool_.publish(handle.page());
  }
  entry(block).serial = next_serial_++;
  entry(block).num_starts = 0;
  ++size_;
  return at(block);
}

void Checkpoints::share(const CheckpointRef& checkpoint, std::vector<PageHandle>& handles) {
  CHECK(contains(checkpoint), "the checkpoint at page ", checkpoint.block, " is gone");
  for (int32_t page = entry(checkpoint.block).first; page != kNil; page = entry(PageId(page)).next)
    handles.push_back(pool_.share(PageId(page)));
}

int32_t Checkpoints::num_idle_pages(const CheckpointRef& checkpoint) const {
  int32_t num_idle = 0;
  for (int32_t page = entry(checkpoint.block).first; page != kNil; page = entry(PageId(page)).next)
    num_idle += pool_.num_holders(PageId(page)) == 0 ? 1 : 0;
  return num_idle;
}

void Checkpoints::supersede(const CheckpointRef& checkpoint) {
  if (entry(checkpoint.block).num_starts > 1) return;
  for (int32_t page = entry(checkpoint.block).first; page != kNil; page = entry(PageId(page)).next)
    pool_.demote(PageId(page));
}

void Checkpoints::drop(PageId block) {
  if (entry(block).serial == 0 || planted(Fault::kCheckpointOutlivesBlock)) return;
  entry(block).serial = 0;
  int32_t page = std::exchange(entry(block).first, kNil);
  while (page != kNil) {
    Entry& gone = entry(PageId(page));
    gone.block = kNil;
    pool_.unpublish(PageId(page));
    page = std::exchange(gone.next, kNil);
  }
  --size_;
}

void Checkpoints::page_evicted(PageId page) {
  CHECK(entry(page).block != kNil, "page ", page, " is in no checkpoint");
  if (planted(Fault::kPartialEviction)) {
    entry(page).block = kNil;
    return;
  }
  drop(PageId(entry(page).block));
}

}  // namespace perigee
