// Threads, and what they wait on, of src/kv. The simulation of several nodes (tests/sim/pd) runs those sources on
// fibers and a virtual clock: it has a header of this name, with the same words, earlier on its include path.
#pragma once

#include <chrono>
#include <condition_variable>
#include <thread>

namespace perigee {

using Thread = std::thread;
using WaitCondition = std::condition_variable;

inline void sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Called before a page is read or written for another node: the simulation checks that it may be, and lets others run.
inline void about_to_touch(const void* /*page*/) {}

}  // namespace perigee
