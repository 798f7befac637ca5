// PageMemory: copies between units of a rank's pages and contiguous bytes, where the pages are: host memory, or a GPU's
// (kv/cuda/gpu_pages.h). Thread-safe; PageStore decides which units lie where.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"

namespace perigee {

class SharedArea;

// A unit in pages, and the place of its first byte among contiguous bytes.
struct UnitRun {
  uint8_t* page = nullptr;
  int64_t offset = 0;
};

// Units of one call have one size. Errors: kDeviceLost.
class PageMemory {
 public:
  virtual ~PageMemory() = default;

  virtual Status gather(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<uint8_t> out) = 0;
  virtual Status scatter(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<const uint8_t> bytes) = 0;
  virtual Status poison(std::span<const UnitRun> runs, int64_t unit_bytes) = 0;  // every byte 0xff

  // An area for another process of this host, and one of another's (shared_area.h). kUnavailable: none, and why.
  virtual bool can_map() const { return false; }
  virtual Result<std::unique_ptr<SharedArea>> give_area();
  virtual Result<std::unique_ptr<SharedArea>> map_area(const std::string& handle);
};

std::shared_ptr<PageMemory> host_memory();

}  // namespace perigee
