#include "kv/cuda/gpu_pages.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "kv/cuda/area_memory.h"
#include "kv/cuda/unit_copy.h"

namespace perigee {
namespace {

// Crosses between pages and the host, one piece at a time.
struct Crossing {
  explicit Crossing(size_t bytes) : staging(device_buffer(bytes)), host(pinned_buffer(bytes)) {}

  UnitCopy copy{kMaxSlotUnits};
  Buffer staging, host;
  std::span<const UnitRun> runs;  // that are under way
};

// Two, so that one crosses while the host copies the other.
using Lane = std::array<std::unique_ptr<Crossing>, 2>;

class GpuPages final : public PageMemory, public std::enable_shared_from_this<GpuPages> {
 public:
  explicit GpuPages(const GpuPagesOptions& options) : options_(options) {}
  Status reserve();

  Status gather(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<uint8_t> out) override;
  Status scatter(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<const uint8_t> bytes) override;
  Status poison(std::span<const UnitRun> runs, int64_t unit_bytes) override;
  bool can_map() const override { return true; }
  Result<std::unique_ptr<SharedArea>> give_area() override;
  Result<std::unique_ptr<SharedArea>> map_area(const std::string& handle) override;

 private:
  class HeldLane {
   public:
    explicit HeldLane(GpuPages& pages) : pages_(pages), lane_(pages.take_lane()) {}
    ~HeldLane() { pages_.give_back(lane_); }
    HeldLane(const HeldLane&) = delete;
    HeldLane& operator=(const HeldLane&) = delete;
    Crossing& next() { return *(*lane_)[turn_++ % 2]; }

   private:
    GpuPages& pages_;
    Lane* lane_;
    size_t turn_ = 0;
  };

  Lane* take_lane();
  void give_back(Lane* lane);
  Status begin();  // of the calling thread's use of the GPU
  size_t units_at_a_time(int64_t unit_bytes) const;

