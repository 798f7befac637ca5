// From CUDA's error codes to ours. Only for code that includes CUDA headers anyway.
#pragma once

#include <cuda_runtime.h>

#include "base/result.h"

namespace perigee {

// Keeps the first failure for device_status(), with the words of `what`. True: success.
bool cuda_ok(cudaError_t error, const char* what);

// Owners of a stream (non-blocking) and an event (without timing unless asked for).
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void synchronize() const { cuda_ok(cudaStreamSynchronize(stream_), "waiting for the stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(bool timing = false);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }
  void record(const Stream& stream) { cuda_ok(cudaEventRecord(event_, stream.get()), "recording an event"); }
  bool is_done() const { return cudaEventQuery(event_) != cudaErrorNotReady; }  // an error is found by who waits
  void wait() const { cuda_ok(cudaEventSynchronize(event_), "waiting for an event"); }  // success if never recorded

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace perigee
