// Groups of ranks that exchange data of any size, late and early, and that lose one of them.
#include "comm/thread_comms.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "base/eventually.h"
#include "base/rng.h"
#include "base/soak.h"
#include "base/test_allocations.h"
#include "tensor/tensor.h"

namespace perigee {
namespace {

constexpr std::initializer_list<int32_t> kSizes = {2, 4, 8};

// A group of ranks, each on a thread of its own.
struct Group {
  explicit Group(int32_t the_size, uint32_t first_epoch = 0) : size(the_size), comms(size, abort, first_epoch) {}

  // Runs f(comm) as each rank, and waits for all of them. One that fails does not leave the others waiting.
  void run(const std::function<void(Comm&)>& f) {
    std::vector<std::jthread> threads;
    for (int32_t r = 0; r < size; ++r)
      threads.emplace_back([&, r] {
        f(comms.of(r));
        if (testing::Test::HasFatalFailure()) abort = true;
      });
  }

  const int32_t size;
  std::atomic<bool> abort{false};
  ThreadComms comms;
};

// Anything from nothing to longer than a rank spins.
void delay(Rng& rng) {
  const uint64_t choice = rng.below(16);
  if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng.below(2000)));
  if (choice < 4) std::this_thread::yield();
  if (choice < 8) {
    std::atomic<uint64_t> spins{rng.below(4096)};
    while (spins.fetch_sub(1) > 0 && spins < 4096) continue;
  }
}

// Values that any order of addition tells from any other.
float value_at(uint64_t call, int32_t rank, int64_t i) {
  const uint64_t bits = random_u64(call * 64 + static_cast<uint64_t>(rank), static_cast<uint64_t>(i));
  const float magnitude = static_cast<float>(1 << (bits % 20));
  return (static_cast<float>(bits >> 40) / 16777216.0f - 0.5f) * magnitude;
}

// A tensor inside of a wider one, and what must not be written around it.
struct Operand {
  Operand(DType dtype, int64_t rows, int64_t cols, int64_t padding)
      : memory(static_cast<size_t>(std::max<int64_t>(1, rows * (cols + padding) * dtype_bytes(dtype)))),
        tensor{.data = memory.data(), .dtype = dtype, .rows = rows, .cols = cols, .row_stride = cols + padding} {}
  float at(int64_t r, int64_t c) const {
    return tensor.dtype == DType::kF32 ? tensor.row<float>(r)[c] : bf16_to_f32(tensor.row<uint16_t>(r)[c]);
  }
  void set(int64_t r, int64_t c, float x) {
    if (tensor.dtype == DType::kF32)
      tensor.row<float>(r)[c] = x;
    else
      tensor.row<uint16_t>(r)[c] = f32_to_bf16(x);
  }
  Buffer memory;
  Tensor tensor;
};

struct Shape {
  DType dtype = DType::kF32;
  int64_t rows = 1, cols = 1, padding = 0;
  bool large() const { return rows * cols * dtype_bytes(dtype) > static_cast<int64_t>(ThreadComms::kCopiedBytes); }
};

// The sum in rank order, which every rank must have to the bit.
void check_all_reduce(Comm& comm, uint64_t call, const Shape& s) {
  Operand x(s.dtype, s.rows, s.cols, s.padding);
  const auto fill = [&](int32_t rank) {
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t c = 0; c < s.cols + s.padding; ++c) x.set(r, c, value_at(call, rank, r * s.cols + c));
  };
  fill(comm.rank());
  comm.all_reduce(x.tensor);
  ASSERT_TRUE(comm.status().ok());
  Operand all(s.dtype, 1, 1, 0);
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t c = 0; c < s.cols; ++c) {
      float sum = 0;
      for (int32_t rank = 0; rank < comm.size(); ++rank) {
        all.set(0, 0, value_at(call, rank, r * s.cols + c));
        sum = rank == 0 ? all.at(0, 0) : sum + all.at(0, 0);
      }
      all.set(0, 0, sum);
      ASSERT_EQ(x.at(r, c), all.at(0, 0)) << s.rows << "x" << s.cols << " at " << r << ", " << c;
    }
    for (int64_t c = s.cols; c < s.cols + s.padding; ++c) {
      all.set(0, 0, value_at(call, comm.rank(), r * s.cols + c));
      ASSERT_EQ(x.at(r, c), all.at(0, 0)) << "written beyond its columns";
    }
  }
}

