// Units by way of memory that both processes map, with a stand-in for a GPU's: areas of this process.
#include "kv/area_reader.h"

#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "kv/page_store_testing.h"
#include "kv/raw_peer_testing.h"
#include "kv/tcp_peer.h"

namespace perigee {
namespace {

// Areas by name. Copies run when they are waited for, as late as they may.
class LocalAreas final : public PageMemory {
 public:
  explicit LocalAreas(size_t num_areas) : num_free_(num_areas) {}

  Status gather(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<uint8_t> out) override {
    ++num_gathers;
    return host_memory()->gather(runs, unit_bytes, out);
  }
  Status scatter(std::span<const UnitRun> runs, int64_t unit_bytes, std::span<const uint8_t> bytes) override {
    return host_memory()->scatter(runs, unit_bytes, bytes);
  }
  Status poison(std::span<const UnitRun> runs, int64_t unit_bytes) override {
    return host_memory()->poison(runs, unit_bytes);
  }
  bool can_map() const override { return true; }
  Result<std::unique_ptr<SharedArea>> give_area() override {
    if (num_free_ == 0) return Error(Code::kUnavailable, "all areas are in use");
    --num_free_;
    ++num_given;
    const Memory memory(new uint8_t[kAreaSlots * kAreaSlotBytes]);  // hardly any is touched
    const std::string name = str_cat("area ", reinterpret_cast<uintptr_t>(memory.get()));
    const std::lock_guard lock(mutex());
    shown()[name] = memory;
    return std::unique_ptr<SharedArea>(std::make_unique<Area>(*this, memory, name, false));
  }
  Result<std::unique_ptr<SharedArea>> map_area(const std::string& handle) override {
    const std::lock_guard lock(mutex());
    const Memory memory = shown()[handle.c_str()].lock();
    if (!memory) return Error(Code::kUnavailable, "no such area");
    return std::unique_ptr<SharedArea>(std::make_unique<Area>(*this, memory, handle, true));
  }

  std::atomic<size_t> num_given = 0;
  size_t num_gathers = 0;
  int64_t damage = -1;  // the n-th copy out of an area finds a byte changed

 private:
  using Memory = std::shared_ptr<uint8_t[]>;
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::map<std::string, std::weak_ptr<uint8_t[]>>& shown() {
    static std::map<std::string, std::weak_ptr<uint8_t[]>> shown;
    return shown;
  }

  class Area final : public SharedArea {
   public:
    Area(LocalAreas& owner, Memory memory, std::string name, bool mapped)
        : owner_(owner), memory_(std::move(memory)), name_(std::move(name)), mapped_(mapped) {}
    ~Area() override {
      if (!mapped_) ++owner_.num_free_;
    }
    std::string handle() const override { return name_; }
    void begin(int32_t slot, std::span<const UnitRun> runs, int64_t unit_bytes) override {
      Copy& copy = copies_[static_cast<size_t>(slot)];
      EXPECT_TRUE(copy.runs.empty()) << "the slot's last copy was not waited for";
      copy = {{runs.begin(), runs.end()}, unit_bytes};
    }
    Status wait(int32_t slot, std::span<uint64_t> digests) override {
      Copy& copy = copies_[static_cast<size_t>(slot)];
      EXPECT_TRUE(digests.empty() || digests.size() == copy.runs.size());
      if (mapped_ && owner_.damage-- == 0) memory_.get()[slot * kAreaSlotBytes + 5] ^= 1;
      for (size_t i = 0; i < copy.runs.size(); ++i) {
        const auto size = static_cast<size_t>(copy.unit_bytes);
        uint8_t* const staged = memory_.get() + slot * kAreaSlotBytes + copy.runs[i].offset;
        uint8_t *const from = mapped_ ? staged : copy.runs[i].page, *const to = mapped_ ? copy.runs[i].page : staged;
        std::memcpy(to, from, size);
        if (!digests.empty()) digests[i] = unit_digest({from, size});
      }
      copy.runs.clear();
      return {};
    }

   private:
    struct Copy {
      std::vector<UnitRun> runs;
      int64_t unit_bytes = 0;
    };
    LocalAreas& owner_;
    const Memory memory_;
    const std::string name_;
    const bool mapped_;
    std::array<Copy, kAreaSlots> copies_;
  };

