// Test only: waits for what another thread or process is about to do. The limit ends a test that would hang; it is no
// claim about speed, so it is far longer than a busy machine takes.
#pragma once

#include <chrono>
#include <thread>

namespace perigee {

inline constexpr std::chrono::seconds kHangLimit(60);

// Whether `condition` holds, now or at some time before the limit.
template <typename Condition>
bool eventually(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + kHangLimit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace perigee
