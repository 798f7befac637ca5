#include "sim/pd/fiber.h"

#include <sys/mman.h>

#include <utility>

#include "base/check.h"

#if defined(__SANITIZE_ADDRESS__)
#define PERIGEE_SIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PERIGEE_SIM_ASAN 1
#endif
#endif
#ifdef PERIGEE_SIM_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace perigee::sim {
namespace {

constexpr size_t kStackBytes = 256u << 10;
constexpr size_t kGuardBytes = 4096;

Fiber* g_current = nullptr;
ucontext_t g_main;

// The address sanitizer must hear of each change of stacks.
#ifdef PERIGEE_SIM_ASAN
const void* g_main_stack = nullptr;
size_t g_main_bytes = 0;
void* g_main_fake = nullptr;
void leave(void** fake, const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(fake, stack, bytes);
}
void arrive(void* fake, const void** stack, size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake, stack, bytes);
}
#endif

// Stacks of fibers that have ended, for the next ones.
std::vector<std::byte*>& spare_stacks() {
  static std::vector<std::byte*> spare;
  return spare;
}

std::byte* take_stack() {
  auto& spare = spare_stacks();
  if (!spare.empty()) {
    std::byte* stack = spare.back();
    spare.pop_back();
    return stack;
  }
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED && mprotect(memory, kGuardBytes, PROT_NONE) == 0, "no stack for a fiber");
  return static_cast<std::byte*>(memory);
}

}  // namespace

Fiber* Fiber::current() {
  return g_current;
}

Fiber::Fiber(int process, int life, std::function<void()> body)
    : process_(process), life_(life), body_(std::move(body)), stack_(take_stack()) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::enter, 0);
}

Fiber::~Fiber() {
  if (stack_ != nullptr) munmap(stack_, kStackBytes);  // it waited for ever
}

void Fiber::enter() {
#ifdef PERIGEE_SIM_ASAN
  arrive(nullptr, &g_main_stack, &g_main_bytes);
#endif
  g_current->run();
}

void Fiber::run() {
  body_();
  body_ = nullptr;
  ended_ = true;
#ifdef PERIGEE_SIM_ASAN
  leave(nullptr, g_main_stack, g_main_bytes);
#endif
  setcontext(&g_main);
}

void Fiber::resume() {
  CHECK(g_current == nullptr && !ended_, "a fiber resumes another");
  g_current = this;
#ifdef PERIGEE_SIM_ASAN
  leave(&g_main_fake, stack_, kStackBytes);
#endif
  swapcontext(&g_main, &context_);
#ifdef PERIGEE_SIM_ASAN
  arrive(g_main_fake, nullptr, nullptr);
#endif
  g_current = nullptr;
  if (ended_) spare_stacks().push_back(std::exchange(stack_, nullptr));
}

void Fiber::suspend() {
  Fiber* self = g_current;
  CHECK(self != nullptr, "the main loop would wait");
#ifdef PERIGEE_SIM_ASAN
  leave(&self->fake_stack_, g_main_stack, g_main_bytes);
#endif
  swapcontext(&self->context_, &g_main);
#ifdef PERIGEE_SIM_ASAN
  arrive(self->fake_stack_, &g_main_stack, &g_main_bytes);
#endif
}

}  // namespace perigee::sim