  const GpuPagesOptions options_;
  int64_t staging_bytes_ = 0;
  std::array<Lane, static_cast<size_t>(kLanes)> lanes_;
  std::unique_ptr<AreaMemory> areas_;
  std::mutex mutex_;
  WaitCondition freed_;
  std::vector<Lane*> free_;
};

Status GpuPages::reserve() {
  RETURN_IF_ERROR(select_device(options_.gpu));
  cuda_ok(load_unit_kernels(), "loading the kernels of cache transfers");
  staging_bytes_ = std::max(kStagingBytes, options_.most_unit_bytes);
  for (Lane& lane : lanes_) {
    for (auto& crossing : lane) crossing = std::make_unique<Crossing>(static_cast<size_t>(staging_bytes_));
    free_.push_back(&lane);
  }
  RETURN_IF_ERROR(device_status());
  areas_ = std::make_unique<AreaMemory>(options_.areas.given, static_cast<size_t>(kMappedSlots),
                                        static_cast<size_t>(options_.areas.reads ? kLandings : 0));
  return device_status();
}

Status GpuPages::begin() {
  RETURN_IF_ERROR(select_device(options_.gpu));
  return device_status();
}

Lane* GpuPages::take_lane() {
  std::unique_lock lock(mutex_);
  freed_.wait(lock, [&] { return !free_.empty(); });
  Lane* const lane = free_.back();
  free_.pop_back();
  return lane;
}

void GpuPages::give_back(Lane* lane) {
  const std::lock_guard lock(mutex_);
  free_.push_back(lane);
  freed_.notify_one();
}

size_t GpuPages::units_at_a_time(int64_t unit_bytes) const {
  CHECK(unit_bytes <= staging_bytes_, "a unit of ", unit_bytes, " bytes");
  return static_cast<size_t>(std::min<int64_t>(staging_bytes_ / unit_bytes, kMaxSlotUnits));
}

// Units follow each other in staging. On the host they may lie apart, where other ranks have those between.
template <typename Copy>  // copy(place on the host, place in staging, bytes)
void for_each_stretch(std::span<const UnitRun> runs, int64_t unit_bytes, Copy&& copy) {
  for (size_t first = 0, end = 0; first < runs.size(); first = end) {
    for (end = first + 1; end < runs.size() && runs[end].offset == runs[end - 1].offset + unit_bytes;) ++end;
    copy(runs[first].offset, static_cast<int64_t>(first) * unit_bytes, static_cast<int64_t>(end - first) * unit_bytes);
  }
}

Status GpuPages::gather(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<uint8_t> out) {
  RETURN_IF_ERROR(begin());
  HeldLane lane(*this);
  const auto finish = [&](Crossing& crossing) {
    crossing.copy.stream().synchronize();
    for_each_stretch(std::exchange(crossing.runs, {}), unit_bytes, [&](int64_t to, int64_t from, int64_t bytes) {
      std::memcpy(out.data() + to, crossing.host.data() + from, static_cast<size_t>(bytes));
    });
  };
  const size_t at_a_time = units_at_a_time(unit_bytes);
  for (; !runs.empty(); runs = runs.subspan(std::min(at_a_time, runs.size()))) {
    Crossing& crossing = lane.next();
    finish(crossing);
    crossing.runs = runs.first(std::min(at_a_time, runs.size()));
    crossing.copy.start(crossing.runs.size(), unit_bytes, UnitCopy::kWithoutDigests, [&](size_t i) {
      return UnitMove{.from = crossing.runs[i].page,
                      .to = crossing.staging.data() + static_cast<int64_t>(i) * unit_bytes};
    });
    cuda_ok(cudaMemcpyAsync(crossing.host.data(), crossing.staging.data(),
                            crossing.runs.size() * static_cast<size_t>(unit_bytes), cudaMemcpyDeviceToHost,
                            crossing.copy.stream().get()),
            "copying cache entries to the host");
  }
  finish(lane.next());
  finish(lane.next());
  return device_status();
}

Status GpuPages::scatter(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<const uint8_t> bytes) {
  RETURN_IF_ERROR(begin());
  HeldLane lane(*this);
  const size_t at_a_time = units_at_a_time(unit_bytes);
  for (; !runs.empty(); runs = runs.subspan(std::min(at_a_time, runs.size()))) {
    Crossing& crossing = lane.next();
    crossing.copy.stream().synchronize();
    const std::span<const UnitRun> piece = runs.first(std::min(at_a_time, runs.size()));
    for_each_stretch(piece, unit_bytes, [&](int64_t from, int64_t to, int64_t size) {
      std::memcpy(crossing.host.data() + to, bytes.data() + from, static_cast<size_t>(size));
    });
    cuda_ok(
        cudaMemcpyAsync(crossing.staging.data(), crossing.host.data(), piece.size() * static_cast<size_t>(unit_bytes),
                        cudaMemcpyHostToDevice, crossing.copy.stream().get()),
        "copying cache entries from the host");
    crossing.copy.start(piece.size(), unit_bytes, UnitCopy::kWithoutDigests, [&](size_t i) {
      return UnitMove{.from = crossing.staging.data() + static_cast<int64_t>(i) * unit_bytes, .to = piece[i].page};
    });
  }
  lane.next().copy.stream().synchronize();
  lane.next().copy.stream().synchronize();
  return device_status();
}

Status GpuPages::poison(std::span<const UnitRun> runs, int64_t unit_bytes) {
  RETURN_IF_ERROR(begin());
  HeldLane lane(*this);
  UnitCopy& copy = lane.next().copy;
  while (!runs.empty()) {
    const size_t count = std::min<size_t>(runs.size(), kMaxSlotUnits);
    copy.start(count, unit_bytes, UnitCopy::kWithoutDigests, [&](size_t i) { return UnitMove{.to = runs[i].page}; });
    copy.stream().synchronize();
    runs = runs.subspan(count);
  }
  return device_status();
}

Result<std::unique_ptr<SharedArea>> GpuPages::give_area() {
  RETURN_IF_ERROR(begin());
  return areas_->give(shared_from_this());
}

Result<std::unique_ptr<SharedArea>> GpuPages::map_area(const std::string& handle) {
  RETURN_IF_ERROR(begin());
  return areas_->map(shared_from_this(), handle);
}

}  // namespace

Result<std::shared_ptr<PageMemory>> make_gpu_pages(const GpuPagesOptions& options) {
  auto pages = std::make_shared<GpuPages>(options);
  RETURN_IF_ERROR(pages->reserve());
  return std::shared_ptr<PageMemory>(std::move(pages));
}

}  // namespace perigee
