#include "comm/thread_comms.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <ctime>

#include "base/cgroup.h"
#include "base/check.h"
#include "tensor/tensor.h"

namespace perigee {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

// Until `word` differs from `seen`, or kPatience is over. False: the latter.
bool futex_wait(const std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec limit{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(ThreadComms::kPatience).count()};
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

enum class Call : uint8_t { kNone, kAllReduce, kAllGather, kAllToAll, kBarrier };

const char* call_name(Call call) {
  constexpr std::array<const char*, 5> kNames = {"nothing", "all_reduce", "all_gather", "all_to_all", "barrier"};
  return kNames[static_cast<size_t>(call)];
}

// What a rank shows at a meeting.
struct Offer {
  Call call = Call::kNone;
  Tensor operand;
  size_t bytes = 0;
};

size_t bytes_of(const Tensor& t) {
  return static_cast<size_t>(t.rows * t.cols * dtype_bytes(t.dtype));
}

// Of the same shape. Without columns there may be no memory, which memcpy does not allow.
void copy(const Tensor& from, const Tensor& to) {
  const int64_t width = dtype_bytes(from.dtype);
  for (int64_t r = 0; r < from.rows; ++r)
    std::copy_n(from.row<const uint8_t>(0) + r * from.row_stride * width, from.cols * width,
                to.row<uint8_t>(0) + r * to.row_stride * width);
}

float load(float x) {
  return x;
}
float load(uint16_t x) {
  return bf16_to_f32(x);
}
void store(float x, float* to) {
  *to = x;
}
void store(float x, uint16_t* to) {
  *to = f32_to_bf16(x);
}

}  // namespace

// One rank's; the others read it.
struct alignas(64) ThreadComms::Place {
  std::atomic<uint32_t> epoch{0};     // of the newest meeting that it has come to
  std::atomic<uint32_t> sleepers{0};  // ranks that wait for `epoch` in the kernel
  std::atomic<int64_t> num_meetings{0};
  std::array<Offer, 2> offers;  // of a meeting at its epoch % 2, until the next but one
  std::array<Buffer, 2> copies;

  void arrive(uint32_t at) {
    num_meetings.fetch_add(1, std::memory_order_relaxed);
    epoch.store(at, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(epoch);
  }
  bool has_come(uint32_t to) const { return static_cast<int32_t>(epoch.load(std::memory_order_acquire) - to) >= 0; }
  bool wait(uint32_t until, int spins, const std::atomic<bool>& abort);
};

// Whether the rank comes to that meeting. False: it has not, and the group aborts.
bool ThreadComms::Place::wait(uint32_t until, int spins, const std::atomic<bool>& abort) {
  for (int spin = 0; spin < spins; ++spin) {
    if (has_come(until)) return true;
    __builtin_ia32_pause();
  }
  for (;;) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = epoch.load(std::memory_order_seq_cst);
    const bool patient = static_cast<int32_t>(seen - until) >= 0 || futex_wait(epoch, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (has_come(until)) return true;
    if (!patient && abort.load(std::memory_order_acquire)) return false;
  }
}

class ThreadComms::Member final : public Comm {
 public:
  Member(ThreadComms& all, int32_t rank, int32_t size, uint32_t first_epoch)
      : Comm(rank, size), all_(all), own_(*all.places_[static_cast<size_t>(rank)]), epoch_(first_epoch) {
    // As many cores as ranks: a rank comes soon, and nobody else needs the core. Else it may need this one's core.
    constexpr int kShort = 100, kLong = 2000;  // pauses: about 2 us and 40 us, or three times that
    spins_ = available_cores() >= size ? kLong : kShort;
  }

  void all_reduce(const Tensor& x) override;
  void all_gather(const void* mine, size_t bytes, void* all) override;
  void all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) override;
  void barrier() override { meet({.call = Call::kBarrier, .operand = {}, .bytes = 0}); }
  Status status() const override {
    return lost_ ? Status(Error(Code::kDeviceLost, "another rank of the group is lost")) : Status();
  }

