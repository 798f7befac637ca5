// Requests that no peer of this program makes: each is refused, and the connection serves the next one.
#include <gtest/gtest.h>

#include <limits>

#include "base/manual_clock.h"
#include "kv/raw_peer_testing.h"
#include "kv/tcp_peer.h"
#include "kv/transfer_testing.h"

namespace perigee {
namespace {

class LeaseServers : public testing::Test {
 protected:
  std::string refusal_of(const WireMessage& request) {
    const auto reply = peer.ask(request);
    EXPECT_TRUE(reply.ok()) << "the connection has ended: " << reply.error().message;
    const auto* refused = reply.ok() ? std::get_if<Refused>(&*reply) : nullptr;
    const auto next = peer.ask(ExtendLease{name});
    EXPECT_TRUE(next.ok() && std::holds_alternative<Held>(*next));
    return refused != nullptr ? refused->why : "";
  }

  TestPages pages{8};
  ManualClock clock;
  LeaseTable table{pages.store, pages.shape, 7, 30, clock, [](SequenceId) {}};
  LeaseName name =
      table.grant(std::make_shared<Lease>(
                      Lease{.sequence = SequenceId(1), .num_tokens = 3 * kBlockTokens, .blocks = pages_from(1, 3)}),
                  std::make_shared<std::vector<int32_t>>(200, 5));
  std::unique_ptr<LeaseServer> server =
      std::move(LeaseServer::start(table, "127.0.0.1", 0, {.secret = "secret"})).value();
  RawPeer peer{server->port(), "secret", table.incarnation()};
};

TEST_F(LeaseServers, RefuseReadsOverTheLimitBeforeTheyTakeMemory) {
  const auto over = static_cast<int32_t>(static_cast<int64_t>(kMaxReadBytes) / pages.shape.block_bytes) + 1;
  for (const int32_t count : {over, std::numeric_limits<int32_t>::max(), 0, -1})
    EXPECT_NE(refusal_of(ReadUnits{name, {UnitGroup::kBlocks, 0, count}}).find("too many"), std::string::npos) << count;
  EXPECT_NE(refusal_of(ReadUnits{name, {UnitGroup::kState, 0, 1}}), "") << "a model without recurrent layers";
}

TEST_F(LeaseServers, RefuseWhatIsNoRequest) {
  for (const WireMessage& message : {WireMessage(Done()), WireMessage(Hello()), WireMessage(Held()),
                                     WireMessage(Refused()), WireMessage(Staged()), WireMessage(Grown())})
    EXPECT_NE(refusal_of(message).find("no request"), std::string::npos) << message.index();
}

TEST_F(LeaseServers, RefuseCarriersThatTheyDoNotHave) {
  for (const uint8_t kind : {uint8_t{0}, kCarryUcx, kCarryCudaIpc, uint8_t{255}})
    EXPECT_NE(refusal_of(Carry{kind, {1, 2, 3}}), "") << int{kind};
  EXPECT_NE(refusal_of(StageUnits{name, {UnitGroup::kBlocks, 0, 1}, 0}), "") << "no areas were asked for";
}

}  // namespace
}  // namespace perigee
