// Leases over TCP, between two nodes of one process.
#include "kv/tcp_peer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/eventually.h"
#include "base/manual_clock.h"
#include "base/rng.h"
#include "kv/raw_peer_testing.h"
#include "kv/transfer_testing.h"
#include "kv/wire.h"

namespace perigee {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

// Passes bytes on between one client after another and a server, each first through `change`.
class Middle {
 public:
  Middle(int port, std::function<void(std::span<uint8_t>, bool to_client)> change)
      : to_("127.0.0.1:" + std::to_string(port)), change_(std::move(change)) {
    auto listener = Socket::listen(kLoopback, 0);
    CHECK(listener.ok());
    listener_ = std::move(*listener);
    thread_ = std::thread([this] { run(); });
  }
  ~Middle() {
    listener_.stop();
    thread_.join();
  }
  std::string peer() const { return "127.0.0.1:" + std::to_string(listener_.port()); }

 private:
  void run() {
    for (;;) {
      auto client = listener_.accept();
      if (!client.ok()) return;
      auto server = Socket::connect(to_, 5);
      if (!server.ok()) return;
      std::thread up([&] { pass(*client, *server, false); });
      pass(*server, *client, true);
      up.join();
    }
  }
  void pass(const Socket& from, const Socket& to, bool to_client) {
    uint8_t byte = 0;
    std::vector<uint8_t> bytes(1);
    while (from.receive({&byte, 1}, 5).ok()) {
      bytes[0] = byte;
      change_(bytes, to_client);
      if (!to.send(bytes, 5).ok()) break;
    }
    from.stop();
    to.stop();
  }

  const std::string to_;
  const std::function<void(std::span<uint8_t>, bool)> change_;
  Socket listener_;
  std::thread thread_;
};

class TcpPeers : public testing::Test {
 protected:
  TcpPeers() {
    for (size_t i = 0; i < pages.memory.size(); ++i) pages.memory[i] = static_cast<uint8_t>(i % 251);
    start();
  }
  void start(int port = 0) {
    server.reset();
    auto made = LeaseServer::start(table, kLoopback, port, options);
    CHECK(made.ok(), made.error().message);
    server = std::move(*made);
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(server->port()); }
  LeaseName grant(int64_t number) {
    return table.grant(std::make_shared<Lease>(Lease{
                           .sequence = SequenceId(number), .num_tokens = 3 * kBlockTokens, .blocks = pages_from(1, 3)}),
                       tokens);
  }
  std::unique_ptr<Peer> connected(const std::string& to) {
    auto peer = connect_by_tcp(options)(to, pages.shape, {});
    CHECK(peer.ok(), peer.error().message);
    return std::move(*peer);
  }