 private:
  bool meet(const Offer& mine);
  bool show(Call call, const Tensor& operand);
  void finish(const Tensor& operand);
  const Tensor& shown_by(int32_t rank) const { return place(rank).offers[epoch_ % 2].operand; }
  const Place& place(int32_t rank) const { return *all_.places_[static_cast<size_t>(rank)]; }
  template <typename T>
  void sum_rows(const Tensor& x, int64_t begin, int64_t end) const;
  void sum(const Tensor& x, int64_t begin, int64_t end) const;

  ThreadComms& all_;
  Place& own_;
  int spins_ = 0;
  uint32_t epoch_;     // of the newest meeting
  bool lost_ = false;  // this rank comes to no meeting any more
};

// Waits until all ranks have come. False: the group aborts.
bool ThreadComms::Member::meet(const Offer& mine) {
  if (lost_) return false;
  ++epoch_;
  own_.offers[epoch_ % 2] = mine;
  own_.arrive(epoch_);
  for (int32_t r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    if (!all_.places_[static_cast<size_t>(r)]->wait(epoch_, spins_, all_.abort_)) {
      lost_ = true;
      return false;
    }
    const Offer& other = place(r).offers[epoch_ % 2];
    CHECK(other.call == mine.call && other.bytes == mine.bytes, "rank ", r, " calls ", call_name(other.call), " of ",
          other.bytes, " bytes while rank ", rank(), " calls ", call_name(mine.call), " of ", mine.bytes);
  }
  return true;
}

// Until finish() the others may read `operand`, or its copy, and this rank theirs.
bool ThreadComms::Member::show(Call call, const Tensor& operand) {
  const size_t bytes = bytes_of(operand);
  Tensor shown = operand;
  if (bytes <= kCopiedBytes && !lost_) {
    shown.data = own_.copies[(epoch_ + 1) % 2].data();
    shown.row_stride = operand.cols;
    copy(operand, shown);
  }
  return meet({.call = call, .operand = shown, .bytes = bytes});
}

void ThreadComms::Member::finish(const Tensor& operand) {
  if (bytes_of(operand) > kCopiedBytes) barrier();
}

void ThreadComms::Member::all_reduce(const Tensor& x) {
  CHECK(x.dtype == DType::kF32 || x.dtype == DType::kBF16, "a sum of ", dtype_name(x.dtype));
  if (!show(Call::kAllReduce, x)) return;
  if (bytes_of(x) <= kCopiedBytes) return sum(x, 0, x.rows);
  const auto begin = [&](int32_t r) { return x.rows * r / size(); };
  // Of x the others read only rows that are not written here.
  sum(x, begin(rank()), begin(rank() + 1));
  if (!meet({.call = Call::kAllReduce, .operand = x, .bytes = bytes_of(x)})) return;
  for (int32_t r = 0; r < size(); ++r) {
    const int64_t rows = begin(r + 1) - begin(r);
    if (r != rank()) copy(shown_by(r).row_range(begin(r), rows), x.row_range(begin(r), rows));
  }
  barrier();
}

void ThreadComms::Member::sum(const Tensor& x, int64_t begin, int64_t end) const {
  if (x.dtype == DType::kF32) return sum_rows<float>(x, begin, end);
  sum_rows<uint16_t>(x, begin, end);
}

// Rows [begin, end) of x become sums of those rows of what all ranks show.
template <typename T>
void ThreadComms::Member::sum_rows(const Tensor& x, int64_t begin, int64_t end) const {
  constexpr int64_t kChunk = 256;
  float total[kChunk];
  for (int64_t row = begin; row < end; ++row)
    for (int64_t first = 0; first < x.cols; first += kChunk) {
      const int64_t count = std::min(kChunk, x.cols - first);
      const T* from = shown_by(0).row<const T>(row) + first;
      for (int64_t i = 0; i < count; ++i) total[i] = load(from[i]);
      for (int32_t r = 1; r < size(); ++r) {
        from = shown_by(r).row<const T>(row) + first;
        for (int64_t i = 0; i < count; ++i) total[i] += load(from[i]);
      }
      for (int64_t i = 0; i < count; ++i) store(total[i], x.row<T>(row) + first + i);
    }
}

void ThreadComms::Member::all_gather(const void* mine, size_t bytes, void* all) {
  const auto count = static_cast<int64_t>(bytes);
  // Only read: the others see it as const.
  const Tensor operand{
      .data = const_cast<void*>(mine), .dtype = DType::kU8, .rows = 1, .cols = count, .row_stride = count};
  if (!show(Call::kAllGather, operand)) return;
  for (int32_t r = 0; r < size(); ++r)
    std::copy_n(shown_by(r).row<const uint8_t>(0), bytes, static_cast<uint8_t*>(all) + static_cast<size_t>(r) * bytes);
  finish(operand);
}

void ThreadComms::Member::all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) {
  const auto mine = std::count(to.begin(), to.end(), rank());
  CHECK(part.dtype == DType::kF32 && whole.dtype == DType::kF32 && std::ssize(to) == part.rows && mine == whole.rows &&
            whole.cols == size() * part.cols,
        "rank ", rank(), " gets ", mine, " of ", part.rows, "x", part.cols, " into ", whole.rows, "x", whole.cols);
  if (!show(Call::kAllToAll, part)) return;
  for (int32_t r = 0; r < size(); ++r) {
    const Tensor& from = shown_by(r);
    int64_t row = 0;
    for (int64_t i = 0; i < part.rows; ++i)
      if (to[static_cast<size_t>(i)] == rank())
        std::copy_n(from.row<const float>(i), part.cols, whole.row<float>(row++) + r * part.cols);
  }
  finish(part);
}

