// Transfers where the system gives no threads for a while.
#include <gtest/gtest.h>
#include <pthread.h>

#include "base/eventually.h"
#include "base/manual_clock.h"
#include "kv/transfer.h"
#include "kv/transfer_testing.h"

namespace perigee {
namespace {

// While it lives no thread can be made: there is no address space for its stack.
class NoThreads {
 public:
  NoThreads() {
    CHECK(pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    CHECK(pthread_attr_setstacksize(&huge, size_t{1} << 50) == 0 && pthread_setattr_default_np(&huge) == 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

TEST(TransferThreads, APeerIsTriedAgainWhenThereAreThreadsAgain) {
  TestPages there{8}, here{8};
  ManualClock clock;
  LeaseTable table(there.store, there.shape, 7, 30, clock, [](SequenceId) {});
  Transfer transfer(here.store, here.shape, connect_in_process(table), {}, [](SequenceId, const auto&) {});
  const auto tokens = std::make_shared<std::vector<int32_t>>(200, 5);
  auto run = [&, number = int64_t{0}]() mutable {
    const SequenceId sequence(++number);
    auto lease = std::make_shared<Lease>(
        Lease{.sequence = sequence, .num_tokens = 3 * kBlockTokens, .blocks = pages_from(1, 3)});
    transfer.prepare(sequence, {.peer = "p", .lease = table.grant(std::move(lease), tokens), .num_blocks = 3});
    transfer.post({.sequence = sequence, .num_tokens = 3 * kBlockTokens, .blocks = pages_from(5, 3)}, tokens);
  };
  {
    const NoThreads none;
    run();
    EXPECT_EQ(transfer.counts().failed, 1);
  }
  run();
  EXPECT_TRUE(eventually([&] { return transfer.counts().arrived + transfer.counts().failed == 2; }));
  EXPECT_EQ(transfer.counts().arrived, 1);
}

}  // namespace
}  // namespace perigee
