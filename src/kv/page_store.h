// PageStore: the pages of all ranks of one engine, read and written as units that do not depend on the ranks' layout.
//
//   group    a unit is                                    numbered by                   lies with
//   blocks   one block of 64 tokens, all latent layers    block index                   each rank of its dcp index
//   draft    keys or values of one head of one block;     block index * parts + part    each rank that has the head
//            of latents, the block                          (heads' keys, then values)    (of latents, each rank)
//   state    one head of one recurrent layer              layer * heads + head, of all  the ranks that have the head
//            of the checkpoint, then of the tail's state
//
// So any tensor-parallel and dcp sizes can exchange units: bytes of a unit are the same everywhere, and only where they
// lie differs. Thread-safe as far as the pages are: who reads or writes one must hold it (control/handover_book.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "control/handover.h"
#include "kv/page_memory.h"
#include "kv/shared_area.h"
#include "model/cache_layout.h"

namespace perigee {

// kDraft: what a draft keeps beside the pages (ADR 0015, 0030).
enum class UnitGroup : uint8_t { kBlocks, kState, kDraft };
inline constexpr int kNumUnitGroups = 3;

// Units [first, first + count) of a group.
struct UnitRange {
  UnitGroup group = UnitGroup::kBlocks;
  int32_t first = 0, count = 0;
  bool operator==(const UnitRange&) const = default;
};

// What two engines must have in common to exchange units. Layouts may differ.
struct CacheShape {
  std::string model;    // digest of configuration and weights
  std::string numbers;  // of a latent row: latent_format_name()
  int64_t block_bytes = 0;
  int64_t state_layers = 0, state_heads = 0, state_unit_bytes = 0;
  std::string draft;                              // digest of the draft's configuration and weights; empty: none
  std::string draft_numbers;                      // of its cache beside the pages; empty: it has none there
  int64_t draft_parts = 0, draft_unit_bytes = 0;  // of that: units of a block
  bool deterministic = false;                     // else both may have computed in other forms
  int64_t lease_ms = 0;                           // of a lease that nobody extends: its reader must extend it in time

  int64_t unit_bytes(UnitGroup group) const {
    return group == UnitGroup::kBlocks ? block_bytes : group == UnitGroup::kDraft ? draft_unit_bytes : state_unit_bytes;
  }
  // Of the blocks [first, first + count).
  UnitRange draft_units(int32_t first, int32_t count) const {
    const auto parts = static_cast<int32_t>(draft_parts);
    return {UnitGroup::kDraft, first * parts, count * parts};
  }
  UnitRange checkpoint_units() const { return {UnitGroup::kState, 0, state_units()}; }
  UnitRange tail_units() const { return {UnitGroup::kState, state_units(), state_units()}; }
  int64_t bytes_of_block() const { return block_bytes + draft_parts * draft_unit_bytes; }
  int32_t state_units() const { return static_cast<int32_t>(state_layers * state_heads); }
  bool operator==(const CacheShape&) const = default;
};
// Names the first field in which they differ, with both values.
Status check_same(const CacheShape& here, const CacheShape& there);

// One rank's page pool.
struct RankPages {
  uint8_t* base = nullptr;
  uint8_t* draft_base = nullptr;  // see PagePool
  std::shared_ptr<PageMemory> memory = host_memory();
  CacheLayout layout;
  int32_t shard = 0, num_shards = 1;  // of heads
  int32_t dcp_index = 0;
};

// Pages that hold a run of blocks, a checkpoint and a tail's state. Empty spans: of another kind only.
struct UnitPages {
  int32_t first_block = 0;
  std::span<const Placement> blocks;
  std::span<const Placement> checkpoint = {};  // index after index, and so the next
  std::span<const Placement> tail_state = {};
};
inline UnitPages unit_pages(const Import& import) {
  return {import.first_block, import.blocks, import.checkpoint, import.tail_state};
}
inline UnitPages unit_pages(const Lease& lease) {
  return {0, lease.blocks, lease.checkpoint, lease.tail_state};
}

// Units that lie in a slot of the areas of some ranks: of each one its digest, and whose area it is in.
struct StagedUnits {
  std::vector<uint64_t> digests;
  std::vector<uint8_t> ranks;
  bool operator==(const StagedUnits&) const = default;
};
// Of one process, one for each rank; or of another's, as each rank here has mapped them: rank * areas + area.
using Areas = std::vector<std::unique_ptr<SharedArea>>;

class PageStore {
 public:
  PageStore() = default;
  explicit PageStore(std::vector<RankPages> ranks);

  // Fills in the sizes of `shape`.
  void describe(CacheShape& shape) const;

  int64_t unit_bytes(UnitGroup group) const;

  // The units' bytes in order, each from the first rank that has it; of a range that lies in `pages`. kDeviceLost: a
  // GPU has failed.
  Status gather(const UnitPages& pages, UnitRange units, std::span<uint8_t> out) const;
  // The other way, to all ranks that have them.
  Status scatter(const UnitPages& pages, UnitRange units, std::span<const uint8_t> bytes) const;
  // Every byte of the units 0xff: a NaN in each number format, so that what does not arrive is seen.
  Status poison(const UnitPages& pages) const;

  // --- Units by way of memory that another process of this host maps (shared_area.h). kUnavailable: there is none.
  bool can_map() const;  // areas of another process
  Result<Areas> give_areas() const;
  Result<Areas> map_areas(std::span<const std::string> handles) const;
  // As gather(), each unit into the slot of its rank's area; as scatter(), out of them, begun and then waited for.
  // kBadInput: the bytes read have other digests than those staged.
  Result<StagedUnits> stage(const UnitPages& pages, UnitRange units, const Areas& areas, int32_t slot) const;
  void begin_take(const UnitPages& pages, UnitRange units, const Areas& areas, int32_t slot,
                  const StagedUnits& staged) const;
  Status end_take(const UnitPages& pages, UnitRange units, const Areas& areas, int32_t slot,
                  const StagedUnits& staged) const;

 private:
  template <typename Visit>  // visit(area, its runs), of each that the units are taken from
  void for_each_area(const UnitPages& pages, UnitRange units, const Areas& areas, const StagedUnits& staged,
                     Visit&& visit) const;
  Status poison(const UnitPages& pages, UnitRange units) const;
  std::optional<uint8_t*> find(const RankPages& rank, const UnitPages& pages, UnitGroup group, int32_t unit) const;
  // Where the rank has units of the range. Without those of `taken` (one for each unit), which it adds to, if given.
  std::vector<UnitRun> runs_of(const RankPages& rank, const UnitPages& pages, UnitRange units,
                               std::vector<bool>* taken = nullptr) const;

  std::vector<RankPages> ranks_;
};

}  // namespace perigee
