// A GPU as a PageMemory. Units are gathered into contiguous staging by one kernel and cross to the host in one copy, on
// streams of their own, so that steps and their graphs go on meanwhile. No CUDA header here.
#pragma once

#include <memory>

#include "kv/page_memory.h"

namespace perigee {

struct GpuPagesOptions {
  int gpu = 0;
  int64_t most_unit_bytes = 0;  // of any group
  // Areas that other processes of this host may map at a time, kAreaSlots * kAreaSlotBytes of memory each. There
  // are fewer, or none, if they do not fit.
  int32_t num_areas = 0;
  bool reads_areas = true;  // of other processes: another 256 MiB
};

// Reserves all its memory: nothing is reserved while steps run. kUnavailable: no GPU; kDeviceLost: no room.
Result<std::shared_ptr<PageMemory>> make_gpu_pages(const GpuPagesOptions& options);

}  // namespace perigee
