// Collectives of ranks on GPUs against sums and copies on the host: any calls in any order, replayed graphs, epochs
// that wrap around, ranks that do not come.
#include "comm/cuda/peer_comms.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/eventually.h"
#include "base/rng.h"
#include "comm/cuda/peer_testing.h"
#include "comm/cuda/term.h"

namespace perigee {
namespace {

constexpr size_t kOneShot = std::numeric_limits<size_t>::max(), kTwoShot = 0;

using PeerTest = PeerSuite<PeerKind>;

struct Shape {
  DType dtype = DType::kF32;
  int64_t rows = 1, cols = 1, padding = 0;
  int64_t numbers() const { return rows * (cols + padding); }
};

// A number of an operand as it is stored there.
uint32_t bits_of(const Shape& s, uint64_t call, int32_t rank, int64_t i) {
  const float x = peer_value(call, rank, i);
  return s.dtype == DType::kF32 ? std::bit_cast<uint32_t>(x) : f32_to_bf16(x);
}

float number(DType dtype, uint32_t bits) {
  return dtype == DType::kF32 ? std::bit_cast<float>(bits) : bf16_to_f32(static_cast<uint16_t>(bits));
}

uint32_t expected_sum(const Shape& s, uint64_t call, int32_t ranks, int64_t i) {
  float sum = number(s.dtype, bits_of(s, call, 0, i));
  for (int32_t r = 1; r < ranks; ++r) sum += number(s.dtype, bits_of(s, call, r, i));
  return s.dtype == DType::kF32 ? std::bit_cast<uint32_t>(sum) : f32_to_bf16(sum);
}

template <typename T>
void check_sum_of(PeerRank& rank, PeerComm& comm, uint64_t call, const Shape& s) {
  std::vector<T> mine(static_cast<size_t>(s.numbers()));
  for (size_t i = 0; i < mine.size(); ++i)
    mine[i] = static_cast<T>(bits_of(s, call, comm.rank(), static_cast<int64_t>(i)));
  T* data = rank.upload(mine);
  comm.all_reduce({.data = data, .dtype = s.dtype, .rows = s.rows, .cols = s.cols, .row_stride = s.cols + s.padding});
  const std::vector<T> sums = rank.download(data, mine.size());
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.cols + s.padding; ++c) {
      const int64_t i = r * (s.cols + s.padding) + c;
      const auto expected =
          static_cast<T>(c < s.cols ? expected_sum(s, call, comm.size(), i) : mine[static_cast<size_t>(i)]);
      ASSERT_EQ(sums[static_cast<size_t>(i)], expected)
          << "call " << call << ", " << s.rows << "x" << s.cols << " + " << s.padding << " at " << r << ", " << c;
    }
}

void check_sum(PeerRank& rank, PeerComm& comm, uint64_t call, const Shape& s) {
  if (s.dtype == DType::kF32) return check_sum_of<uint32_t>(rank, comm, call, s);
  check_sum_of<uint16_t>(rank, comm, call, s);
}

// Terms into f32 rows, which have padding of their own and are on 16 bytes as those are or not.
void check_add_up(PeerRank& rank, PeerComm& comm, uint64_t call, const Shape& s) {
  std::vector<uint16_t> mine(static_cast<size_t>(s.numbers()));
  for (size_t i = 0; i < mine.size(); ++i)
    mine[i] = to_term(peer_value(call, comm.rank(), static_cast<int64_t>(i))).bits;
  const int64_t stride = s.cols + s.padding * static_cast<int64_t>(call % 2);
  std::vector<float> before(static_cast<size_t>(s.rows * stride));
  for (size_t i = 0; i < before.size(); ++i) before[i] = peer_value(call, 63, static_cast<int64_t>(i));
  float* to = rank.upload(before);
  comm.add_up({.data = rank.upload(mine),
               .dtype = DType::kF16,
               .rows = s.rows,
               .cols = s.cols,
               .row_stride = s.cols + s.padding},
              {.data = to, .rows = s.rows, .cols = s.cols, .row_stride = stride});
  const std::vector<float> sums = rank.download(to, before.size());
  const auto term = [&](int32_t r, int64_t i) { return from_term(to_term(peer_value(call, r, i)).bits); };
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < stride; ++c) {
      const auto i = static_cast<size_t>(r * stride + c);
      const int64_t at = r * (s.cols + s.padding) + c;
      float sum = term(0, at);
      for (int32_t other = 1; other < comm.size(); ++other) sum += term(other, at);
      ASSERT_EQ(sums[i], c < s.cols ? before[i] + sum : before[i])
          << "call " << call << ", " << s.rows << "x" << s.cols << " + " << s.padding << " at " << r << ", " << c;
    }
}

