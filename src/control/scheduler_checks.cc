// CHECKs of the books: lists, sequences, slots and pages agree.

#include <algorithm>

#include "control/scheduler_impl.h"

namespace perigee {

void Scheduler::Impl::check_running(const Sequence& sequence) const {
  const Running& run = sequence.running();
  const int32_t state_pages = rules_.config.state_pages * rules_.config.dcp_size;
  CHECK(static_cast<int32_t>(run.state_pages.size()) == state_pages, "sequence ", sequence.id(), " has no whole state");
  CHECK(slots_[static_cast<size_t>(run.slot.value)] == &sequence, "slot ", run.slot, " has another sequence");
  CHECK(run.num_confirmed <= run.scheduled.least && run.scheduled.least <= run.scheduled.most, "sequence ",
        sequence.id(), " is ahead of itself");
  CHECK(run.scheduled.most <= static_cast<int32_t>(run.pages.size()) * kBlockTokens, "sequence ", sequence.id(),
        " writes outside its pages");
  CHECK(sequence.num_samples_left() >= 0, "sequence ", sequence.id(), " samples too much");
  CHECK((run.plans == 0) == (run.scheduled == PositionRange::at(run.num_confirmed)), "sequence ", sequence.id(),
        " has lost a plan");
  CountAtIndex num_blocks = {};
  for (const PageHandle& handle : run.pages) ++num_blocks[static_cast<size_t>(handle.placement().dcp_index)];
  CHECK(num_blocks == run.num_blocks_at, "sequence ", sequence.id(), " miscounts its blocks at an index");
}

void Scheduler::Impl::check_integrity() const {
  cache_.pools().check_integrity();
  check_lists();
  check_pages(0, cache_.pools().num_pages());
  cache_.check_totals();
}

void Scheduler::Impl::check_some(int32_t num_pages) {
  check_lists();
  const int32_t first = next_to_check_;
  const int32_t end = std::min(first + num_pages, cache_.pools().num_pages());
  for (int32_t page = first; page < end; ++page) cache_.pools().check_page(PlaceId(page));
  check_pages(first, end);
  next_to_check_ = end < cache_.pools().num_pages() ? end : 0;
}

void Scheduler::Impl::check_lists() const {
  CHECK(num_accepted_ - num_ended_ == static_cast<int64_t>(waiting_.size() + awaiting_.size() + running_.size()),
        "a sequence is in limbo");
  CHECK(sequences_.size() == waiting_.size() + awaiting_.size() + running_.size(), "a sequence is in no list");
  CHECK(std::is_sorted(waiting_.begin(), waiting_.end(), in_order_of_service), "the queue is out of order");
  CHECK(std::is_sorted(running_.begin(), running_.end(), in_order_of_service), "the running list is out of order");
  CHECK(static_cast<size_t>(plans_.num_held_slots()) + free_slots_.size() + running_.size() == slots_.size(),
        "a slot is lost");
  plans_.check_integrity();
  for (const Sequence* sequence : running_) check_running(*sequence);
  for (const Sequence* sequence : waiting_)
    CHECK(std::holds_alternative<Waiting>(sequence->state), "waiting sequence ", sequence->id(), " holds something");
  for (const Sequence* sequence : awaiting_)
    CHECK(sequence->is_awaiting(), "sequence ", sequence->id(), " awaits nothing");
}

// INV-1: every page is held as often as it is known to be, by holders of its own kind; what is published can be found.
void Scheduler::Impl::check_pages(int32_t first, int32_t end) const {
  std::vector<int32_t> holders(static_cast<size_t>(end - first), 0);
  const auto count = [&](PlaceId page) {
    if (page.value >= first && page.value < end) ++holders[static_cast<size_t>(page.value - first)];
  };
  const auto count_as = [&](PageOwner owner, PlaceId page) {
    CHECK(cache_.pools().owner(page) == owner, "page ", page, " is held under another type than it has");
    count(page);
  };
  for (const Sequence* sequence : running_) {
    for (const PageHandle& handle : sequence->running().pages) count_as(PageOwner::kLatent, handle.place());
    for (const PageHandle& handle : sequence->running().state_pages) count_as(PageOwner::kState, handle.place());
  }
  plans_.for_each_checkpoint_page([&](PlaceId page) { count_as(PageOwner::kCheckpoint, page); });
  plans_.for_each_held_page(count);
  handovers_.for_each_page(count);
  cache_.check_pages(first, holders);
}

}  // namespace perigee
