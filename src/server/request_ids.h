// RequestIds: the names of requests, by which the logs of a router and of the servers behind it belong together.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "server/http_types.h"

namespace perigee {

class RequestIds {
 public:
  RequestIds();

  // The request's X-Request-Id, when it is at most 128 letters, digits, '-', '_' and '.'; else one made here, which no
  // other request has. Thread-safe.
  std::string of(const HttpRequest& request);
  uint64_t seed();  // for a request that gives none

 private:
  const uint64_t key_;
  std::atomic<uint64_t> counter_{0};
};

}  // namespace perigee