  std::atomic<size_t> num_free_;
};

// A node that gives, its server, and a connection from another.
struct Connected {
  explicit Connected(const TestNode& from, const TestNode& to, bool areas = true)
      : table(from.store, from.shape, 7, 30, system_clock(), [](SequenceId) {}) {
    TcpOptions options{.secret = "secret"};
    options.areas = areas;
    server = std::move(LeaseServer::start(table, "127.0.0.1", 0, options)).value();
    const Connect connect = connect_by_tcp(options);
    peer = std::move(connect(str_cat("127.0.0.1:", server->port()), to.shape, {})).value();
    lease = table.grant(
        std::make_shared<Lease>(Lease{.sequence = SequenceId(1),
                                      .num_tokens = static_cast<int32_t>(std::ssize(from.blocks)) * kBlockTokens,
                                      .blocks = from.blocks,
                                      .checkpoint = from.checkpoint,
                                      .tail_state = from.tail_state}),
        std::make_shared<std::vector<int32_t>>(from.blocks.size() * kBlockTokens));
  }
  Status pull(const TestNode& to) const {
    for (const UnitRange units : all_units(to)) RETURN_IF_ERROR(peer->pull(lease, units, to.store, to.pages(), {}));
    return {};
  }
  LeaseTable table;
  std::unique_ptr<LeaseServer> server;
  std::unique_ptr<Peer> peer;
  LeaseName lease;
};

void fill(const TestNode& node) {
  for (const UnitRange units : all_units(node)) {
    const auto bytes = random_bytes(static_cast<size_t>(units.count * node.shape.unit_bytes(units.group)));
    ASSERT_TRUE(node.store.scatter(node.pages(), units, bytes).ok());
  }
}

void expect_same(const TestNode& a, const TestNode& b) {
  for (const UnitRange units : all_units(a)) EXPECT_EQ(a.gathered(units), b.gathered(units));
}

TEST(AreaReader, AnyLayoutToAnyLayout) {
  for (const auto& [tp, dcp] : kTestLayouts)
    for (const auto& [to_tp, to_dcp] : {kTestLayouts[0], kTestLayouts[2], kTestLayouts[4]}) {
      SCOPED_TRACE(str_cat(tp, "/", dcp, " to ", to_tp, "/", to_dcp));
      const auto memory = std::make_shared<LocalAreas>(tp);
      const TestNode from(tp, dcp, 5, 1, {.pages = memory}, TestDraft::kHeads),
          to(to_tp, to_dcp, 5, 2, {.pages = memory}, TestDraft::kWholeHeads);
      fill(from);
      const Connected connected(from, to);
      ASSERT_TRUE(to.store.poison(to.pages()).ok());
      const Status pulled = connected.pull(to);
      ASSERT_TRUE(pulled.ok()) << pulled.error().message;
      EXPECT_EQ(memory->num_gathers, 0u) << "units came over TCP";
      expect_same(from, to);
    }
}

TEST(AreaReader, OverTcpWhereThereIsNoArea) {
  const auto none = std::make_shared<LocalAreas>(0), one = std::make_shared<LocalAreas>(1);
  const TestNode host(1, 1, 5, 3);
  for (const auto& memory : {none, one}) {
    const TestNode from(1, 1, 5, 1, {.pages = memory}), to(1, 1, 5, 2, {.pages = memory});
    fill(from);
    const Connected connected(from, to, memory == none);
    ASSERT_TRUE(connected.pull(to).ok());
    EXPECT_GT(memory->num_gathers, 0u);
    expect_same(from, to);
    const Connected to_host(from, host);
    ASSERT_TRUE(to_host.pull(host).ok()) << "a node that maps nothing does not ask for it";
    expect_same(from, host);
  }
}

TEST(AreaReader, DamageIsSeenAndEndsTheConnection) {
  const auto memory = std::make_shared<LocalAreas>(1);
  const TestNode from(1, 1, 5, 1, {.pages = memory}), to(1, 1, 5, 2, {.pages = memory});
  fill(from);
  const Connected connected(from, to);
  memory->damage = 0;
  EXPECT_EQ(connected.pull(to).error().field, "digest");
  EXPECT_TRUE(connected.pull(to).ok()) << "by a connection and an area that are made anew";
  expect_same(from, to);
}

TEST(AreaReader, ALeaseThatIsOverIsRefused) {
  const auto memory = std::make_shared<LocalAreas>(1);
  const TestNode from(1, 1, 5, 1, {.pages = memory}), to(1, 1, 5, 2, {.pages = memory});
  Connected connected(from, to);
  connected.table.release(connected.lease);
  EXPECT_EQ(connected.pull(to).error().code, Code::kNotFound);
}

TEST(AreaReader, ANodeStagesNothingOutsideItsSlots) {
  const auto memory = std::make_shared<LocalAreas>(1);
  const TestNode from(1, 1, 5, 1, {.pages = memory});
  const Connected connected(from, from);
  RawPeer peer(connected.server->port(), "secret", connected.table.incarnation());
  const auto shown = peer.ask(Carry{kCarryCudaIpc, host_id()});
  ASSERT_TRUE(shown.ok() && std::holds_alternative<Carried>(*shown));
  const auto is_staged = [&](int32_t slot, int32_t count) {
    const auto reply = peer.ask(StageUnits{connected.lease, {UnitGroup::kBlocks, 0, count}, slot});
    EXPECT_TRUE(reply.ok()) << "the connection has ended";
    return reply.ok() && std::holds_alternative<Staged>(*reply);
  };
  EXPECT_TRUE(is_staged(kAreaSlots - 1, 5));
  for (const int32_t slot : {-1, kAreaSlots, 1 << 30}) EXPECT_FALSE(is_staged(slot, 1)) << slot;
  for (const int32_t count : {-1, 0, 6, kMaxSlotUnits + 1}) EXPECT_FALSE(is_staged(0, count)) << count;
  EXPECT_TRUE(is_staged(0, 1));
}

// Replies of a node that are there before they are asked for, to a reader that copies nothing.
class FakeNode final : public PageMemory {
 public:
  FakeNode() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    here_ = Socket(ends[0]);
    there_ = Socket(ends[1]);
    encode(StageUnits{}, 1, 0, 0, one_request_);
  }
  void reply(uint32_t number, const WireMessage& message) {
    std::vector<uint8_t> bytes;
    encode(message, number, 0, 0, bytes);
    CHECK(there_.send(bytes, 1).ok());
  }
  Status pull(int32_t count) {
    const PageStore store({{.memory = std::shared_ptr<PageMemory>(std::shared_ptr<void>(), this), .layout = layout}});
    const std::vector<Placement> blocks(static_cast<size_t>(count), Placement{PageId(0), 0});
    const auto reader = AreaReader::map(store, std::vector<uint8_t>(64));
    CHECK(reader.ok());
    uint32_t number = 0;
    return (*reader)->pull(FramedSocket(here_, 1), number, 1, {}, {UnitGroup::kBlocks, 0, count}, store,
                           {.blocks = blocks}, drop.get_token());
  }
  static Staged staged(int32_t count, uint8_t rank = 0) {
    const auto units = static_cast<size_t>(count);
    return {std::vector<uint64_t>(units), std::vector<uint8_t>(units, rank)};
  }

