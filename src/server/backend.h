// Backend: what the server needs of an engine, and nothing more, so that tests can put a scripted one in its place.
//
// Calls are thread-safe. A sink is called on the backend's own thread and must not block.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "engine/messages.h"

namespace perigee {

class Engine;

struct BackendInfo {
  int64_t vocab = 0;
  int64_t max_model_len = 0;
  int64_t max_choices = 0;  // that run and wait at once
  int64_t num_pages = 0;    // of a rank
  int64_t dcp_size = 1;     // as many pools hold the blocks of a sequence
  std::vector<int32_t> eos_ids;
  int32_t num_drafts = 0;     // of a verify row, at most; 0: no speculation
  bool takes_leases = false;  // of other servers
};

class Backend {
 public:
  virtual ~Backend() = default;
  // As Engine::submit: kExhausted when the queue is full, kBadInput for what can never fit.
  virtual Result<RequestId> submit(EngineRequest request, OutputSink sink) = 0;
  virtual void cancel(RequestId request, int32_t choice, FinishReason reason) = 0;
  // Of a request that is never submitted: what another server holds for it is not needed.
  virtual void release(const RemotePrefix& remote) = 0;
  virtual EngineStats stats() const = 0;
  virtual BackendInfo info() const = 0;
};

}  // namespace perigee
