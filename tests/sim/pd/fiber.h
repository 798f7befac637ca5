// Fibers: what the simulation has in place of threads. One runs at a time, each until it waits; so a seed decides the
// order of everything.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace perigee::sim {

class Fiber {
 public:
  Fiber(int process, int life, std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  static Fiber* current();  // null: the main loop runs

  void resume();          // from the main loop: runs it until it suspends or ends
  static void suspend();  // from a fiber: back to the main loop
  bool ended() const { return ended_; }
  int process() const { return process_; }
  int life() const { return life_; }  // of the process

  std::vector<Fiber*> joiners;  // wait for its end
  uint64_t num_waits = 0;       // of this wait of it, among all
  bool woken = false;           // the wait has ended

 private:
  static void enter();
  void run();

  const int process_, life_;
  std::function<void()> body_;
  std::byte* stack_;
  ucontext_t context_{};
  bool ended_ = false;
  [[maybe_unused]] void* fake_stack_ = nullptr;  // the address sanitizer's
};

}  // namespace perigee::sim