  TestPages pages{8};
  ManualClock clock;
  TcpOptions options{.secret = "secret", .handshake_s = 2, .silence_s = 2};
  std::shared_ptr<const std::vector<int32_t>> tokens = std::make_shared<std::vector<int32_t>>(200, 5);
  LeaseTable table{pages.store, pages.shape, 77, 30, clock, [](SequenceId) {}};
  std::unique_ptr<LeaseServer> server;
};

TEST_F(TcpPeers, SayHowFarALeaseHasGrown) {
  const auto peer = connected(address());
  const auto growth = [](int32_t num_now, LeaseStage stage) {
    auto lease = std::make_shared<Lease>(
        Lease{.sequence = SequenceId(1), .num_tokens = num_now * kBlockTokens, .blocks = pages_from(1, num_now)});
    return LeaseGrowth{.stage = stage, .num_tokens = 3 * kBlockTokens, .lease = std::move(lease)};
  };
  const LeaseName name = table.grant(growth(0, LeaseStage::kGrows), tokens);
  EXPECT_EQ(*peer->open(name, std::span(*tokens).first(192), 3), (LeaseHold{0, LeaseStage::kGrows, 192}));
  EXPECT_EQ(*peer->await_growth(0, 0.01), 0u) << "not yet";
  std::thread grows([&] { table.grow(growth(3, LeaseStage::kWhole)); });
  EXPECT_EQ(*peer->await_growth(0, 60), 1u) << "longer than the peer may be silent otherwise";
  grows.join();
  EXPECT_EQ(*peer->extend(name), (LeaseHold{3, LeaseStage::kWhole, 192}));
  table.close();
  EXPECT_EQ(peer->await_growth(1, 60).error().code, Code::kUnavailable);
}

TEST_F(TcpPeers, SayWhatTheTableSays) {
  const auto peer = connected(address());
  const LeaseName name = grant(1);
  EXPECT_TRUE(peer->open(name, std::span(*tokens).first(192), 3).ok());
  EXPECT_EQ(peer->open(name, std::span(*tokens).first(128), 2).error().code, Code::kBadInput);
  std::vector<uint8_t> out(static_cast<size_t>(2 * pages.shape.block_bytes));
  ASSERT_TRUE(peer->read(name, {UnitGroup::kBlocks, 1, 2}, out).ok());
  EXPECT_EQ(std::memcmp(out.data(), pages.page(2), out.size()), 0);
  EXPECT_EQ(peer->read(name, {UnitGroup::kBlocks, 2, 2}, out).error().code, Code::kBadInput);
  EXPECT_TRUE(peer->extend(name).ok()) << "a refusal ends no connection";
  EXPECT_TRUE(peer->release(name).ok());
  EXPECT_EQ(peer->extend(name).error().code, Code::kNotFound);
  EXPECT_EQ(table.counts().released, 1);
}

// One transfer over several connections, or over those that can be had.
TEST_F(TcpPeers, APullTakesSeveralConnections) {
  options.piece_bytes = 1;  // a block each
  options.streams = 3;
  const LeaseName name = grant(1);
  const std::vector<Placement> to = pages_from(5, 3);
  for (const int32_t limit : {512, 2, 1}) {
    options.max_connections = limit;
    start();
    TestPages here{8};
    const auto peer = connected(address());
    ASSERT_TRUE(peer->pull(name, {UnitGroup::kBlocks, 0, 3}, here.store, {.blocks = to}, {}).ok()) << limit;
    EXPECT_EQ(std::memcmp(here.page(5), pages.page(1), static_cast<size_t>(3 * here.shape.block_bytes)), 0) << limit;
    EXPECT_TRUE(eventually([&] { return server->num_refused() == (limit < 3 ? 1 : 0); })) << limit;
    ASSERT_TRUE(peer->pull(name, {UnitGroup::kBlocks, 1, 1}, here.store, {.first_block = 1, .blocks = to}, {}).ok());
    EXPECT_EQ(
        peer->pull(name, {UnitGroup::kBlocks, 1, 3}, here.store, {.first_block = 1, .blocks = to}, {}).error().code,
        Code::kBadInput)
        << "a piece that fails is the pull's end";
  }
}

// Its import is dropped when its first piece is written: each connection may have one more under way.
class DroppedAtOnce final : public PageMemory {
 public:
  Status gather(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<uint8_t> out) override {
    return host_memory()->gather(runs, unit_bytes, out);
  }
  Status scatter(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<const uint8_t> bytes) override {
    drop.request_stop();
    ++num_written;
    return host_memory()->scatter(runs, unit_bytes, bytes);
  }
  Status poison(std::span<const UnitRun> runs, int64_t unit_bytes) override {
    return host_memory()->poison(runs, unit_bytes);
  }
  std::stop_source drop;
  std::atomic<int> num_written{0};
};

TEST_F(TcpPeers, APullThatIsDroppedWritesAPieceAConnection) {
  options.piece_bytes = 1;
  const auto lease = std::make_shared<Lease>(
      Lease{.sequence = SequenceId(1), .num_tokens = 8 * kBlockTokens, .blocks = pages_from(0, 8)});
  const auto long_tokens = std::make_shared<std::vector<int32_t>>(8 * kBlockTokens, 5);
  const LeaseName name = table.grant(lease, long_tokens);
  const std::vector<Placement> to = pages_from(0, 8);
  for (const int32_t streams : {1, 2}) {
    options.streams = streams;
    TestPages here{8};
    const auto memory = std::make_shared<DroppedAtOnce>();
    const PageStore store({RankPages{.base = here.memory.data(), .memory = memory, .layout = here.layout}});
    const auto peer = connected(address());
    EXPECT_EQ(
        peer->pull(name, {UnitGroup::kBlocks, 0, 8}, store, {.blocks = to}, memory->drop.get_token()).error().code,
        Code::kCancelled);
    EXPECT_GE(memory->num_written, 1);
    EXPECT_LE(memory->num_written, streams);
    EXPECT_TRUE(peer->extend(name).ok()) << "the connection serves on";
  }
}

// Connections that have read nothing yet may be gone, too.
TEST_F(TcpPeers, APullSurvivesARestart) {
  options.piece_bytes = 1;
  options.streams = 3;
  const LeaseName name = grant(1);
  const std::vector<Placement> to = pages_from(5, 3);
  TestPages here{8};
  for (int i = 0; i < 20; ++i) {
    const auto peer = connected(address());
    ASSERT_TRUE(peer->pull(name, {UnitGroup::kBlocks, 0, 3}, here.store, {.blocks = to}, {}).ok());
    start(server->port());
    ASSERT_TRUE(peer->pull(name, {UnitGroup::kBlocks, 0, 3}, here.store, {.blocks = to}, {}).ok()) << i;
  }
}

TEST_F(TcpPeers, UnitsComeOverUcx) {
  if (const Status loaded = UcxPath::check(); !loaded.ok()) GTEST_SKIP() << loaded.error().message;
  const LeaseName name = grant(1);
  options.ucx = true;
  options.piece_bytes = 1;
  options.streams = 2;
  EXPECT_FALSE(connect_by_tcp(options)(address(), pages.shape, {}).ok()) << "this server gives over TCP only";
  start();
  const std::vector<Placement> to = pages_from(5, 3);
  TestPages here{8};
  const auto peer = connected(address());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(peer->pull(name, {UnitGroup::kBlocks, 0, 3}, here.store, {.blocks = to}, {}).ok());
    EXPECT_EQ(std::memcmp(here.page(5), pages.page(1), static_cast<size_t>(3 * here.shape.block_bytes)), 0);
    EXPECT_TRUE(peer->extend(name).ok());
    if (i == 1) start(server->port());  // it is gone, and a new one is there
  }
  server.reset();
  EXPECT_FALSE(peer->pull(name, {UnitGroup::kBlocks, 0, 3}, here.store, {.blocks = to}, {}).ok());
}

