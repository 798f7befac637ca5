#include "kv/page_memory.h"

#include <cstring>

#include "base/check.h"
#include "base/thread.h"
#include "kv/shared_area.h"

namespace perigee {
namespace {

class HostMemory final : public PageMemory {
 public:
  Status gather(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<uint8_t> out) override {
    for (const UnitRun& run : runs) {
      CHECK(run.offset + unit_bytes <= std::ssize(out), "no room for the unit at ", run.offset);
      about_to_touch(run.page);
      std::memcpy(out.data() + run.offset, run.page, static_cast<size_t>(unit_bytes));
    }
    return {};
  }
  Status scatter(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<const uint8_t> bytes) override {
    for (const UnitRun& run : runs) {
      CHECK(run.offset + unit_bytes <= std::ssize(bytes), "no bytes for the unit at ", run.offset);
      about_to_touch(run.page);
      std::memcpy(run.page, bytes.data() + run.offset, static_cast<size_t>(unit_bytes));
    }
    return {};
  }
  Status poison(std::span<const UnitRun> runs, int64_t unit_bytes) override {
    for (const UnitRun& run : runs) {
      about_to_touch(run.page);
      std::memset(run.page, 0xff, static_cast<size_t>(unit_bytes));
    }
    return {};
  }
};

}  // namespace

Result<std::unique_ptr<SharedArea>> PageMemory::give_area() {
  return Error(Code::kUnavailable, "caches in host memory cannot be mapped by another process", "kv-transfer-config");
}
Result<std::unique_ptr<SharedArea>> PageMemory::map_area(const std::string&) {
  return give_area();
}

std::shared_ptr<PageMemory> host_memory() {
  static const auto memory = std::make_shared<HostMemory>();
  return memory;
}

}  // namespace perigee
