// Transfers: they end once, as what they are; leases are extended and let go.
#include "kv/transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <new>
#include <utility>

#include "base/eventually.h"
#include "base/manual_clock.h"
#include "kv/transfer_testing.h"

namespace perigee {
namespace {

using How = TransferEnd::How;

// A peer that fails at one of its words, with any code.
class Faulty final : public Peer {
 public:
  Faulty(std::unique_ptr<Peer> peer, const std::atomic<int>& fails_at, const std::atomic<Code>& code,
         std::function<void()>& before_read)
      : peer_(std::move(peer)), fails_at_(fails_at), code_(code), before_read_(before_read) {}
  Result<LeaseHold> open(const LeaseName& lease, std::span<const int32_t> tokens, int32_t num_blocks) override {
    if (fails_at_ == 1) return failure();
    return peer_->open(lease, tokens, num_blocks);
  }
  Status read(const LeaseName& lease, UnitRange units, std::span<uint8_t> out) override {
    if (const auto once = std::exchange(before_read_, nullptr)) once();
    return fails_at_ == 2 && units.first > 0 ? failure() : peer_->read(lease, units, out);
  }
  Result<LeaseHold> extend(const LeaseName& lease) override {
    if (fails_at_ == 3) return failure();
    return peer_->extend(lease);
  }
  Result<uint64_t> await_growth(uint64_t known, double wait_s) override {
    if (fails_at_ == 6) return failure();
    return peer_->await_growth(known, wait_s);
  }
  Status release(const LeaseName& lease) override { return fails_at_ == 4 ? failure() : peer_->release(lease); }

 private:
  Error failure() const { return Error(code_, "a test's fault"); }
  std::unique_ptr<Peer> peer_;
  const std::atomic<int>& fails_at_;
  const std::atomic<Code>& code_;
  std::function<void()>& before_read_;  // set before post()
};

class Transfers : public testing::Test {
 protected:
  explicit Transfers(double growth_limit_s = 60) : growth_limit_s_(growth_limit_s) {
    for (size_t i = 0; i < there.memory.size(); ++i) there.memory[i] = static_cast<uint8_t>(i % 251);
  }
  RemotePrefix leased(int64_t number) {
    auto lease = std::make_shared<Lease>(
        Lease{.sequence = SequenceId(number), .num_tokens = 3 * kBlockTokens, .blocks = pages_from(1, 3)});
    return {.peer = "p", .lease = table.grant(std::move(lease), tokens), .num_blocks = 3};
  }
  TransferEnd run(int64_t number) {
    const SequenceId sequence(number);
    transfer.prepare(sequence, leased(number));
    transfer.post({.sequence = sequence, .first_block = 1, .num_tokens = 3 * kBlockTokens, .blocks = pages_from(5, 2)},
                  tokens);
    return end_of(number);
  }
  TransferEnd end_of(int64_t number) {
    CHECK(eventually([&] {
      const std::lock_guard lock(mutex);
      return ends.contains(SequenceId(number));
    }));
    const std::lock_guard lock(mutex);
    return ends.at(SequenceId(number));
  }