void check_gather(PeerRank& rank, PeerComm& comm, uint64_t call, size_t bytes, size_t offset) {
  const auto byte = [&](int32_t r, size_t i) {
    return static_cast<uint8_t>(random_u64(call * 64 + static_cast<uint64_t>(r), i));
  };
  std::vector<uint8_t> mine(bytes + offset);
  for (size_t i = 0; i < mine.size(); ++i) mine[i] = byte(comm.rank(), i);
  const uint8_t* from = rank.upload(mine);
  auto* all = static_cast<uint8_t*>(rank.reserve(bytes * static_cast<size_t>(comm.size()) + 1)) + offset % 2;
  comm.all_gather(from + offset, bytes, all);
  const std::vector<uint8_t> got = rank.download(all, bytes * static_cast<size_t>(comm.size()));
  for (int32_t r = 0; r < comm.size(); ++r)
    for (size_t i = 0; i < bytes; ++i)
      ASSERT_EQ(got[static_cast<size_t>(r) * bytes + i], byte(r, i + offset))
          << "call " << call << ", " << bytes << " bytes at " << i;
}

void check_deal(PeerRank& rank, PeerComm& comm, uint64_t call, const Shape& s) {
  std::vector<int32_t> to(static_cast<size_t>(s.rows));
  std::vector<int64_t> mine;
  const bool to_one = call % 5 == 0;
  for (int64_t i = 0; i < s.rows; ++i) {
    const auto choice = static_cast<int32_t>(random_u64(call, i) % (comm.size() + 1)) - 1;  // -1: nobody's
    to[static_cast<size_t>(i)] = to_one ? 0 : choice;
    if (to[static_cast<size_t>(i)] == comm.rank()) mine.push_back(i);
  }
  std::vector<float> part(static_cast<size_t>(s.numbers()));
  for (size_t i = 0; i < part.size(); ++i) part[i] = peer_value(call, comm.rank(), static_cast<int64_t>(i));
  // Two more rows than come, which stay as they are.
  const int64_t width = comm.size() * s.cols, whole_stride = width + s.padding;
  std::vector<float> before(static_cast<size_t>((std::ssize(mine) + 2) * whole_stride), -1.0f);
  float* whole = rank.upload(before);
  comm.all_to_all({.data = rank.upload(part), .rows = s.rows, .cols = s.cols, .row_stride = s.cols + s.padding},
                  {rank.upload(to), to.size()},
                  {.data = whole, .rows = std::ssize(mine) + 2, .cols = width, .row_stride = whole_stride});
  const std::vector<float> got = rank.download(whole, before.size());
  for (int64_t r = 0; r < std::ssize(mine) + 2; ++r)
    for (int64_t c = 0; c < whole_stride; ++c) {
      const bool comes = r < std::ssize(mine) && c < width;
      const float expected = comes ? peer_value(call, static_cast<int32_t>(c / s.cols),
                                                mine[static_cast<size_t>(r)] * (s.cols + s.padding) + c % s.cols)
                                   : -1.0f;
      ASSERT_EQ(got[static_cast<size_t>(r * whole_stride + c)], expected)
          << "call " << call << ", " << s.rows << "x" << s.cols << " at " << r << ", " << c;
    }
}

Shape random_shape(Rng& rng) {
  Shape s{.dtype = rng.below(2) == 0 ? DType::kF32 : DType::kBF16};
  s.rows = rng.between(0, rng.below(3) == 0 ? 400 : 9);
  s.cols = rng.below(2) == 0 ? 8 * rng.between(1, 300) : rng.between(1, rng.below(3) == 0 ? 3000 : 600);
  s.padding = rng.below(2) == 0 ? 0 : rng.below(2) == 0 ? 8 * rng.between(1, 4) : rng.between(1, 40);
  return s;
}