  Status gather(std::span<const UnitRun>, int64_t, std::span<uint8_t>) override { return {}; }
  Status scatter(std::span<const UnitRun>, int64_t, std::span<const uint8_t>) override { return {}; }
  Status poison(std::span<const UnitRun>, int64_t) override { return {}; }
  Result<std::unique_ptr<SharedArea>> map_area(const std::string&) override {
    return std::unique_ptr<SharedArea>(std::make_unique<Area>(*this));
  }

  const CacheLayout layout = {CacheGroup::latent(60, 512, 64, LatentFormat::kBF16)};
  int num_begun = 0, num_taken = 0;
  int num_before_drop = -1;  // the pull is dropped when so many slots were taken
  std::stop_source drop;

 private:
  class Area final : public SharedArea {
   public:
    explicit Area(FakeNode& node) : node_(node) {}
    std::string handle() const override { return ""; }
    void begin(int32_t slot, std::span<const UnitRun>, int64_t) override {
      EXPECT_EQ(slot, node_.num_begun++ % kAreaSlots);
      EXPECT_LE(node_.num_asked(), node_.num_taken + kAreaSlots) << "a slot is written while it is read";
    }
    Status wait(int32_t slot, std::span<uint64_t> digests) override {
      EXPECT_EQ(slot, node_.num_taken % kAreaSlots);
      EXPECT_LE(node_.num_asked(), node_.num_taken + kAreaSlots) << "a slot is written while it is read";
      if (++node_.num_taken == node_.num_before_drop) node_.drop.request_stop();
      std::fill(digests.begin(), digests.end(), 0);
      return {};
    }

