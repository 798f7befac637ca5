// The part of PageStore that goes through memory of another process.
#include <algorithm>
#include <utility>

#include "kv/page_store.h"

namespace perigee {

bool PageStore::can_map() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const RankPages& rank) { return rank.memory->can_map(); });
}

Result<Areas> PageStore::give_areas() const {
  Areas areas;
  for (const RankPages& rank : ranks_) {
    ASSIGN_OR_RETURN(areas.emplace_back(), rank.memory->give_area());
  }
  return areas;
}

Result<Areas> PageStore::map_areas(std::span<const std::string> handles) const {
  Areas areas;
  for (const RankPages& rank : ranks_)
    for (const std::string& handle : handles) {
      ASSIGN_OR_RETURN(areas.emplace_back(), rank.memory->map_area(handle));
    }
  return areas;
}

Result<StagedUnits> PageStore::stage(const UnitPages& pages, UnitRange units, const Areas& areas, int32_t slot) const {
  CHECK(areas.size() == ranks_.size(), areas.size(), " areas of ", ranks_.size(), " ranks");
  const int64_t size = unit_bytes(units.group);
  const auto count = static_cast<size_t>(units.count);
  std::vector<bool> taken(count);
  std::vector<std::vector<UnitRun>> runs;
  for (const RankPages& rank : ranks_) runs.push_back(runs_of(rank, pages, units, &taken));
  StagedUnits staged{std::vector<uint64_t>(count), std::vector<uint8_t>(count)};
  std::vector<uint64_t> digests(count);
  // From here on nothing is allocated: no copy may be left under way.
  for (size_t r = 0; r < ranks_.size(); ++r)
    if (!runs[r].empty()) areas[r]->begin(slot, runs[r], size);
  Status status;
  for (size_t r = 0; r < ranks_.size(); ++r) {  // every one, since it reads the pages
    const Status ended = runs[r].empty() ? Status() : areas[r]->wait(slot, std::span(digests).first(runs[r].size()));
    if (status.ok()) status = ended;
    for (size_t i = 0; i < runs[r].size(); ++i) {
      const auto unit = static_cast<size_t>(runs[r][i].offset / size);
      staged.digests[unit] = digests[i];
      staged.ranks[unit] = static_cast<uint8_t>(r);
    }
  }
  if (!status.ok()) return status.error();
  return staged;
}

template <typename Visit>
void PageStore::for_each_area(const UnitPages& pages, UnitRange units, const Areas& areas, const StagedUnits& staged,
                              Visit&& visit) const {
  const size_t num_areas = areas.size() / ranks_.size();
  const int64_t size = unit_bytes(units.group);
  std::vector<std::vector<UnitRun>> of_area(num_areas);
  for (size_t r = 0; r < ranks_.size(); ++r) {
    for (const UnitRun& run : runs_of(ranks_[r], pages, units))
      of_area[staged.ranks[static_cast<size_t>(run.offset / size)]].push_back(run);
    for (size_t a = 0; a < num_areas; ++a) {
      if (!of_area[a].empty()) visit(*areas[r * num_areas + a], of_area[a]);
      of_area[a].clear();
    }
  }
}

void PageStore::begin_take(const UnitPages& pages, UnitRange units, const Areas& areas, int32_t slot,
                           const StagedUnits& staged) const {
  for_each_area(pages, units, areas, staged, [&](SharedArea& area, const std::vector<UnitRun>& runs) {
    area.begin(slot, runs, unit_bytes(units.group));
  });
}

Status PageStore::end_take(const UnitPages& pages, UnitRange units, const Areas& areas, int32_t slot,
                           const StagedUnits& staged) const {
  Status status;
  std::vector<uint64_t> digests(static_cast<size_t>(units.count));
  for_each_area(pages, units, areas, staged, [&](SharedArea& area, const std::vector<UnitRun>& runs) {
    const Status ended = area.wait(slot, std::span(digests).first(runs.size()));
    if (status.ok()) status = ended;
    for (size_t i = 0; i < runs.size() && status.ok(); ++i)
      if (digests[i] != staged.digests[static_cast<size_t>(runs[i].offset / unit_bytes(units.group))])
        status = bad_input("cache entries whose digest is of other bytes: they were damaged or written over", "digest");
  });
  return status;
}

}  // namespace perigee
