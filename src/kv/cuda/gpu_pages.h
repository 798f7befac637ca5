// A GPU as a PageMemory. Units are gathered into contiguous staging by one kernel and cross to the host in one copy, on
// streams of their own, so that steps and their graphs go on meanwhile. No CUDA header here.
#pragma once

#include <memory>

#include "kv/page_memory.h"
#include "kv/shared_area.h"

namespace perigee {

struct GpuPagesOptions {
  int gpu = 0;
  int64_t most_unit_bytes = 0;  // of any group
  AreaUse areas = {};           // fewer are given, or none, if they do not fit
};

inline constexpr int64_t kStagingBytes = 8 << 20;  // of one copy to or from the host, at least a unit
inline constexpr int64_t kLanes = 4;               // transfers through the host at a time, of two copies each
inline constexpr int64_t kMappedSlots = 32;        // of other processes' areas
inline constexpr int64_t kLandings = 4;            // slots into which those are copied whole

// What it keeps of the GPU's memory, for units of up to kStagingBytes; about: lists of units are rounded up.
constexpr int64_t gpu_pages_bytes(const AreaUse& areas) {
  constexpr int64_t kListBytes = int64_t{kMaxSlotUnits} * 24;  // moves and digests of a copy
  const int64_t given = int64_t{areas.given} * kAreaSlots, copies = 2 * kLanes + given + kMappedSlots;
  return 2 * kLanes * kStagingBytes + (given + (areas.reads ? kLandings : 0)) * kAreaSlotBytes + copies * kListBytes;
}

// Reserves all its memory: nothing is reserved while steps run. kUnavailable: no GPU; kDeviceLost: no room.
Result<std::shared_ptr<PageMemory>> make_gpu_pages(const GpuPagesOptions& options);

}  // namespace perigee