   private:
    FakeNode& node_;
  };
  int num_asked() const {
    int bytes = 0;
    CHECK(ioctl(there_.fd(), FIONREAD, &bytes) == 0);
    return bytes / static_cast<int>(one_request_.size());
  }
  Socket here_, there_;
  std::vector<uint8_t> one_request_;
};

constexpr int32_t kUnitsOfASlot = 15;  // of FakeNode's layout

TEST(AreaReader, ASlotIsAskedForAgainWhenItsUnitsWereTaken) {
  for (const int32_t pieces : {1, 2, 4, 5, 11}) {
    FakeNode node;
    const int32_t count = pieces * kUnitsOfASlot - 1;
    for (int32_t i = 0; i < pieces; ++i)
      node.reply(static_cast<uint32_t>(i) + 1, FakeNode::staged(std::min(kUnitsOfASlot, count - i * kUnitsOfASlot)));
    const Status pulled = node.pull(count);
    EXPECT_TRUE(pulled.ok()) << pulled.error().message;
    EXPECT_EQ(node.num_taken, pieces);
  }
}

// It ends with the copy that is under way, however many slots there are to come.
TEST(AreaReader, APullThatIsDroppedTakesNoFurtherSlot) {
  FakeNode node;
  for (uint32_t number = 1; number <= 9; ++number) node.reply(number, FakeNode::staged(kUnitsOfASlot));
  node.num_before_drop = 3;
  EXPECT_EQ(node.pull(9 * kUnitsOfASlot).error().code, Code::kCancelled);
  EXPECT_EQ(node.num_taken, 4);
  EXPECT_EQ(node.num_taken, node.num_begun) << "no copy is left under way";
}

TEST(AreaReader, RepliesThatDoNotFitEndThePull) {
  constexpr int32_t kCount = 3 * kUnitsOfASlot;
  Staged unlike = FakeNode::staged(kUnitsOfASlot), short_of_ranks = unlike;
  unlike.digests[7] = 1;
  short_of_ranks.ranks.pop_back();
  const std::pair<WireMessage, const char*> faults[] = {{FakeNode::staged(kUnitsOfASlot, 1), "ranks"},
                                                        {FakeNode::staged(kUnitsOfASlot, 255), "ranks"},
                                                        {FakeNode::staged(kUnitsOfASlot - 1), "digests"},
                                                        {FakeNode::staged(kUnitsOfASlot + 1), "digests"},
                                                        {short_of_ranks, "digests"},
                                                        {unlike, "digest"},
                                                        {Done(), "type"}};
  for (const auto& [fault, field] : faults)
    for (const uint32_t at : {1, 2, 3}) {
      FakeNode node;
      for (uint32_t number = 1; number <= 3; ++number)
        node.reply(number, number == at ? fault : WireMessage(FakeNode::staged(kUnitsOfASlot)));
      const Status pulled = node.pull(kCount);
      ASSERT_FALSE(pulled.ok()) << field << " " << at;
      EXPECT_EQ(pulled.error().field, field) << at;
      EXPECT_EQ(node.num_taken, node.num_begun) << "no copy is left under way";
    }
  FakeNode node;
  node.reply(2, FakeNode::staged(kUnitsOfASlot));
  EXPECT_EQ(node.pull(kCount).error().field, "number");
}

// Nor does it take an area, not even for a moment in which a node of this host would find none.
TEST(AreaReader, AnotherHostIsShownNothing) {
  const auto memory = std::make_shared<LocalAreas>(1);
  const TestNode from(1, 1, 5, 1, {.pages = memory});
  const Connected connected(from, from);
  RawPeer peer(connected.server->port(), "secret", connected.table.incarnation());
  const auto is_shown = [&](const std::vector<uint8_t>& host) {
    const auto reply = peer.ask(Carry{kCarryCudaIpc, host});
    EXPECT_TRUE(reply.ok()) << "the connection has ended";
    return reply.ok() && std::holds_alternative<Carried>(*reply);
  };
  std::vector<uint8_t> longer = host_id();
  longer.push_back(0);
  for (const auto& other : {std::vector<uint8_t>{'o', 't', 'h', 'e', 'r'}, std::vector<uint8_t>{}, longer})
    EXPECT_FALSE(is_shown(other)) << other.size();
  EXPECT_EQ(memory->num_given, 0u);
  EXPECT_TRUE(is_shown(host_id()));
  EXPECT_EQ(memory->num_given, 1u);
}

}  // namespace
}  // namespace perigee
