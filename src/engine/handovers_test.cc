// What an engine believes of a request that names another node's lease.
#include "engine/handovers.h"

#include <gtest/gtest.h>

#include <atomic>

#include "base/eventually.h"
#include "control/scheduler_testing.h"
#include "kv/lease_tag.h"
#include "kv/transfer_testing.h"

namespace perigee {
namespace {

class HandoversTest : public testing::Test {
 protected:
  void start(std::vector<std::string> peers, ImportEnd on_failure = ImportEnd::kRecompute) {
    HandoverConfig config{.connect = [this](const std::string&, const CacheShape&,
                                            const std::stop_token&) -> Result<std::unique_ptr<Peer>> {
      ++num_connects_;
      return Error(Code::kUnavailable, "nobody is there");
    }};
    config.secret = "secret";
    config.peers = std::move(peers);
    config.on_failure = on_failure;
    handovers_ =
        std::make_unique<Handovers>(pages_.store, pages_.shape, config,
                                    HandoverPosts{.lease = [](LeaseOver) {}, .import = [](const ImportOver&) {}});
  }
  static RemotePrefix lease_of(const std::string& peer) {
    RemotePrefix remote{.peer = peer, .lease = {7, 1}, .num_blocks = 2};
    remote.tag = lease_tag("secret", remote);
    return remote;
  }
  Status check(const RemotePrefix& remote) const {
    EngineRequest request;
    request.prompt = std::make_shared<std::vector<int32_t>>(200, 5);
    request.remote = remote;
    return handovers_->check(request);
  }

  TestPages pages_{8};
  std::atomic<int> num_connects_{0};
  std::unique_ptr<Handovers> handovers_;
};

TEST_F(HandoversTest, OnlyPeersOfTheListAreTaken) {
  start({"a:1", "b:2"});
  EXPECT_TRUE(check(lease_of("a:1")).ok());
  EXPECT_TRUE(check(lease_of("b:2")).ok());
  const Status refused = check(lease_of("a:2"));
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("--kv-peers"), std::string::npos);
  start({});
  EXPECT_TRUE(check(lease_of("a:2")).ok()) << "without a list all with the secret are";
}

TEST_F(HandoversTest, ALeaseWithoutItsTagIsNotTaken) {
  start({});
  RemotePrefix remote = lease_of("a:1");
  remote.peer = "169.254.169.254:80";
  EXPECT_FALSE(check(remote).ok());
}

// --kv-load-failure-policy is for failures. Another node without room is none.
TEST_F(HandoversTest, OnlyAFailedImportMayFailItsRequest) {
  using How = TransferEnd::How;
  const TransferEnd failed{.how = How::kFailed, .why = Error(Code::kCancelled, "the peer is gone")},
      withdrawn{.how = How::kWithdrawn};
  for (const ImportEnd policy : {ImportEnd::kFail, ImportEnd::kRecompute})
    for (const TransferEnd& end : {failed, withdrawn}) {
      start({}, policy);
      SchedulerHarness h(small_config());
      Submit submit{.sequence = SequenceId(1),
                    .prompt = std::make_shared<std::vector<int32_t>>(200, 5),
                    .sampling = std::make_shared<SamplingParams>()};
      submit.remote_blocks = 3;
      h.scheduler.submit(submit);
      EXPECT_FALSE(h.has_plan());
      ASSERT_EQ(h.scheduler.take_imports().size(), 1u);
      handovers_->handle(ImportOver{SequenceId(1), end}, h.scheduler);
      h.collect();
      const bool ends = end.how == How::kFailed && policy == ImportEnd::kFail;
      EXPECT_EQ(h.outcomes[SequenceId(1)].error.find("the peer is gone") != std::string::npos, ends);
      EXPECT_EQ(h.has_plan(), !ends);
    }
}

// Of a request that is refused: it connects nowhere that a lease would not be taken from.
TEST_F(HandoversTest, OnlyLeasesThatItTakesAreLetGo) {
  start({"a:1"});
  RemotePrefix untagged = lease_of("a:1");
  untagged.tag.clear();
  handovers_->release(untagged);
  handovers_->release(lease_of("a:2"));
  handovers_->release(lease_of("a:1"));
  EXPECT_TRUE(eventually([&] { return num_connects_ == 1; }));
  handovers_->close();
  EXPECT_EQ(num_connects_, 1);
}

}  // namespace
}  // namespace perigee
