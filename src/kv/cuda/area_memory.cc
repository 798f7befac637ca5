#include "kv/cuda/area_memory.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/memory_text.h"
#include "tensor/cuda/per_device.h"

namespace perigee {
namespace {

constexpr auto kAreaBytes = static_cast<size_t>(kAreaSlots * kAreaSlotBytes);

Error unavailable(const std::string& why) {
  return {Code::kUnavailable, why, "kv-transfer-config"};
}

}  // namespace

class AreaMemory::Area final : public SharedArea {
 public:
  Area(std::shared_ptr<void> owner, AreaMemory& areas, Memory memory, bool mapped, Copies copies)
      : owner_(std::move(owner)),
        areas_(areas),
        memory_(std::move(memory)),
        mapped_(mapped),
        copies_(std::move(copies)) {}
  ~Area() override {
    (void)select_device(areas_.gpu_);
    for (const auto& copy : copies_) copy->stream().synchronize();
    for (uint8_t*& landing : landings_) leave(landing);
    if (mapped_ && cudaIpcCloseMemHandle(memory_.base) != cudaSuccess) cudaGetLastError();
    if (!mapped_) areas_.give_back(memory_);
    areas_.give_back(std::move(copies_));
  }
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;

  std::string handle() const override {
    memory_.shown = true;
    return memory_.handle;
  }

  void begin(int32_t slot, std::span<const UnitRun> runs, int64_t unit_bytes) override {
    if (!select_device(areas_.gpu_).ok()) return;  // wait() finds it
    uint8_t* base = memory_.base + slot * kAreaSlotBytes;
    if (mapped_) base = land(slot, base, runs, unit_bytes);
    copies_[static_cast<size_t>(slot)]->start(runs.size(), unit_bytes, UnitCopy::kWithDigests, [&](size_t i) {
      CHECK(runs[i].offset >= 0 && runs[i].offset + unit_bytes <= kAreaSlotBytes, "a unit beyond its slot");
      uint8_t* const staged = base + runs[i].offset;
      return mapped_ ? UnitMove{.from = staged, .to = runs[i].page} : UnitMove{.from = runs[i].page, .to = staged};
    });
  }

  Status wait(int32_t slot, std::span<uint64_t> digests) override {
    RETURN_IF_ERROR(select_device(areas_.gpu_));
    const UnitCopy& copy = *copies_[static_cast<size_t>(slot)];
    copy.stream().synchronize();
    leave(landings_[static_cast<size_t>(slot)]);
    RETURN_IF_ERROR(device_status());
    const std::span<const uint64_t> found = copy.digests(digests.size());
    std::copy(found.begin(), found.end(), digests.begin());
    return {};
  }

 private:
  // Begins to copy the slot, from its first unit to its last, to where the returned base of it lies.
  uint8_t* land(int32_t slot, uint8_t* base, std::span<const UnitRun> runs, int64_t unit_bytes) {
    const auto by_offset = [](const UnitRun& a, const UnitRun& b) { return a.offset < b.offset; };
    const auto [least, most] = std::minmax_element(runs.begin(), runs.end(), by_offset);
    const int64_t first = runs.empty() ? 0 : least->offset, end = runs.empty() ? 0 : most->offset + unit_bytes;
    const bool most_are_wanted = 2 * static_cast<int64_t>(runs.size()) * unit_bytes > end - first;
    uint8_t*& landing = landings_[static_cast<size_t>(slot)];
    if (!most_are_wanted || first < 0 || end > kAreaSlotBytes || (landing = areas_.take_landing()) == nullptr)
      return base;
    cuda_ok(cudaMemcpyAsync(landing + first, base + first, static_cast<size_t>(end - first), cudaMemcpyDefault,
                            copies_[static_cast<size_t>(slot)]->stream().get()),
            "copying another process's slot");
    return landing;
  }
  void leave(uint8_t*& landing) const {
    if (landing != nullptr) areas_.give_back(landing);
    landing = nullptr;
  }