void random_call(PeerRank& rank, PeerComm& comm, uint64_t call, Rng& rng) {
  rank.reset();
  const Shape shape = random_shape(rng);
  const auto bytes = static_cast<size_t>(rng.between(0, rng.below(3) == 0 ? 2'000'000 : 3000));
  const size_t aligned = rng.below(2) == 0 ? bytes / 16 * 16 : bytes, offset = rng.below(4) == 0 ? rng.below(5) : 0;
  switch (rng.below(3)) {
    case 0: comm.set_one_shot_bytes(kOneShot); break;
    case 1: comm.set_one_shot_bytes(kTwoShot); break;
    default: comm.set_one_shot_bytes(one_shot_bytes(comm.size()));
  }
  comm.set_flagged_bytes(rng.below(2) == 0 ? 0 : kFlaggedBytes);
  switch (rng.below(5)) {
    case 0: return check_gather(rank, comm, call, aligned, offset);
    case 1: return check_deal(rank, comm, call, shape);
    case 2: return comm.barrier();
    case 3: return check_add_up(rank, comm, call, shape);
    default: return check_sum(rank, comm, call, shape);
  }
}

void random_calls(PeerRank& rank, int num_calls) {
  Rng same(static_cast<uint64_t>(rank.group.size)), own(static_cast<uint64_t>(rank.rank));
  for (int call = 0; call < num_calls && !testing::Test::HasFatalFailure(); ++call) {
    if (own.below(8) == 0) std::this_thread::sleep_for(std::chrono::microseconds(own.below(1000)));
    random_call(rank, *rank.comm, static_cast<uint64_t>(call), same);
  }
}

TEST_P(PeerTest, AnyCallsInAnyOrder) {
  for (const int32_t size : peer_sizes(GetParam())) {
    SCOPED_TRACE(size);
    PeerGroup group(size, GetParam());
    run(group, [](PeerRank& rank) { random_calls(rank, 300); });
    EXPECT_GT(group.comms.num_meetings(0), 250);
    for (int32_t r = 1; r < size; ++r) EXPECT_EQ(group.comms.num_meetings(r), group.comms.num_meetings(0));
    if (HasFatalFailure()) return;
  }
}

TEST_P(PeerTest, TheCountOfCallsWrapsAround) {
  PeerGroup group(2, GetParam(), 64 << 20, 1, UINT32_MAX - 20);
  run(group, [](PeerRank& rank) { random_calls(rank, 60); });
  EXPECT_EQ(group.comms.num_meetings(0), group.comms.num_meetings(1));
}

TEST_P(PeerTest, SumsOfAllSizes) {
  for (const int32_t size : peer_sizes(GetParam())) {
    PeerGroup group(size, GetParam(), 240 << 20);
    run(group, [](PeerRank& rank) {
      uint64_t call = 0;
      for (const size_t form : {kOneShot, kTwoShot})
        for (const int64_t cols : {64, 2304, 7168})
          for (const int64_t rows : {1, 2, 7, 8, 33, 64, 100, 512, 1000, 8192}) {
            const bool large = rows * cols > 4'000'000;
            if (large && (form == kOneShot || rank.group.size > 2))
              continue;  // two-shot all the same, and slow to check
            rank.comm->set_one_shot_bytes(form);
            for (const size_t flagged : {size_t{0}, kFlaggedBytes}) {
              rank.reset();
              rank.comm->set_flagged_bytes(flagged);
              check_sum(rank, *rank.comm, ++call, {.dtype = DType::kF32, .rows = rows, .cols = cols});
              if (large) break;
              check_sum(rank, *rank.comm, ++call, {.dtype = DType::kBF16, .rows = rows, .cols = cols});
              check_add_up(rank, *rank.comm, ++call, {.dtype = DType::kBF16, .rows = rows, .cols = cols});
            }
          }
    });
  }
}