void check_all_gather(Comm& comm, uint64_t call, size_t bytes) {
  const auto byte = [&](int32_t rank, size_t i) { return static_cast<uint8_t>(random_u64(call + rank, i)); };
  std::vector<uint8_t> mine(bytes), all(bytes * static_cast<size_t>(comm.size()));
  for (size_t i = 0; i < bytes; ++i) mine[i] = byte(comm.rank(), i);
  comm.all_gather(mine.data(), bytes, all.data());
  for (int32_t rank = 0; rank < comm.size(); ++rank)
    for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(all[static_cast<size_t>(rank) * bytes + i], byte(rank, i));
}

void check_all_to_all(Comm& comm, uint64_t call, const Shape& s) {
  std::vector<int32_t> to(static_cast<size_t>(s.rows));
  std::vector<int64_t> mine;
  for (int64_t i = 0; i < s.rows; ++i) {
    const auto rank = static_cast<int32_t>(random_u64(call, i) % (comm.size() + 1)) - 1;  // -1: nobody's
    to[static_cast<size_t>(i)] = rank;
    if (rank == comm.rank()) mine.push_back(i);
  }
  Operand part(DType::kF32, s.rows, s.cols, s.padding), whole(DType::kF32, std::ssize(mine), s.cols * comm.size(), 3);
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.cols; ++c) part.set(r, c, value_at(call, comm.rank(), r * s.cols + c));
  comm.all_to_all(part.tensor, to, whole.tensor);
  part.memory = {};  // the others have read it
  for (int64_t r = 0; r < std::ssize(mine); ++r)
    for (int64_t c = 0; c < whole.tensor.cols; ++c)
      ASSERT_EQ(whole.at(r, c),
                value_at(call, static_cast<int32_t>(c / s.cols), mine[static_cast<size_t>(r)] * s.cols + c % s.cols));
}

Shape random_shape(Rng& rng) {
  Shape s{.dtype = rng.below(2) == 0 ? DType::kF32 : DType::kBF16};
  s.rows = rng.between(0, rng.below(3) == 0 ? 40 : 5);
  s.cols = rng.between(1, rng.below(3) == 0 ? 7000 : 600);
  s.padding = rng.below(2) == 0 ? 0 : rng.between(1, 40);
  return s;
}

void random_call(Comm& comm, uint64_t call, Rng& rng) {
  const Shape shape = random_shape(rng);
  const auto bytes = static_cast<size_t>(rng.between(0, rng.below(4) == 0 ? 200000 : 300));
  switch (rng.below(4)) {
    case 0: return check_all_gather(comm, call, bytes);
    case 1: return check_all_to_all(comm, call, shape);
    case 2: return comm.barrier();
    default: return check_all_reduce(comm, call, shape);
  }
}

TEST(ThreadComms, AnyCallsInAnyOrderWithLateRanks) {
  const int num_calls = soak_requested() ? 3000 : kSanitized ? 40 : 120;
  for (const int32_t size : kSizes) {
    SCOPED_TRACE(size);
    Group group(size);
    group.run([&](Comm& comm) {
      Rng same(static_cast<uint64_t>(size)), own(static_cast<uint64_t>(comm.rank()));
      for (int call = 0; call < num_calls && !testing::Test::HasFatalFailure(); ++call) {
        delay(own);
        random_call(comm, static_cast<uint64_t>(call), same);
      }
    });
    for (int32_t r = 1; r < size; ++r) EXPECT_EQ(group.comms.num_meetings(r), group.comms.num_meetings(0));
  }
}