  const std::shared_ptr<void> owner_;
  AreaMemory& areas_;
  mutable Memory memory_;
  const bool mapped_;
  Copies copies_;
  std::array<uint8_t*, kAreaSlots> landings_{};
};

AreaMemory::AreaMemory(int32_t num_areas, size_t mapped_slots, size_t landings) : gpu_(current_device()) {
  for (int32_t i = 0; i < num_areas; ++i) {
    Memory memory;
    cudaIpcMemHandle_t handle;
    void* base = nullptr;
    if (cudaMalloc(&base, kAreaBytes) != cudaSuccess) {
      cudaGetLastError();  // no failure of the GPU
      log_warning("cache transfers: no room for ", num_areas - i, " areas of ",
                  memory_text(static_cast<int64_t>(kAreaBytes)),
                  " that other processes could map: transfers beyond that go over TCP");
      break;
    }
    if (const cudaError_t error = cudaIpcGetMemHandle(&handle, base); error != cudaSuccess) {
      cudaGetLastError();
      cudaFree(base);
      log_warning("cache transfers: GPU ", gpu_, " gives no memory to other processes: ", cudaGetErrorString(error));
      break;
    }
    memory.base = static_cast<uint8_t*>(base);
    memory.handle.assign(handle.reserved, sizeof(handle.reserved));
    free_.push_back(std::move(memory));
  }
  const size_t num_copies = free_.size() * kAreaSlots + mapped_slots;
  for (size_t i = 0; i < num_copies; ++i) copies_.push_back(std::make_unique<UnitCopy>(kMaxSlotUnits));
  for (size_t i = 0; i < landings; ++i) {
    landing_memory_.push_back(device_buffer(kAreaSlotBytes));
    landings_.push_back(landing_memory_.back().data());
  }
}

AreaMemory::~AreaMemory() {
  (void)select_device(gpu_);
  for (const Memory& memory : free_)
    if (!memory.shown) cudaFree(memory.base);
}

Result<AreaMemory::Copies> AreaMemory::take_copies() {
  const std::lock_guard lock(mutex_);
  if (std::ssize(copies_) < kAreaSlots) return unavailable("too many areas of other processes are mapped");
  Copies taken;
  for (int32_t i = 0; i < kAreaSlots; ++i) {
    taken.push_back(std::move(copies_.back()));
    copies_.pop_back();
  }
  return taken;
}

void AreaMemory::give_back(Copies copies) {
  const std::lock_guard lock(mutex_);
  std::move(copies.begin(), copies.end(), std::back_inserter(copies_));
}

uint8_t* AreaMemory::take_landing() {
  const std::lock_guard lock(mutex_);
  if (landings_.empty()) return nullptr;
  uint8_t* const landing = landings_.back();
  landings_.pop_back();
  return landing;
}

void AreaMemory::give_back(uint8_t* landing) {
  const std::lock_guard lock(mutex_);
  landings_.push_back(landing);
}

void AreaMemory::give_back(const Memory& memory) {
  const std::lock_guard lock(mutex_);
  free_.push_back(memory);
}

Result<std::unique_ptr<SharedArea>> AreaMemory::give(std::shared_ptr<void> owner) {
  ASSIGN_OR_RETURN(Copies copies, take_copies());
  Memory memory;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      memory = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (memory.base == nullptr) {
    give_back(std::move(copies));
    return unavailable("all areas that other processes may map are in use");
  }
  return std::unique_ptr<SharedArea>(
      std::make_unique<Area>(std::move(owner), *this, std::move(memory), false, std::move(copies)));
}

Result<std::unique_ptr<SharedArea>> AreaMemory::map(std::shared_ptr<void> owner, const std::string& handle) {
  cudaIpcMemHandle_t there;
  if (handle.size() != sizeof(there.reserved)) return unavailable("no handle of CUDA's");
  std::memcpy(there.reserved, handle.data(), handle.size());
  ASSIGN_OR_RETURN(Copies copies, take_copies());
  void* base = nullptr;
  if (const cudaError_t error = cudaIpcOpenMemHandle(&base, there, cudaIpcMemLazyEnablePeerAccess);
      error != cudaSuccess) {
    cudaGetLastError();  // no failure of the GPU
    give_back(std::move(copies));
    return unavailable(fmt::format("GPU {} cannot map the other's memory: {}", gpu_, cudaGetErrorString(error)));
  }
  return std::unique_ptr<SharedArea>(std::make_unique<Area>(
      std::move(owner), *this, Memory{.base = static_cast<uint8_t*>(base), .handle = handle}, true, std::move(copies)));
}

}  // namespace perigee
