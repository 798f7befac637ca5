// SharedArea: memory of one process that another process of the same host maps (CUDA IPC), in slots. The process that
// gives units copies them into a slot; the one that takes them copies them out. So neither is told the other's
// addresses.
//
// Who gives writes a slot only when it is asked to, and who takes asks for a slot anew only when it has copied what lay
// there. Digests show whether that was kept to: each side computes them of the bytes that it reads.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kv/page_memory.h"

namespace perigee {

inline constexpr int32_t kAreaSlots = 4;
inline constexpr int64_t kAreaSlotBytes = int64_t{64} << 20;
inline constexpr int32_t kMaxSlotUnits = 8192;

// Which areas a node has, of each GPU.
struct AreaUse {
  int32_t given = 0;   // that other processes may map at a time, kAreaSlots * kAreaSlotBytes of memory each
  bool reads = false;  // those of other processes
};

// Of a unit's bytes, a multiple of 8: the sum of its words, each mixed with its index. Any order of the words' addition
// gives the same, so that a GPU can compute it.
uint64_t unit_digest(std::span<const uint8_t> unit);

// One caller at a time.
class SharedArea {
 public:
  virtual ~SharedArea() = default;
  // What the other process maps it by.
  virtual std::string handle() const = 0;
  // Begins to copy units into the slot (of an area that was given) or out of it (that was mapped); offsets are the
  // slot's. Requires that the slot's last copy was waited for.
  virtual void begin(int32_t slot, std::span<const UnitRun> runs, int64_t unit_bytes) = 0;
  // Until that copy is done; the digests of its units, in their order (none: nobody asks). Allocates nothing.
  // kDeviceLost.
  virtual Status wait(int32_t slot, std::span<uint64_t> digests) = 0;
};

}  // namespace perigee