TEST(ThreadComms, FewerRowsThanRanks) {
  const Shape wide{.dtype = DType::kF32, .rows = 3, .cols = 20000, .padding = 1};
  ASSERT_TRUE(wide.large());
  Group group(8);
  group.run([&](Comm& comm) {
    check_all_reduce(comm, 1, wide);
    check_all_to_all(comm, 2, wide);
  });
}

// A sum has the same bits whether its rows come alone or among others: a request's do not depend on its batch.
TEST(ThreadComms, ARowDoesNotDependOnTheRowsBesideIt) {
  constexpr int64_t kCols = 1000;
  Group group(4);
  group.run([&](Comm& comm) {
    Operand many(DType::kF32, 40, kCols, 0);
    for (int64_t r = 0; r < 40; ++r)
      for (int64_t c = 0; c < kCols; ++c) many.set(r, c, value_at(7, comm.rank(), r * kCols + c));
    std::vector<std::vector<float>> alone;
    for (int64_t r = 0; r < 40; ++r) {
      Operand one(DType::kF32, 1, kCols, 0);
      std::copy_n(many.tensor.row<float>(r), kCols, one.tensor.row<float>(0));
      comm.all_reduce(one.tensor);
      alone.emplace_back(one.tensor.row<float>(0), one.tensor.row<float>(0) + kCols);
    }
    comm.all_reduce(many.tensor);
    for (int64_t r = 0; r < 40; ++r)
      for (int64_t c = 0; c < kCols; ++c)
        ASSERT_EQ(many.at(r, c), alone[static_cast<size_t>(r)][static_cast<size_t>(c)]);
  });
}

TEST(ThreadComms, TheCountOfMeetingsWrapsAround) {
  Group group(3, UINT32_MAX - 5);
  group.run([&](Comm& comm) {
    Rng same(1), own(static_cast<uint64_t>(comm.rank()));
    for (uint64_t call = 0; call < 12; ++call) {
      delay(own);
      check_all_reduce(comm, call, {.dtype = DType::kF32, .rows = 2, .cols = 100});
    }
  });
}

TEST(ThreadComms, NoCallAllocates) {
  Group group(4);
  std::atomic<int64_t> before{0}, after{0};
  group.run([&](Comm& comm) {
    const bool first = comm.rank() == 0;
    Operand small(DType::kF32, 3, 100, 0), large(DType::kBF16, 40, 4096, 0), whole(DType::kF32, first ? 2 : 0, 400, 0);
    std::vector<uint8_t> mine(300), all(1200);
    const std::vector<int32_t> to = {0, -1, 0};
    comm.barrier();
    if (first) before = num_allocations();
    comm.barrier();
    for (int turn = 0; turn < 20; ++turn) {
      comm.all_reduce(small.tensor);
      comm.all_reduce(large.tensor);
      comm.all_gather(mine.data(), mine.size(), all.data());
      comm.all_to_all(small.tensor, to, whole.tensor);
      if (!comm.status().ok()) return;
    }
    comm.barrier();
    if (first) after = num_allocations();
    comm.barrier();
  });
  EXPECT_EQ(before, after);
}

TEST(ThreadComms, OneRankAloneHasNothingToSay) {
  Group group(1);
  for (Comm* comm : {&Comm::alone(), &group.comms.of(0)}) {
    for (const int64_t rows : {0, 1, 90}) {
      check_all_reduce(*comm, 1, {.dtype = DType::kBF16, .rows = rows, .cols = 700});
      check_all_to_all(*comm, 2, {.dtype = DType::kF32, .rows = rows, .cols = 700});
      check_all_gather(*comm, 3, static_cast<size_t>(rows));
    }
    comm->barrier();
    EXPECT_TRUE(comm->status().ok());
  }
}

// One that is not woken returns when its patience is over. On a busy machine most may be late, but not all.
TEST(ThreadComms, ARankThatSleepsIsWoken) {
  using Clock = std::chrono::steady_clock;
  Clock::duration shortest = ThreadComms::kPatience;
  for (int i = 0; i < 10; ++i) {
    Clock::time_point came, left;
    Group(2).run([&](Comm& comm) {
      if (comm.rank() == 1) {
        std::this_thread::sleep_for(ThreadComms::kPatience / 10);  // the other one is asleep by then
        came = Clock::now();
      }
      comm.barrier();
      if (comm.rank() == 0) left = Clock::now();
    });
    shortest = std::min(shortest, left - came);
  }
  EXPECT_LT(shortest, ThreadComms::kPatience / 2);
}

