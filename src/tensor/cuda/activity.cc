#include "tensor/cuda/activity.h"

#include <cuda_runtime.h>
#include <cupti.h>
#include <dlfcn.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "tensor/cuda/check.h"

namespace perigee {
namespace {

constexpr size_t kBufferBytes = 8u << 20;

// The functions used, by their own names.
struct Library {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush_all;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiActivityGetNumDroppedRecords) num_dropped;
  decltype(&cuptiActivityPushExternalCorrelationId) push_external;
  decltype(&cuptiActivityPopExternalCorrelationId) pop_external;
  decltype(&cuptiGetResultString) result_string;
};

template <typename F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* so, Library& f) {
  return find(so, "cuptiActivityRegisterCallbacks", f.register_callbacks) &&
         find(so, "cuptiActivityEnable", f.enable) && find(so, "cuptiActivityDisable", f.disable) &&
         find(so, "cuptiActivityFlushAll", f.flush_all) && find(so, "cuptiActivityGetNextRecord", f.next_record) &&
         find(so, "cuptiActivityGetNumDroppedRecords", f.num_dropped) &&
         find(so, "cuptiActivityPushExternalCorrelationId", f.push_external) &&
         find(so, "cuptiActivityPopExternalCorrelationId", f.pop_external) &&
         find(so, "cuptiGetResultString", f.result_string);
}

// What CUPTI's threads have delivered. The callbacks have no argument of the caller's, so there is one of it.
struct Delivered {
  Library f{};
  std::mutex mutex;
  std::vector<DeviceActivity> activities;
  std::vector<uint32_t> correlations;  // of each activity: the call that launched it
  std::unordered_map<uint32_t, uint64_t> marks;
  size_t dropped = 0;
};

Delivered& delivered() {
  static Delivered* const one = new Delivered;  // CUPTI may call after main()
  return *one;
}

DeviceActivity::Kind copy_kind(uint8_t kind) {
  if (kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD) return DeviceActivity::Kind::kCopyIn;
  if (kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH) return DeviceActivity::Kind::kCopyOut;
  return DeviceActivity::Kind::kCopy;
}

template <typename Record>
void keep(Delivered& to, const Record& record, DeviceActivity::Kind kind, const char* name) {
  to.activities.push_back({.kind = kind,
                           .name = name,
                           .begin_ns = static_cast<int64_t>(record.start),
                           .end_ns = static_cast<int64_t>(record.end),
                           .gpu = static_cast<int32_t>(record.deviceId)});
  to.correlations.push_back(record.correlationId);
}

void take_record(Delivered& to, const CUpti_Activity* record) {
  if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    keep(to, *kernel, DeviceActivity::Kind::kKernel, kernel->name != nullptr ? kernel->name : "unnamed kernel");
  } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
    keep(to, *copy, copy_kind(copy->copyKind), "copy");
  } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    keep(to, *reinterpret_cast<const CUpti_ActivityMemset4*>(record), DeviceActivity::Kind::kFill, "fill");
  } else if (record->kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) {
    const auto* external = reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
    to.marks[external->correlationId] = external->externalId;
  }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(64, kBufferBytes));
  *size = *buffer != nullptr ? kBufferBytes : 0;
  *max_records = 0;  // as many as fit
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t, size_t valid_bytes) {
  Delivered& to = delivered();
  {
    std::lock_guard lock(to.mutex);
    CUpti_Activity* record = nullptr;
    while (to.f.next_record(buffer, valid_bytes, &record) == CUPTI_SUCCESS) take_record(to, record);
    size_t dropped = 0;
    if (to.f.num_dropped(context, stream, &dropped) == CUPTI_SUCCESS) to.dropped += dropped;
  }
  std::free(buffer);
}

class Loaded final : public ActivityTrace {
 public:
  Status start(bool marks) override {
    marks_ = marks;
    {
      Delivered& d = delivered();
      std::lock_guard lock(d.mutex);
      d.activities.clear();
      d.correlations.clear();
      d.marks.clear();
      d.dropped = 0;
    }
    for (const CUpti_ActivityKind kind : kinds()) RETURN_IF_ERROR(done(delivered().f.enable(kind), "switching on"));
    return {};
  }

  void mark(uint64_t id) override {
    if (!marks_) return;
    thread_local uint64_t current = 0;
    const Library& f = delivered().f;
    uint64_t last = 0;
    if (current != 0) f.pop_external(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &last);
    if (id != 0) f.push_external(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, id);
    current = id;
  }

  Result<std::vector<DeviceActivity>> stop() override {
    cuda_ok(cudaDeviceSynchronize(), "ending a trace");
    Delivered& d = delivered();
    RETURN_IF_ERROR(done(d.f.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "reading"));
    for (const CUpti_ActivityKind kind : kinds()) RETURN_IF_ERROR(done(d.f.disable(kind), "switching off"));
    std::lock_guard lock(d.mutex);
    if (d.dropped > 0) return Error(Code::kUnavailable, fmt::format("the trace lost {} records", d.dropped), "trace");
    for (size_t i = 0; i < d.activities.size(); ++i)
      if (const auto found = d.marks.find(d.correlations[i]); found != d.marks.end())
        d.activities[i].mark = found->second;
    std::stable_sort(d.activities.begin(), d.activities.end());
    return std::move(d.activities);
  }

 private:
  std::vector<CUpti_ActivityKind> kinds() const {
    std::vector<CUpti_ActivityKind> all = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMSET};
    // A mark is tied to the records of driver calls, and by these to what they launched.
    if (marks_)
      all.insert(all.end(),
                 {CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION});
    return all;
  }

  static Status done(CUptiResult result, const char* what) {
    if (result == CUPTI_SUCCESS) return {};
    const char* text = nullptr;
    delivered().f.result_string(result, &text);
    return Error(Code::kUnavailable,
                 fmt::format("{} the GPU trace: {}", what, text != nullptr ? text : "unknown error"), "trace");
  }

  bool marks_ = false;
};

}  // namespace

Result<std::unique_ptr<ActivityTrace>> ActivityTrace::create() {
  void* so = ::dlopen("libcupti.so.13", RTLD_NOW | RTLD_LOCAL);
  Library& f = delivered().f;
  if (so == nullptr || !find_all(so, f))
    return Error(
        Code::kUnavailable,
        "--trace needs libcupti.so.13, which comes with the CUDA 13 toolkit (extras/CUPTI/lib64) or the Python "
        "package nvidia-cuda-cupti: put its folder into LD_LIBRARY_PATH, or leave --trace out",
        "trace");
  if (f.register_callbacks(give_buffer, take_buffer) != CUPTI_SUCCESS)
    return Error(Code::kUnavailable, "another profiler is attached to this process: --trace needs CUPTI to itself",
                 "trace");
  return std::unique_ptr<ActivityTrace>(std::make_unique<Loaded>());
}

}  // namespace perigee
