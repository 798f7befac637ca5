// Checkpoints: the saved recurrent states of a prefix cache, each at the block after whose last token it is the state.
//
// A checkpoint is a fixed number of pages that live and die together. Nobody holds them except a plan that copies from
// them: they are cached pages of the pool, evicted like any other, and when one of them goes the others are free at
// once. A block that leaves the prefix index takes its checkpoint along, so that no hit meets a state without the keys
// and values before it. Blocks are named by their page. All state lies in arrays indexed by page id.
#pragma once

#include <cstdint>
#include <vector>

#include "control/pools.h"

namespace perigee {

// One checkpoint; the serial number tells it from a later one at the same block.
struct CheckpointRef {
  PlaceId block;
  int64_t serial = 0;  // 0: none
};

class Checkpoints {
 public:
  explicit Checkpoints(Pools& pools);

  // The checkpoint at a block, or none.
  CheckpointRef at(PlaceId block) const;
  bool contains(const CheckpointRef& checkpoint) const {
    return checkpoint.serial != 0 && entry(checkpoint.block).serial == checkpoint.serial;
  }

  // Makes these pages, written with the state after the block, its checkpoint. Requires a block without one.
  CheckpointRef attach(PlaceId block, std::vector<PageHandle> pages);

  // Appends one more holder of each of its pages, in the order in which they were attached. Requires contains().
  void share(const CheckpointRef& checkpoint, std::vector<PageHandle>& handles);
  // Counts those of its pages that nobody holds. Requires contains().
  void count_idle_pages(const CheckpointRef& checkpoint, CountAtIndex& count) const;

  // A sequence starts from it. A checkpoint that no two sequences have started from is demoted when a later one of its
  // sequence supersedes it: evicted before others, since a conversation goes on from its end. Both require contains().
  void count_start(const CheckpointRef& checkpoint) { ++entry(checkpoint.block).num_starts; }
  void supersede(const CheckpointRef& checkpoint);

  void drop(PlaceId block);         // the block's checkpoint, if it has one
  void page_evicted(PlaceId page);  // the pool took this page of a checkpoint
  PlaceId block_of(PlaceId page) const { return PlaceId(entry(page).block); }  // of a checkpoint's page; else not valid
  int32_t size() const { return size_; }

 private:
  static constexpr int32_t kNil = -1;

  struct Entry {
    int64_t serial = 0;    // of the checkpoint at this block
    int32_t first = kNil;  // its first page
    int32_t num_starts = 0;
    int32_t next = kNil;   // as a page of a checkpoint: the page after it
    int32_t block = kNil;  // and the block that it belongs to
  };

  Entry& entry(PlaceId page) { return entries_[static_cast<size_t>(page.value)]; }
  const Entry& entry(PlaceId page) const { return entries_[static_cast<size_t>(page.value)]; }

  Pools& pools_;
  std::vector<Entry> entries_;  // by page: as a block, and as a page of a checkpoint
  int64_t next_serial_ = 1;
  int32_t size_ = 0;
};

}  // namespace perigee