// Any bits are data: flags lie apart from it, and the NaN that stands for nothing in a box travels as another one.
TEST_P(PeerTest, NoNumbersAreSpecial) {
  PeerGroup group(2, GetParam());
  run(group, [](PeerRank& rank) {
    constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> all = {0.0f,
                                    -0.0f,
                                    kInf,
                                    kNan,
                                    std::bit_cast<float>(1u),
                                    std::bit_cast<float>(2u),
                                    -kInf,
                                    1.0f,
                                    std::bit_cast<float>(~0u),
                                    2.0f,
                                    3.0f,
                                    4.0f};
    for (const auto& [form, flagged] :
         {std::pair(kOneShot, size_t{0}), std::pair(kOneShot, kFlaggedBytes), std::pair(kTwoShot, size_t{0})}) {
      rank.comm->set_one_shot_bytes(form);
      rank.comm->set_flagged_bytes(flagged);
      std::vector<float> mine = all;
      if (rank.rank == 1) mine.assign(mine.size(), -0.0f);
      float* data = rank.upload(mine);
      rank.comm->all_reduce({.data = data, .rows = 1, .cols = std::ssize(mine), .row_stride = std::ssize(mine)});
      const std::vector<float> sums = rank.download(data, mine.size());
      for (size_t i = 0; i < sums.size(); ++i) {
        if (std::isnan(all[i]))
          EXPECT_TRUE(std::isnan(sums[i]));
        else
          EXPECT_EQ(std::bit_cast<uint32_t>(sums[i]), std::bit_cast<uint32_t>(all[i] + -0.0f)) << i;
      }
    }
  });
}

// Nor are any terms: each pattern of bits beside itself and others, and two NaNs of ones, a blank word's bits.
TEST_P(PeerTest, NoTermsAreSpecial) {
  PeerGroup group(2, GetParam());
  run(group, [](PeerRank& rank) {
    std::vector<uint16_t> all;
    for (uint32_t bits = 0; bits < 0x10000; ++bits)
      for (const uint32_t beside : {bits, bits ^ 0xFFFFu, 0xFFFFu})
        all.insert(all.end(), {static_cast<uint16_t>(bits), static_cast<uint16_t>(beside)});
    const std::vector<uint16_t> none(all.size(), 0x8000);  // -0
    const std::vector<float> before(all.size(), -0.0f);
    for (const size_t flagged : {size_t{0}, kOneShot}) {
      rank.reset();
      rank.comm->set_flagged_bytes(flagged);
      const Tensor x{.data = rank.upload(rank.rank == 1 ? all : none),
                     .dtype = DType::kF16,
                     .rows = 1,
                     .cols = std::ssize(all),
                     .row_stride = std::ssize(all)};
      float* to = rank.upload(before);
      rank.comm->add_up(x, {.data = to, .rows = 1, .cols = x.cols, .row_stride = x.cols});
      const std::vector<float> sums = rank.download(to, all.size());
      for (size_t i = 0; i < sums.size(); ++i) {
        const float term = from_term(all[i]);
        if (std::isnan(term))
          ASSERT_TRUE(std::isnan(sums[i])) << i;
        else
          ASSERT_EQ(std::bit_cast<uint32_t>(sums[i]), std::bit_cast<uint32_t>(term + -0.0f)) << i;
      }
    }
  });
}

// Ranks with consecutive numbers are a dcp group, whose calls come between those of all.
TEST_P(PeerTest, GroupsOfConsecutiveRanks) {
  if (GetParam().placed == Placed::kApart && list_gpus().size() < 4) GTEST_SKIP() << "fewer than 4 GPUs";
  PeerGroup group(4, GetParam(), 64 << 20, 2);
  run(group, [](PeerRank& rank) {
    EXPECT_EQ(rank.dcp->rank(), rank.rank % 2);
    for (uint64_t call = 0; call < 40 && !testing::Test::HasFatalFailure(); ++call) {
      rank.reset();
      check_sum(rank, *rank.comm, call, {.rows = 3, .cols = 100});
      // Each dcp group has a value of its own for its ranks.
      check_gather(rank, *rank.dcp, 100 + call + static_cast<uint64_t>(rank.rank / 2), 5000, 0);
      if (rank.rank < 2) check_sum(rank, *rank.dcp, call, {.rows = 70, .cols = 2000});
    }
  });
  EXPECT_EQ(group.comms.num_meetings(0), 120);
  EXPECT_EQ(group.comms.num_meetings(3), 80);
}

