// CHECK: a bug is a crash, in release builds too.
//
// CHECK(cond, values...) prints the condition, the place and the values, then ends the process with exit code 70
// (EX_SOFTWARE) so that a supervisor restarts it. Never for input or for the network: those are Result values.
// DCHECK is the same in debug and sanitizer builds and nothing in release: for checks on the step path.
#pragma once

#include <sstream>
#include <string>

namespace perigee {

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);

template <typename... Parts>
std::string str_cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace perigee

#define CHECK(condition, ...)                                                                                     \
  do {                                                                                                            \
    if (!(condition)) [[unlikely]]                                                                                \
      ::perigee::check_failed(__FILE__, __LINE__, #condition, ::perigee::str_cat("" __VA_OPT__(, ) __VA_ARGS__)); \
  } while (false)

#ifdef NDEBUG
#define DCHECK(condition, ...) \
  do {                         \
  } while (false)
#else
#define DCHECK(condition, ...) CHECK(condition __VA_OPT__(, ) __VA_ARGS__)
#endif