  const double growth_limit_s_;
  TestPages there{8}, here{8};
  ManualClock clock;
  std::atomic<int> fails_at{0}, num_connects{0};
  std::atomic<Code> code{Code::kUnavailable};
  std::function<void()> before_read;
  std::mutex mutex;
  std::map<SequenceId, TransferEnd> ends;
  std::shared_ptr<const std::vector<int32_t>> tokens = std::make_shared<std::vector<int32_t>>(200, 5);
  LeaseTable table{there.store, there.shape, 7, 30, clock, [](SequenceId) {}};
  Transfer transfer{
      here.store,
      here.shape,
      [this](const std::string& peer, const CacheShape& shape,
             const std::stop_token& stop) -> Result<std::unique_ptr<Peer>> {
        ++num_connects;
        if (fails_at == 5) return Error(Code::kUnavailable, "nobody is there");
        ASSIGN_OR_RETURN(auto made, connect_in_process(table)(peer, shape, stop));
        return std::unique_ptr<Peer>(std::make_unique<Faulty>(std::move(made), fails_at, code, before_read));
      },
      {.num_pulls = 1,
       .extend_every_s = 0.01,
       .growth_wait_s = 0.05,
       .growth_limit_s = growth_limit_s_,
       .piece_bytes = 1},
      [this](SequenceId sequence, const TransferEnd& end) {
        const std::lock_guard lock(mutex);
        const bool fresh = ends.emplace(sequence, end).second;
        CHECK(fresh, "two ends");
      }};
};

TEST_F(Transfers, BringWhatTheLeaseHolds) {
  ASSERT_EQ(run(1).how, How::kArrived);
  const auto bytes = static_cast<size_t>(here.shape.block_bytes);
  EXPECT_EQ(std::memcmp(here.page(5), there.page(2), bytes), 0);
  EXPECT_EQ(std::memcmp(here.page(6), there.page(3), bytes), 0);
  EXPECT_EQ(transfer.counts().bytes, 2 * here.shape.block_bytes);
  EXPECT_TRUE(eventually([&] { return table.counts().released == 1; }));
}

TEST_F(Transfers, AFaultIsAnEndAndThePeerIsAskedAnew) {
  for (const int fault : {5, 1, 2, 3}) {  // 5 first: later there is a connection already
    fails_at = fault;
    EXPECT_EQ(run(fault).how, How::kFailed) << fault;
    fails_at = 0;
    EXPECT_EQ(run(10 + fault).how, How::kArrived) << fault;
  }
  EXPECT_EQ(transfer.counts().failed, 4);
  EXPECT_EQ(transfer.counts().arrived, 4);
  EXPECT_GE(num_connects, 4);
}

// No code that a peer may choose makes less of it than a failure.
TEST_F(Transfers, EveryRefusalIsAFailure) {
  int64_t number = 0;
  for (const Code refusal : {Code::kBadInput, Code::kNotFound, Code::kTooLarge, Code::kExhausted, Code::kUnavailable,
                             Code::kCancelled, Code::kDeadline, Code::kDeviceLost})
    for (const int fault : {1, 2, 3}) {
      code = refusal;
      fails_at = fault;
      const TransferEnd end = run(++number);
      EXPECT_EQ(end.how, How::kFailed) << code_name(refusal) << " at " << fault;
      EXPECT_EQ(end.why->code, refusal) << " at " << fault;
    }
  EXPECT_EQ(transfer.counts().failed, number);
  EXPECT_EQ(transfer.counts().withdrawn + transfer.counts().dropped, 0);
}

// Bytes that did not come are no numbers.
TEST_F(Transfers, DestinationsArePoisoned) {
  fails_at = 1;
  EXPECT_EQ(run(1).how, How::kFailed);
  for (const int32_t page : {5, 6})
    EXPECT_EQ(std::count(here.page(page), here.page(page) + here.shape.block_bytes, 0xff), here.shape.block_bytes);
}

TEST_F(Transfers, ALeaseThatIsOverIsAFailure) {
  const RemotePrefix remote = leased(1);
  table.release(remote.lease);
  transfer.prepare(SequenceId(9), remote);
  transfer.post({.sequence = SequenceId(9), .num_tokens = 3 * kBlockTokens, .blocks = pages_from(5, 3)}, tokens);
  EXPECT_EQ(end_of(9).why->code, Code::kNotFound);
}

TEST_F(Transfers, WhatIsPreparedIsExtendedAndLetGo) {
  transfer.prepare(SequenceId(1), leased(1));
  clock.advance(29);
  // Extended at a time that the clock shows now.
  EXPECT_TRUE(eventually([&] {
    clock.advance(0.5);
    table.expire();
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    return clock.now_s() > 135;
  }));
  EXPECT_EQ(table.counts().expired, 0);
  EXPECT_EQ(table.counts().held, 1);
  transfer.release(SequenceId(1));
  transfer.release(SequenceId(1));
  EXPECT_TRUE(eventually([&] { return table.counts().held == 0; }));
  transfer.release(leased(2));  // of a request that was refused
  EXPECT_TRUE(eventually([&] { return table.counts().released == 2; }));
}

class GrowingLeases : public Transfers {
 protected:
  using Transfers::Transfers;
  SequenceId sequence{1};  // of both nodes