// A captured step: inputs are copied in, calls of all kinds follow each other without the host.
class Captured {
 public:
  static constexpr int64_t kRows = 64, kCols = 4096, kPart = 515, kDealt = 40;
  explicit Captured(PeerRank& the_rank) : rank_(the_rank), size_(the_rank.comm->size()) {
    const auto bytes = static_cast<size_t>(kRows * kCols * 4);
    source_ = static_cast<float*>(rank_.reserve(bytes));
    small_ = static_cast<float*>(rank_.reserve(bytes));
    large_ = static_cast<float*>(rank_.reserve(bytes));
    all_ = static_cast<float*>(rank_.reserve(bytes * static_cast<size_t>(size_)));
    whole_ = static_cast<float*>(rank_.reserve(static_cast<size_t>(kDealt * kPart * size_ * 4)));
    std::vector<int32_t> to(static_cast<size_t>(kDealt));
    for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<int32_t>(i) % size_;
    to_ = {rank_.upload(to), to.size()};
  }
  ~Captured() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }

  void enqueue() {
    const cudaStream_t stream = rank_.stream.get();
    PeerComm& comm = *rank_.comm;
    cuda_ok(cudaMemcpyAsync(small_, source_, kCols * 4, cudaMemcpyDeviceToDevice, stream), "test");
    cuda_ok(cudaMemcpyAsync(large_, source_, kRows * kCols * 4, cudaMemcpyDeviceToDevice, stream), "test");
    comm.set_one_shot_bytes(one_shot_bytes(size_));
    comm.all_reduce({.data = small_, .rows = 1, .cols = kCols, .row_stride = kCols});
    comm.set_one_shot_bytes(kTwoShot);
    comm.all_reduce({.data = large_, .rows = kRows, .cols = kCols, .row_stride = kCols});
    comm.set_one_shot_bytes(one_shot_bytes(size_));
    comm.all_gather(large_, 5000 * 4, all_);
    comm.all_to_all({.data = large_, .rows = kDealt, .cols = kPart, .row_stride = kCols}, to_,
                    {.data = whole_, .rows = kDealt / size_, .cols = kPart * size_, .row_stride = kPart * size_});
    comm.barrier();
  }
  void capture() {
    cudaGraph_t graph = nullptr;
    ASSERT_TRUE(cuda_ok(cudaStreamBeginCapture(rank_.stream.get(), cudaStreamCaptureModeThreadLocal), "test"));
    enqueue();
    ASSERT_TRUE(cuda_ok(cudaStreamEndCapture(rank_.stream.get(), &graph), "test"));
    ASSERT_TRUE(cuda_ok(cudaGraphInstantiate(&graph_, graph, 0), "test"));
    cudaGraphDestroy(graph);
    ASSERT_TRUE(cuda_ok(cudaGraphUpload(graph_, rank_.stream.get()), "test"));
    rank_.stream.synchronize();
  }
  void replay() { cuda_ok(cudaGraphLaunch(graph_, rank_.stream.get()), "test"); }

  void set_source(uint64_t call) {
    std::vector<float> values(static_cast<size_t>(kRows * kCols));
    for (size_t i = 0; i < values.size(); ++i) values[i] = peer_value(call, rank_.rank, static_cast<int64_t>(i));
    rank_.copy(source_, values.data(), values.size() * 4);
  }
  void check(uint64_t call) {
    std::vector<float> sums(static_cast<size_t>(kRows * kCols));
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] = std::bit_cast<float>(expected_sum({}, call, size_, static_cast<int64_t>(i)));
    const std::vector<float> large = rank_.download(large_, sums.size()), small = rank_.download(small_, kCols);
    ASSERT_EQ(large, sums) << call;
    ASSERT_TRUE(std::equal(small.begin(), small.end(), sums.begin())) << call;
    const std::vector<float> all = rank_.download(all_, static_cast<size_t>(5000 * size_));
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], sums[i % 5000]) << call;
    const std::vector<float> whole = rank_.download(whole_, static_cast<size_t>(kDealt * kPart));
    for (int64_t i = 0; i < kDealt * kPart; ++i) {
      const int64_t row = i / (kPart * size_) * size_ + rank_.rank;
      ASSERT_EQ(whole[static_cast<size_t>(i)], sums[static_cast<size_t>(row * kCols + i % kPart)]) << call << ": " << i;
    }
  }

 private:
  PeerRank& rank_;
  const int32_t size_;
  float *source_, *small_, *large_, *all_, *whole_;
  std::span<const int32_t> to_;
  cudaGraphExec_t graph_ = nullptr;
};

TEST_P(PeerTest, GraphsReplay) {
  for (const int32_t size : peer_sizes(GetParam())) {
    if (Captured::kDealt % size != 0) continue;
    PeerGroup group(size, GetParam());
    run(group, [](PeerRank& rank) {
      Captured step(rank);
      step.capture();
      rank.meet();
      for (uint64_t turn = 0; turn < 20 && !testing::Test::HasFatalFailure(); ++turn) {
        step.set_source(turn);
        for (uint64_t i = 0; i <= turn % 3; ++i) step.replay();
        if (turn % 4 == 3) step.enqueue();  // calls that are not of the graph
        step.check(turn);
      }
    });
  }
}

