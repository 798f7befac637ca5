// PlansInFlight: the plans that ranks execute, what they hold meanwhile, and the order in which results count.
//
// Results are digested in the order of their steps; one that comes early waits for those before it. What sequences
// leave behind while a plan still touches it (pages, slots) rests in the quarantine. Knows no sequence.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "control/faults.h"
#include "control/plan.h"
#include "control/quarantine.h"

namespace perigee {

// A checkpoint that a plan writes.
struct CheckpointInFlight {
  SlotId slot;
  int32_t boundary = 0;
  bool is_rolling = false;
  std::vector<PageHandle> pages;
};

// Pages that a plan holds: of checkpoints that it writes, in the order of its CheckpointWrites, and copies from.
struct StateTraffic {
  std::vector<CheckpointInFlight> writes;
  std::vector<PageHandle> copied;
  bool empty() const { return writes.empty() && copied.empty(); }
};

class PlansInFlight {
 public:
  struct Flight {
    StepId step;  // not valid: no plan here
    std::vector<PlanRow> rows;
    StateTraffic traffic;
    std::optional<StepResult> early;  // came before the result of the step before it
    bool awaits_masks = false;        // of rows that nobody has asked about
  };

  int32_t size() const { return static_cast<int32_t>(next_step_.value - oldest_step_.value); }
  bool empty() const { return size() == 0; }
  bool full() const { return size() == kMaxPlansInFlight; }
  StepId next_step() const { return next_step_; }
  // The bit of a plan in flight, or of the next one, in Running::plans.
  static uint32_t bit(StepId step) { return 1u << (step.value % kMaxPlansInFlight); }

  void launch(const StepPlan& plan, StateTraffic traffic);

  // Files a result; calls digest(flight, result) for each whose turn it is. After that the flight's pages are free, and
  // slots that waited for it alone join `free_slots`. A step that is not in flight, or comes twice, is a bug.
  template <typename Digest>
  void accept(const StepResult& result, std::vector<SlotId>& free_slots, Digest digest) {
    Flight& arrived = file(result);
    if (result.step != oldest_step_) {
      arrived.early = result;
      return;
    }
    digest(arrived, result);
    retire_oldest(free_slots);
    while (!empty() && flight(oldest_step_).early) {
      const StepResult early = std::move(*std::exchange(flight(oldest_step_).early, std::nullopt));
      digest(flight(oldest_step_), early);
      retire_oldest(free_slots);
    }
  }

  // The oldest plan, if it has masked rows that nobody has asked about; else null.
  Flight* awaiting_masks() {
    if (empty()) return nullptr;
    Flight& newest = flight(StepId(next_step_.value - 1));
    if (planted(Fault::kMaskOfStepBefore) && newest.awaits_masks) return &newest;
    return flight(oldest_step_).awaits_masks ? &flight(oldest_step_) : nullptr;
  }

  // Keeps slot and pages until the plans with these bits (not 0) have returned.
  void hold(uint32_t plans, SlotId slot, std::vector<PageHandle> pages) {
    quarantine_.hold(plans, slot, std::move(pages));
  }
  // Whether pages at a dcp index that is of use come back with plans. States and checkpoints have some at every one.
  template <typename IsOfUse>
  bool holds_pages(IsOfUse&& is_of_use) const {
    const auto has_traffic = [](const Flight& flight) { return !flight.traffic.empty(); };
    return quarantine_.holds_page(is_of_use) || std::any_of(flights_.begin(), flights_.end(), has_traffic);
  }
  int32_t num_held_slots() const { return quarantine_.num_slots(); }
  void check_integrity() const;

  template <typename Visit>
  void for_each_checkpoint_page(Visit&& visit) const {
    for (const Flight& flight : flights_) {
      for (const PageHandle& handle : flight.traffic.copied) visit(handle.place());
      for (const CheckpointInFlight& write : flight.traffic.writes)
        for (const PageHandle& handle : write.pages) visit(handle.place());
    }
  }
  template <typename Visit>
  void for_each_held_page(Visit&& visit) const {
    quarantine_.for_each_page(visit);
  }

 private:
  Flight& flight(StepId step) { return flights_[static_cast<size_t>(step.value % kMaxPlansInFlight)]; }
  Flight& file(const StepResult& result);
  void retire_oldest(std::vector<SlotId>& free_slots);

  std::array<Flight, kMaxPlansInFlight> flights_;
  StepId oldest_step_{0};  // [oldest, next) are in flight
  StepId next_step_{0};
  Quarantine quarantine_;
};

}  // namespace perigee