  LeaseGrowth growth(int32_t num_now, LeaseStage stage = LeaseStage::kGrows) const {
    auto lease = std::make_shared<Lease>(
        Lease{.sequence = sequence, .num_tokens = num_now * kBlockTokens, .blocks = pages_from(1, num_now)});
    return {.stage = stage, .num_tokens = 3 * kBlockTokens, .lease = std::move(lease)};
  }
  void begin() {
    transfer.prepare(sequence, {.peer = "p", .lease = table.grant(growth(0), tokens), .num_blocks = 3});
    transfer.post({.sequence = sequence, .first_block = 1, .num_tokens = 3 * kBlockTokens, .blocks = pages_from(5, 2)},
                  tokens);
  }
  int64_t num_sent() const { return table.counts().bytes / here.shape.block_bytes; }
  bool has_sent(int64_t num_blocks) {
    return eventually([&] { return num_sent() >= num_blocks; });
  }
  bool is_under_way(int64_t number = 1) {
    const std::lock_guard lock(mutex);
    return !ends.contains(SequenceId(number));
  }
};

// Blocks travel when they are announced, and a transfer that waits for more holds up no other of its peer.
TEST_F(GrowingLeases, TravelAsTheyGrow) {
  begin();
  table.grow(growth(1));  // which is cached here
  ASSERT_EQ(run(2).how, How::kArrived);
  int64_t before = num_sent();
  table.grow(growth(2));
  ASSERT_TRUE(has_sent(before + 1));
  ASSERT_EQ(run(3).how, How::kArrived);
  EXPECT_TRUE(is_under_way());
  before = num_sent();
  table.grow(growth(3));
  ASSERT_TRUE(has_sent(before + 1));
  EXPECT_TRUE(is_under_way()) << "the checkpoint may come";
  table.grow(growth(3, LeaseStage::kWhole));
  ASSERT_EQ(end_of(1).how, How::kArrived);
  const auto bytes = static_cast<size_t>(here.shape.block_bytes);
  for (const int32_t block : {1, 2}) EXPECT_EQ(std::memcmp(here.page(4 + block), there.page(1 + block), bytes), 0);
  EXPECT_TRUE(eventually([&] { return table.counts().released == 3; }));
}

// Its block counts as one of the import's, and whoever wants other tokens gets the blocks before.
TEST_F(GrowingLeases, TheirTailComesAtTheEnd) {
  for (const int64_t number : {1, 2}) {
    sequence = SequenceId(number);
    LeaseGrowth growing{.num_tokens = 199, .lease = growth(0).lease};
    transfer.prepare(sequence, {.peer = "p", .lease = table.grant(growing, tokens), .num_blocks = 3});
    const int32_t wanted = number == 1 ? 199 : 198;
    transfer.post({.sequence = sequence, .first_block = 1, .num_tokens = wanted, .blocks = pages_from(5, 3)}, tokens);
    int64_t before = num_sent();
    growing.lease = growth(3).lease;
    table.grow(growing);
    ASSERT_TRUE(has_sent(before + 2));
    EXPECT_TRUE(is_under_way(number));
    Lease whole{.sequence = sequence, .num_tokens = 199, .blocks = pages_from(1, 4)};
    table.grow({.stage = LeaseStage::kWhole, .num_tokens = 199, .lease = std::make_shared<Lease>(whole)});
    const TransferEnd end = end_of(number);
    ASSERT_EQ(end.how, How::kArrived);
    EXPECT_EQ(end.arrived, number == 1 ? ImportEnd::kArrived : ImportEnd::kWithoutTail);
    const auto bytes = static_cast<size_t>(here.shape.block_bytes);
    EXPECT_EQ(std::memcmp(here.page(7), there.page(4), bytes) == 0, number == 1);
    EXPECT_EQ(transfer.counts().bytes, here.shape.block_bytes * (number == 1 ? 3 : 5));
  }
}

// The tail has a state of its own; whoever cannot use it computes the prompt.
TEST_F(GrowingLeases, MayLackACheckpointWhereTheTailIsOfUse) {
  for (const int64_t number : {1, 2}) {
    const Lease lease{.sequence = SequenceId(number), .num_tokens = 199, .blocks = pages_from(1, 4)};
    const LeaseName name = table.grant(std::make_shared<Lease>(lease), tokens);
    transfer.prepare(SequenceId(number), {.peer = "p", .lease = name, .num_blocks = 3});
    transfer.post({.sequence = SequenceId(number),
                   .num_tokens = number == 1 ? 199 : 198,
                   .blocks = pages_from(4, 4),
                   .checkpoint = pages_from(0, 1)},
                  tokens);
    const TransferEnd end = end_of(number);
    EXPECT_EQ(end.how, number == 1 ? How::kArrived : How::kWithdrawn);
    if (number == 1) {
      EXPECT_EQ(end.arrived, ImportEnd::kWithoutCheckpoint);
    }
  }
}

TEST_F(GrowingLeases, EndWithTheirSequenceAndWhenTheyAreWithdrawn) {
  begin();
  table.grow(growth(2));
  ASSERT_TRUE(has_sent(1));
  table.grow(growth(2, LeaseStage::kFailed));
  EXPECT_EQ(end_of(1).why->code, Code::kNotFound);
  sequence = SequenceId(2);  // no sequence is leased twice: the first one's release may still be under way
  begin();
  table.grow(growth(2, LeaseStage::kWithdrawn));
  EXPECT_EQ(end_of(2).how, How::kWithdrawn);
  EXPECT_EQ(transfer.counts().failed, 1);
  EXPECT_EQ(transfer.counts().withdrawn, 1);
}

// Its owner refuses the read, and says why when it is asked.
TEST_F(GrowingLeases, MayBeWithdrawnWhileTheyAreRead) {
  before_read = [this] { table.grow(growth(2, LeaseStage::kWithdrawn)); };
  begin();
  table.grow(growth(2));
  EXPECT_EQ(end_of(1).how, How::kWithdrawn);
  EXPECT_EQ(transfer.counts().withdrawn, 1);
  EXPECT_EQ(table.counts().bytes, 0);
}

TEST_F(GrowingLeases, NobodyWaitsForWhatNobodyWants) {
  begin();
  table.grow(growth(2));
  ASSERT_TRUE(has_sent(1));
  transfer.release(SequenceId(1));
  EXPECT_EQ(end_of(1).how, How::kDropped);
  EXPECT_EQ(transfer.counts().dropped, 1);
  EXPECT_TRUE(eventually([&] { return table.counts().released == 1; }));
}

class LeasesThatStop : public GrowingLeases {
 protected:
  LeasesThatStop() : GrowingLeases(0.2) {}
};

TEST_F(LeasesThatStop, NobodyWaitsForEver) {
  begin();
  EXPECT_EQ(end_of(1).why->code, Code::kDeadline);
}

// The connection that waits for growth fails: what has grown is found all the same.
TEST_F(GrowingLeases, AreAskedForWhereNoNewsCome) {
  fails_at = 6;
  begin();
  table.grow(growth(3));
  ASSERT_TRUE(has_sent(2));
  table.grow(growth(3, LeaseStage::kWhole));
  EXPECT_EQ(end_of(1).how, How::kArrived);
}

// A peer may say anything. Of fewer blocks some pages would be published that nobody has written.
TEST_F(GrowingLeases, OfMoreOrFewerBlocksThanTheyWereSaidToHave) {
  for (const int32_t num_blocks : {4, 2}) {
    begin();
    table.grow(growth(num_blocks, LeaseStage::kWhole));
    EXPECT_EQ(end_of(sequence.value).why->code, Code::kBadInput) << num_blocks;
    sequence = SequenceId(2);
  }
}

// Peers by name: one that answers nothing until it is let go, one until it is stopped, one that nobody can reach, one
// without room for a piece, and good ones.
class SeveralPeers : public Transfers {
 protected:
  ~SeveralPeers() override { let_go(); }
  void let_go() {
    const std::lock_guard lock(mutex);
    hole_ends = true;
    changed.notify_all();
  }
  void wait_in_hole() {
    std::unique_lock lock(mutex);
    ++num_in_hole;
    changed.wait(lock, [&] { return hole_ends; });
  }
  void post(Transfer& to, int64_t number, const std::string& peer) {
    RemotePrefix remote = leased(number);
    remote.peer = peer;
    to.prepare(SequenceId(number), std::move(remote));
    to.post({.sequence = SequenceId(number), .num_tokens = 3 * kBlockTokens, .blocks = pages_from(5, 3)}, tokens);
  }
  bool ended(int64_t number) {
    return eventually([&] {
      const std::lock_guard lock(mutex);
      return ends.contains(SequenceId(number));
    });
  }