ThreadComms::ThreadComms(int32_t size, const std::atomic<bool>& abort, uint32_t first_epoch) : abort_(abort) {
  CHECK(size >= 1, "a group of ", size, " ranks");
  for (int32_t r = 0; r < size; ++r) {
    Place& place = *places_.emplace_back(std::make_unique<Place>());
    place.epoch = first_epoch;
    for (Buffer& copy : place.copies) copy = Buffer(kCopiedBytes);
  }
  for (int32_t r = 0; r < size; ++r) members_.push_back(std::make_unique<Member>(*this, r, size, first_epoch));
}

ThreadComms::~ThreadComms() = default;

Comm& ThreadComms::of(int32_t rank) {
  return *members_[static_cast<size_t>(rank)];
}

int64_t ThreadComms::num_meetings(int32_t rank) const {
  return places_[static_cast<size_t>(rank)]->num_meetings.load(std::memory_order_relaxed);
}

ShardComms::ShardComms(int32_t size, int32_t dcp_size, const std::atomic<bool>& abort)
    : all_(size, abort), dcp_size_(dcp_size) {
  CHECK(dcp_size >= 1 && size % dcp_size == 0, size, " ranks in groups of ", dcp_size);
  if (dcp_size == 1) return;
  for (int32_t g = 0; g < size / dcp_size; ++g) groups_.push_back(std::make_unique<ThreadComms>(dcp_size, abort));
}

Comm& ShardComms::dcp_of(int32_t rank) {
  if (groups_.empty()) return Comm::alone();
  return groups_[static_cast<size_t>(rank / dcp_size_)]->of(rank % dcp_size_);
}

int64_t ShardComms::num_meetings(int32_t rank) const {
  const int64_t own = all_.num_meetings(rank);
  return groups_.empty() ? own : own + groups_[static_cast<size_t>(rank / dcp_size_)]->num_meetings(rank % dcp_size_);
}

}  // namespace perigee
