#include "base/check.h"

#include <fmt/core.h>

#include <cstdlib>

#include "base/log.h"
#include "base/result.h"

namespace perigee {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  write_last_words(fmt::format("perigee: bug: CHECK({}) failed at {}:{}: {}\n", condition, file, line, message));
#ifdef PERIGEE_CHECK_ABORTS  // fuzzers and death tests want a stack trace
  std::abort();
#else
  std::_Exit(70);
#endif
}

const char* code_name(Code code) {
  switch (code) {
    case Code::kBadInput: return "bad_input";
    case Code::kNotFound: return "not_found";
    case Code::kTooLarge: return "too_large";
    case Code::kExhausted: return "exhausted";
    case Code::kUnavailable: return "unavailable";
    case Code::kCancelled: return "cancelled";
    case Code::kDeadline: return "deadline";
    case Code::kDeviceLost: return "device_lost";
  }
  return "unknown";
}

}  // namespace perigee