  std::condition_variable changed;
  bool hole_ends = false;
  std::atomic<bool> is_asked{false}, was_stopped{false};  // the deaf one
  int32_t num_in_hole = 0;
  Transfer several{here.store,
                   here.shape,
                   [this](const std::string& peer, const CacheShape& shape,
                          const std::stop_token& stop) -> Result<std::unique_ptr<Peer>> {
                     if (peer == "hole") wait_in_hole();
                     if (peer == "deaf") {
                       is_asked = true;
                       was_stopped = eventually([&] { return stop.stop_requested(); });
                     }
                     if (peer == "hole" || peer == "nobody" || peer == "deaf")
                       return Error(Code::kUnavailable, "nobody is there");
                     if (peer == "huge") throw std::bad_alloc();
                     return connect_in_process(table)(peer, shape, stop);
                   },
                   {.num_pulls = 1, .extend_every_s = 5, .idle_s = 0.05},
                   [this](SequenceId sequence, const TransferEnd& end) {
                     const std::lock_guard lock(mutex);
                     ends.emplace(sequence, end);
                   }};
};

TEST_F(SeveralPeers, OneThatIsSilentHoldsUpNobodyElse) {
  for (int64_t i = 1; i <= 4; ++i) post(several, i, "hole");
  several.release({.peer = "hole", .lease = {7, 1}});
  ASSERT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return num_in_hole == 2;  // one that pulls, and the one that releases
  }));
  for (int64_t i = 11; i <= 14; ++i) post(several, i, "good");
  for (int64_t i = 11; i <= 14; ++i) ASSERT_TRUE(ended(i));
  EXPECT_TRUE(eventually([&] { return table.counts().released == 4; }));
  {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(ends.size(), 4u);
  }
  let_go();
  for (int64_t i = 1; i <= 4; ++i) ASSERT_TRUE(ended(i)) << "what waited for it has failed with it";
  EXPECT_EQ(several.counts().arrived, 4);
  EXPECT_EQ(several.counts().failed, 4);
  const std::lock_guard lock(mutex);
  EXPECT_LE(num_in_hole, 3) << "each was tried by itself";
}