// One rank does not come to a call of any kind; the others leave it once the group aborts, and all later ones at once.
TEST_P(PeerTest, ALostRankEndsTheCallsOfTheOthers) {
  for (const int32_t kind : {0, 1, 2, 3, 4, 5, 6}) {
    SCOPED_TRACE(kind);
    PeerGroup group(2, GetParam());
    std::chrono::duration<double> took{0};
    run(group, [&](PeerRank& rank) {
      auto* data = static_cast<float*>(rank.reserve(16 << 20));
      const int32_t* to = rank.upload(std::vector<int32_t>(512, 0));
      const auto call = [&](int32_t which) {
        rank.comm->set_one_shot_bytes(which % 2 == 0 ? kOneShot : kTwoShot);
        const Tensor x{.data = data, .rows = 512, .cols = 500, .row_stride = 500};
        if (which < 2) return rank.comm->all_reduce(x);
        if (which < 4) return rank.comm->all_gather(data, 500'000, data + 500'000);
        if (which < 6)
          return rank.comm->all_to_all(x, {to, 512},
                                       {.data = data + 500'000, .rows = 512, .cols = 1000, .row_stride = 1000});
        rank.comm->barrier();
      };
      call(0);
      rank.stream.synchronize();
      rank.meet();
      if (rank.rank == 1) {
        EXPECT_TRUE(eventually([&] { return group.comms.num_meetings(0) == 2; }));
        EXPECT_EQ(group.comms.num_meetings(1), 1);
        EXPECT_TRUE(rank.comm->status().ok());
        group.comms.abort();
        return;
      }
      call(kind);
      for (int32_t later = 0; later < 50; ++later) call(later % 7);
      Event done;
      done.record(rank.stream);
      EXPECT_TRUE(eventually([&] { return !rank.comm->status().ok(); }));
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_TRUE(eventually([&] { return done.is_done(); }));
      took = std::chrono::steady_clock::now() - begin;
      EXPECT_EQ(rank.comm->status().error().code, Code::kDeviceLost);
    });
    EXPECT_TRUE(device_status().ok());
    std::printf("51 calls ended %.3f s after the abort\n", took.count());
  }
}

TEST_P(PeerTest, ConnectingEndsWhenTheGroupAborts) {
  PeerComms comms(2, 1);
  std::jthread rank([&] {
    ASSERT_TRUE(select_device(0).ok());
    const auto pair = comms.connect(0);
    ASSERT_FALSE(pair.ok());
    EXPECT_EQ(pair.error().code, Code::kDeviceLost);
  });
  comms.abort();
}

// A rank may reserve memory while another one waits for it on a GPU of its own.
TEST_P(PeerTest, MemoryCanBeReservedWhileAnotherRankWaits) {
  if (GetParam().placed == Placed::kOnOneGpu) GTEST_SKIP() << "there cudaFree waits for all ranks";
  PeerGroup group(2, GetParam());
  run(group, [&](PeerRank& rank) {
    const std::vector<float> ones(4000, 1.0f);
    float* data = rank.upload(ones);
    for (int64_t turn = 1; turn <= 3; ++turn) {
      if (rank.rank == 1) {
        EXPECT_TRUE(eventually([&] { return group.comms.num_meetings(0) == turn; }));
        const Buffer there = device_buffer(100 << 20), here = pinned_buffer(10 << 20);
        EXPECT_NE(there.data(), nullptr);
      }
      rank.comm->all_reduce({.data = data, .rows = 1, .cols = 4000, .row_stride = 4000});
      EXPECT_EQ(rank.download(data, 1)[0], static_cast<float>(1 << turn));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, PeerTest,
                         testing::Values(Placed::kOnOneGpu, Placed::kApart, PeerKind(Placed::kOnOneGpu, Carrier::kHost),
                                         PeerKind(Placed::kApart, Carrier::kHost),
                                         PeerKind(Placed::kApart, Carrier::kNccl)),
                         [](const auto& param) { return kind_name(param.param); });

}  // namespace
}  // namespace perigee
