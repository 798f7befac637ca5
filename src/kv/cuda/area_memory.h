// AreaMemory: a GPU's areas that other processes may map (CUDA IPC), and what copies into and out of them. All memory
// is reserved at once. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kv/cuda/unit_copy.h"

namespace perigee {

class AreaMemory {
 public:
  // On the calling thread's GPU. It makes fewer areas if they do not fit, and logs how many are missing.
  // `mapped_slots`: of all areas of other processes that are mapped at a time. `landings`: slots of this GPU's memory
  // into which they are copied whole, so that the link is used as a plain copy uses it; those without one are read
  // by the kernel that places their units.
  AreaMemory(int32_t num_areas, size_t mapped_slots, size_t landings);
  ~AreaMemory();
  AreaMemory(const AreaMemory&) = delete;
  AreaMemory& operator=(const AreaMemory&) = delete;

  // kUnavailable: others have them all. `owner` is kept until the area goes.
  Result<std::unique_ptr<SharedArea>> give(std::shared_ptr<void> owner);
  // kUnavailable: this GPU cannot reach it, or too many are mapped.
  Result<std::unique_ptr<SharedArea>> map(std::shared_ptr<void> owner, const std::string& handle);

 private:
  class Area;
  using Copies = std::vector<std::unique_ptr<UnitCopy>>;
  struct Memory {
    uint8_t* base = nullptr;
    std::string handle;
    bool shown = false;  // another process may have it mapped: freed by the end of this one alone
  };
  Result<Copies> take_copies();
  void give_back(Copies copies);
  void give_back(const Memory& memory);
  uint8_t* take_landing();  // nullptr: none is free
  void give_back(uint8_t* landing);

  const int gpu_;
  std::mutex mutex_;
  std::vector<Memory> free_;
  Copies copies_;
  std::vector<Buffer> landing_memory_;
  std::vector<uint8_t*> landings_;  // that are free
};

}  // namespace perigee