TEST_F(TcpPeers, NeedTheSecretAndTheSameModel) {
  TcpOptions other = options;
  other.secret = "Secret";
  EXPECT_NE(connect_by_tcp(other)(address(), pages.shape, {}).error().message.find("secret"), std::string::npos);
  CacheShape shape = pages.shape;
  shape.model = "another";
  EXPECT_EQ(connect_by_tcp(options)(address(), shape, {}).error().field, "model");
  EXPECT_FALSE(connect_by_tcp(options)("127.0.0.1:1", pages.shape, {}).ok());
  EXPECT_FALSE(connect_by_tcp(options)("nowhere", pages.shape, {}).ok());
  TcpOptions none;
  EXPECT_EQ(LeaseServer::start(table, "0.0.0.0", 0, none).error().field, "kv-transfer-config");
}

TEST_F(TcpPeers, AConnectionThatIsGoneIsMadeAnew) {
  const auto peer = connected(address());
  const LeaseName name = grant(1);
  EXPECT_TRUE(peer->extend(name).ok());
  for (int i = 0; i < 3; ++i) {  // one that was made anew, too
    start(server->port());
    EXPECT_TRUE(peer->extend(name).ok()) << i;
  }
  server.reset();
  EXPECT_FALSE(peer->extend(name).ok());
}

