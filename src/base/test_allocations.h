// Test only: counts what is allocated with new or aligned_alloc(), which Asio uses, and lets chosen allocations fail.
// It replaces both, so one file of a test program includes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>

namespace perigee {

namespace allocations {
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
inline std::atomic<int64_t> count{0};
inline std::atomic<int64_t> fail_from{kNever}, fail_until{kNever};  // numbers: of the allocations that fail
inline thread_local bool exempt = false;

inline bool next_fails() {
  if (exempt) return false;
  const int64_t number = count.fetch_add(1, std::memory_order_relaxed);
  return number >= fail_from && number < fail_until;
}
}  // namespace allocations

// How many there were so far in all threads, except where they were exempt.
inline int64_t num_allocations() {
  return allocations::count.load(std::memory_order_relaxed);
}

// While it lives, what its thread allocates is not counted and does not fail.
class ExemptAllocations {
 public:
  explicit ExemptAllocations(bool exempt = true) : before_(std::exchange(allocations::exempt, exempt)) {}
  ExemptAllocations(const ExemptAllocations&) = delete;
  ExemptAllocations& operator=(const ExemptAllocations&) = delete;
  ~ExemptAllocations() { allocations::exempt = before_; }

 private:
  const bool before_;
};

// While it lives, the allocations [first, first + how_many) from its begin on throw std::bad_alloc. One at a time.
class FailingAllocations {
 public:
  FailingAllocations(int64_t first, int64_t how_many) : first_(num_allocations() + first) {
    allocations::fail_until = first_ + how_many;
    allocations::fail_from = first_;
  }
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;
  ~FailingAllocations() { allocations::fail_from = allocations::kNever; }

  bool any_failed() const { return num_allocations() > first_; }

 private:
  const int64_t first_;
};

}  // namespace perigee

// Not inlined: gcc takes malloc() and free() on either side of an inlined call for a mismatch.
[[gnu::noinline]] void* operator new(size_t size) {
  void* memory = perigee::allocations::next_fails() ? nullptr : std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// What delete frees, and std::stable_sort() asks for: memory that ends in free() must come from malloc() here too.
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return perigee::allocations::next_fails() ? nullptr : std::malloc(size == 0 ? 1 : size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
extern "C" void* aligned_alloc(size_t alignment, size_t size) noexcept {
  void* memory = nullptr;
  const bool failed = perigee::allocations::next_fails() || posix_memalign(&memory, alignment, size) != 0;
  return failed ? nullptr : memory;
}