TEST_F(SeveralPeers, WithoutMemoryATransferFails) {
  post(several, 1, "huge");
  ASSERT_TRUE(ended(1));
  EXPECT_EQ(end_of(1).why->code, Code::kExhausted);
}

TEST_F(SeveralPeers, TheEndEndsWhatWaits) {
  post(several, 1, "deaf");
  ASSERT_TRUE(eventually([&] { return is_asked.load(); }));
  several.stop();
  EXPECT_TRUE(was_stopped);
}

TEST_F(SeveralPeers, NothingBeginsAfterTheEnd) {
  several.stop();
  several.release({.peer = "good", .lease = {7, 1}});  // of a request that was refused meanwhile
  EXPECT_EQ(several.num_peers(), 0);
}

TEST_F(SeveralPeers, ThreadsOfPeersThatAreNotUsedEnd) {
  for (int64_t i = 1; i <= 8; ++i) {
    post(several, i, str_cat("restarted at port ", i));
    ASSERT_TRUE(ended(i));
  }
  EXPECT_TRUE(eventually([&, number = int64_t{20}]() mutable {
    post(several, ++number, "good");
    CHECK(ended(number));
    return several.num_peers() == 1;
  }));
  EXPECT_GE(several.counts().arrived, 9) << "those of peers that are gone count, too";
}

}  // namespace
}  // namespace perigee