// One rank ends before, between or after the meetings of a call. The others leave once the group aborts, and all later
// calls at once.
TEST(ThreadComms, ALostRankEndsTheCallsOfTheOthers) {
  const Shape small{.dtype = DType::kF32, .rows = 2, .cols = 64}, large{.dtype = DType::kF32, .rows = 64, .cols = 4096};
  for (const int32_t size : kSizes)
    for (const int64_t calls_of_lost : {0, 1, 2}) {
      SCOPED_TRACE(fmt::format("{} ranks, the lost one makes {} calls", size, calls_of_lost));
      Group group(size);
      const int32_t lost = size - 1;
      std::atomic<int32_t> num_left{0};
      std::jthread runs([&] {
        group.run([&](Comm& comm) {
          Operand a(small.dtype, small.rows, small.cols, 0), b(large.dtype, large.rows, large.cols, 0);
          for (int64_t call = 0; call < (comm.rank() == lost ? calls_of_lost : 1000); ++call)
            comm.all_reduce(call % 2 == 0 ? a.tensor : b.tensor);
          if (comm.rank() == lost) return;
          EXPECT_EQ(comm.status().error().code, Code::kDeviceLost);
          ++num_left;
        });
      });
      // How the group's watch sees which rank is lost.
      const int64_t meetings = calls_of_lost == 0 ? 0 : calls_of_lost == 1 ? 1 : 4;  // three of a large sum
      const bool all_wait = eventually([&] {
        for (int32_t r = 0; r < lost; ++r)
          if (group.comms.num_meetings(r) != meetings + 1) return false;
        return group.comms.num_meetings(lost) == meetings;
      });
      EXPECT_EQ(num_left, 0) << "nobody leaves before the group aborts";
      group.abort = true;
      ASSERT_TRUE(all_wait);
      ASSERT_TRUE(eventually([&] { return num_left == lost; }));
    }
}

TEST(ThreadComms, RanksThatDoNotDoTheSameAreABug) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto differ = [] {
    Group group(2);
    group.run([](Comm& comm) {
      Operand x(DType::kF32, 1 + comm.rank(), 8, 0);
      comm.all_reduce(x.tensor);
    });
  };
  EXPECT_DEATH(differ(), "calls all_reduce of (32|64) bytes while rank");
}

// Ranks with consecutive numbers are a dcp group; a meeting of either kind counts.
TEST(ShardComms, GroupsOfConsecutiveRanks) {
  const std::atomic<bool> abort{false};
  for (const int32_t dcp_size : {1, 2, 4, 8}) {
    ShardComms comms(8, dcp_size, abort);
    std::vector<std::vector<int32_t>> seen(8);
    {
      std::vector<std::jthread> threads;
      for (int32_t r = 0; r < 8; ++r)
        threads.emplace_back([&, r] {
          Comm& dcp = comms.dcp_of(r);
          std::vector<int32_t>& group = seen[static_cast<size_t>(r)];
          group.resize(static_cast<size_t>(dcp.size()));
          dcp.all_gather(&r, sizeof(r), group.data());
          comms.of(r).barrier();
        });
    }
    for (int32_t r = 0; r < 8; ++r) {
      const std::vector<int32_t>& group = seen[static_cast<size_t>(r)];
      ASSERT_EQ(group.size(), static_cast<size_t>(dcp_size));
      EXPECT_EQ(group[static_cast<size_t>(r % dcp_size)], r);
      EXPECT_EQ(group[0], r - r % dcp_size);
      EXPECT_EQ(comms.num_meetings(r), dcp_size > 1 ? 2 : 1);
    }
  }
}

}  // namespace
}  // namespace perigee
