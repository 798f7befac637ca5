#include "control/checkpoints.h"

#include <utility>

#include "base/check.h"
#include "control/faults.h"

namespace perigee {

Checkpoints::Checkpoints(Pools& pools) : pools_(pools), entries_(static_cast<size_t>(pools.num_pages())) {}

CheckpointRef Checkpoints::at(PlaceId block) const {
  return {block, entry(block).serial};
}

CheckpointRef Checkpoints::attach(PlaceId block, std::vector<PageHandle> pages) {
  CHECK(entry(block).serial == 0, "block in page ", block, " has a checkpoint");
  CHECK(!pages.empty(), "a checkpoint without pages");
  int32_t* link = &entry(block).first;
  for (const PageHandle& handle : pages) {
    Entry& added = entry(handle.place());
    CHECK(added.block == kNil, "page ", handle.place(), " is in two checkpoints");
    added.block = block.value;
    *link = handle.place().value;
    link = &added.next;
    pools_.publish(handle.place());
  }
  entry(block).serial = next_serial_++;
  entry(block).num_starts = 0;
  ++size_;
  return at(block);
}

void Checkpoints::share(const CheckpointRef& checkpoint, std::vector<PageHandle>& handles) {
  CHECK(contains(checkpoint), "the checkpoint at page ", checkpoint.block, " is gone");
  for (int32_t page = entry(checkpoint.block).first; page != kNil; page = entry(PlaceId(page)).next)
    handles.push_back(pools_.share(PlaceId(page)));
}

void Checkpoints::count_idle_pages(const CheckpointRef& checkpoint, CountAtIndex& count) const {
  for (int32_t page = entry(checkpoint.block).first; page != kNil; page = entry(PlaceId(page)).next)
    pools_.count_if_idle(PlaceId(page), count);
}

void Checkpoints::supersede(const CheckpointRef& checkpoint) {
  if (entry(checkpoint.block).num_starts > 1) return;
  for (int32_t page = entry(checkpoint.block).first; page != kNil; page = entry(PlaceId(page)).next)
    pools_.demote(PlaceId(page));
}

void Checkpoints::drop(PlaceId block) {
  if (entry(block).serial == 0 || planted(Fault::kCheckpointOutlivesBlock)) return;
  entry(block).serial = 0;
  int32_t page = std::exchange(entry(block).first, kNil);
  while (page != kNil) {
    Entry& gone = entry(PlaceId(page));
    gone.block = kNil;
    pools_.unpublish(PlaceId(page));
    page = std::exchange(gone.next, kNil);
  }
  --size_;
}

void Checkpoints::page_evicted(PlaceId page) {
  CHECK(entry(page).block != kNil, "page ", page, " is in no checkpoint");
  if (planted(Fault::kPartialEviction)) {
    entry(page).block = kNil;
    return;
  }
  drop(PlaceId(entry(page).block));
}

}  // namespace perigee
