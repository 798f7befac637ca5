// Quarantine: what sequences leave behind when they stop running, until no plan in flight can touch it any more.
//
// A sequence that ends or is preempted may still have rows in plans that a device executes. Its page handles and its
// slot rest here and are given back when the last of those plans has returned (INV-2, docs/invariants.md). Plans
// are named by a bit: at most kMaxPlansInFlight exist.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "control/block_pool.h"

namespace perigee {

class Quarantine {
 public:
  bool empty() const { return items_.empty(); }

  // Takes the pages and the slot; `plans` (not 0) has the bit of every plan in flight that touches them.
  void hold(uint32_t plans, SlotId slot, std::vector<PageHandle> pages) {
    CHECK(plans != 0, "slot ", slot, " is held for no plan");
    items_.push_back(Item{plans, slot, std::move(pages)});
  }

  // The plan with this bit has returned: frees the pages that waited for it alone and adds their slots to `free_slots`.
  void plan_returned(uint32_t plan, std::vector<SlotId>& free_slots) {
    size_t kept = 0;
    for (Item& item : items_) {
      item.plans &= ~plan;
      if (item.plans == 0) {
        release_back_to_front(item.pages);
        free_slots.push_back(item.slot);
      } else if (&items_[kept] != &item) {
        items_[kept++] = std::move(item);
      } else {
        ++kept;
      }
    }
    items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(kept), items_.end());
  }

  // Whether one of the pages lies where the predicate says that it is of use.
  template <typename IsOfUse>
  bool holds_page(IsOfUse&& is_of_use) const {
    const auto is_useful_page = [&](const PageHandle& page) { return is_of_use(page.placement().dcp_index); };
    return std::any_of(items_.begin(), items_.end(), [&](const Item& item) {
      return std::any_of(item.pages.begin(), item.pages.end(), is_useful_page);
    });
  }
  template <typename Visit>
  void for_each_page(Visit&& visit) const {
    for (const Item& item : items_)
      for (const PageHandle& handle : item.pages) visit(handle.place());
  }
  int32_t num_slots() const { return static_cast<int32_t>(items_.size()); }

 private:
  struct Item {
    uint32_t plans = 0;
    SlotId slot;
    std::vector<PageHandle> pages;
  };
  std::vector<Item> items_;
};

}  // namespace perigee
