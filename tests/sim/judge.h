// Judge: what the simulator does when something is wrong. It prints the seed, the time and what was found, and ends
// the process with exit code 1; so a failure is a seed and a commit.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "base/check.h"

namespace perigee::sim {

struct Judge {
  uint64_t seed = 0;
  int64_t tick = 0;
  std::function<void()> before_failure = {};  // prints what led to it

  template <typename... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) [[unlikely]]
      fail(str_cat(parts...));
  }

  [[noreturn]] void fail(const std::string& what) const {
    if (before_failure) before_failure();
    std::printf("FAILED seed %llu tick %lld: %s\n", static_cast<unsigned long long>(seed), static_cast<long long>(tick),
                what.c_str());
    std::fflush(stdout);
    std::_Exit(1);
  }
};

}  // namespace perigee::sim