// One byte in some hundreds, in either direction: each reply is right, or an error.
TEST_F(TcpPeers, DamagedBytesAreNeverAnAnswer) {
  Rng rng(1);
  std::mutex mutex;
  int32_t num_damaged = 0;
  Middle middle(server->port(), [&](std::span<uint8_t> bytes, bool) {
    const std::lock_guard lock(mutex);
    if (rng.below(4000) != 0) return;
    ++num_damaged;
    bytes[0] ^= static_cast<uint8_t>(1 + rng.below(255));
  });
  options.silence_s = options.handshake_s = 0.2;
  const LeaseName name = grant(1);
  std::vector<uint8_t> out(static_cast<size_t>(pages.shape.block_bytes));
  std::unique_ptr<Peer> peer;
  int32_t num_right = 0, num_wrong = 0;
  for (int i = 0; i < 60; ++i) {
    if (!peer) {
      auto made = connect_by_tcp(options)(middle.peer(), pages.shape, {});
      if (made.ok()) peer = std::move(*made);
    }
    if (peer && peer->read(name, {UnitGroup::kBlocks, 1, 1}, out).ok()) {
      ++num_right;
      ASSERT_EQ(std::memcmp(out.data(), pages.page(2), out.size()), 0);
    } else {
      ++num_wrong;
      peer.reset();
    }
  }
  peer.reset();
  EXPECT_GT(num_right, 0);
  EXPECT_GT(num_wrong, 0);
  EXPECT_GT(num_damaged, 0);
}

TEST_F(TcpPeers, ARepeatedRequestEndsTheConnection) {
  RawPeer peer(server->port(), options.secret, table.incarnation());
  const LeaseName name = grant(1);
  EXPECT_TRUE(peer.ask(ExtendLease{name}, 1).ok());
  EXPECT_FALSE(peer.ask(ExtendLease{name}, 1).ok());
}

// A peer that accepts and then says nothing: the end of an engine does not wait for it.
TEST_F(TcpPeers, AStopEndsEveryWait) {
  auto hole = Socket::listen(kLoopback, 0);
  ASSERT_TRUE(hole.ok());
  const std::string nobody = "127.0.0.1:" + std::to_string(hole->port());
  // Within the handshake, and within a request.
  Middle middle(server->port(), [&, num_bytes = 0](std::span<uint8_t>, bool to_client) mutable {
    if (to_client && ++num_bytes > 300) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  });
  options.handshake_s = options.silence_s = 600;
  const LeaseName name = grant(1);
  for (const std::string& to : {nobody, middle.peer()}) {
    std::stop_source stop;
    const double begin_s = system_clock().now_s();
    std::thread asking([&] {
      std::vector<uint8_t> out(static_cast<size_t>(3 * pages.shape.block_bytes));
      auto peer = connect_by_tcp(options)(to, pages.shape, stop.get_token());
      while (peer.ok() && (*peer)->read(name, {UnitGroup::kBlocks, 0, 3}, out).ok()) {
      }
      EXPECT_FALSE(connect_by_tcp(options)(to, pages.shape, stop.get_token()).ok()) << "nor does anything begin";
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    stop.request_stop();
    asking.join();
    EXPECT_LT(system_clock().now_s() - begin_s, 60) << to << ": a tenth of what a silent peer is given";
  }
}

TEST_F(TcpPeers, WhoIsUnknownHoldsNoConnectionByTrickling) {
  options.handshake_s = 0.3;
  start();
  auto socket = Socket::connect(address(), 2);
  ASSERT_TRUE(socket.ok());
  std::vector<uint8_t> hello;
  encode(Hello{make_nonce()}, 0, 0, 0, hello);
  const double limit_s = system_clock().now_s() + 2;
  for (size_t i = 0; i + 1 < hello.size(); ++i) {
    if (!socket->send(std::span(hello).subspan(i, 1), 2).ok()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_LT(system_clock().now_s(), limit_s);
}

TEST_F(TcpPeers, WhoSpeaksAnotherProtocolIsRefused) {
  const std::string text = "GET / HTTP/1.1\r\nHost: somebody\r\n\r\n";
  auto socket = Socket::connect(address(), 2);
  ASSERT_TRUE(socket.ok());
  ASSERT_TRUE(socket->send({reinterpret_cast<const uint8_t*>(text.data()), text.size()}, 2).ok());
  uint8_t byte = 0;
  EXPECT_FALSE(socket->receive({&byte, 1}, 2).ok());
  EXPECT_EQ(server->num_refused(), 1);
}

}  // namespace
}  // namespace perigee
