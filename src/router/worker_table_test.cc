#include "router/worker_table.h"

#include <gtest/gtest.h>

#include <map>

#include "base/manual_clock.h"
#include "router/prefix_map.h"

namespace perigee {
namespace {

class Workers : public testing::Test {
 protected:
  void make(PolicyKind kind, int count, Role role = Role::kPlain) {
    config_.plain.kind = config_.prefill.kind = config_.decode.kind = kind;
    table_ = std::make_shared<WorkerTable>(config_, clock_);
    for (int i = 0; i < count; ++i) EXPECT_TRUE(table_->add("http://w" + std::to_string(i), role).ok());
    for (const WorkerView& worker : table_->list()) {
      table_->set_address(worker.id, {.size = 16});
      table_->report(worker.id, ProbeResult::kReady);
    }
  }
  std::shared_ptr<WorkerTable::Lease> pick(const PrefixBlocks& prompt = {}) {
    return table_->pick(Role::kPlain, prompt, {});
  }
  std::string url_of(uint64_t id) {
    for (const WorkerView& worker : table_->list())
      if (worker.id == id) return worker.url.text;
    return "";
  }
  std::string state_of(const std::string& url) {
    for (const WorkerView& worker : table_->list())
      if (worker.url.text == url) return worker.state;
    return "none";
  }

  TableConfig config_;
  ManualClock clock_;
  std::shared_ptr<WorkerTable> table_;
};

TEST_F(Workers, RoundRobinGivesEachItsTurnWhoeverComesAndGoes) {
  make(PolicyKind::kRoundRobin, 3);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 6; ++i) ids.push_back(pick()->worker());
  EXPECT_EQ(ids, (std::vector<uint64_t>{1, 2, 3, 1, 2, 3}));
  table_->drain("http://w1/");
  EXPECT_EQ(pick()->worker(), 1u);
  EXPECT_EQ(pick()->worker(), 3u);
}

TEST_F(Workers, PowerOfTwoPrefersFewerOpenRequests) {
  make(PolicyKind::kPowerOfTwo, 2);
  std::vector<std::shared_ptr<WorkerTable::Lease>> leases;
  std::map<uint64_t, int> counts;
  for (int i = 0; i < 20; ++i) {
    leases.push_back(pick());
    ++counts[leases.back()->worker()];
  }
  EXPECT_EQ(counts[1], 10);
  EXPECT_EQ(counts[2], 10);
}

TEST_F(Workers, CacheAwareFollowsThePrefixUntilTheWorkerIsOverloaded) {
  config_.plain.balance_abs_threshold = 4;
  make(PolicyKind::kCacheAware, 3);
  const PrefixBlocks prompt = prefix_blocks(std::string(20 * kPrefixBlockBytes, 'a'));
  const PrefixBlocks other = prefix_blocks(std::string(20 * kPrefixBlockBytes, 'b'));
  PrefixBlocks longer = prompt;
  longer.push_back(1);
  const uint64_t first = pick(prompt)->worker();
  EXPECT_NE(pick(other)->worker(), first);
  std::vector<std::shared_ptr<WorkerTable::Lease>> leases;
  for (int i = 0; i < 5; ++i) {
    leases.push_back(pick(longer));
    EXPECT_EQ(leases.back()->worker(), first);
  }
  EXPECT_NE(pick(longer)->worker(), first);
}

TEST(PrefixMap, KnowsBeginningsInBoundedMemory) {
  PrefixMap map(64);
  const PrefixBlocks prompt = prefix_blocks(std::string(10 * kPrefixBlockBytes + 5, 'x'));
  ASSERT_EQ(prompt.size(), 10u);
  PrefixBlocks fork(prompt.begin(), prompt.begin() + 4);
  fork.resize(9, 77);
  map.remember(prompt, 1);
  EXPECT_EQ(map.known_blocks(prompt, 1), 10u);
  EXPECT_EQ(map.known_blocks(fork, 1), 4u);
  EXPECT_EQ(map.known_blocks(prompt, 2), 0u);
  for (uint64_t i = 0; i < 1000; ++i) {
    map.remember({i * 7 + 1000}, 3);
    EXPECT_LE(map.pairs(), 64u);
  }
  EXPECT_EQ(map.known_blocks(prompt, 1), 0u);
}

TEST_F(Workers, TriedAndDrainedOnesAreNotPicked) {
  make(PolicyKind::kRandom, 3);
  EXPECT_EQ(table_->pick(Role::kPlain, {}, {1, 3})->worker(), 2u);
  EXPECT_EQ(table_->pick(Role::kPlain, {}, {1, 2, 3}), nullptr);
  EXPECT_FALSE(table_->takes_requests(Role::kPlain, {1, 2, 3}));
  EXPECT_EQ(table_->pick(Role::kDecode, {}, {}), nullptr);
}

TEST_F(Workers, OneThatIsRemovedGoesWithItsLastRequest) {
  make(PolicyKind::kRoundRobin, 2);
  auto lease = pick();
  ASSERT_EQ(url_of(lease->worker()), "http://w0");
  EXPECT_TRUE(table_->remove("http://w0"));
  EXPECT_EQ(state_of("http://w0"), "draining");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(pick()->worker(), 2u);
  lease->end(Outcome::kGood);
  EXPECT_EQ(state_of("http://w0"), "none");
  EXPECT_FALSE(table_->remove("http://w0"));
  EXPECT_TRUE(table_->add("http://w0", Role::kPlain).ok());
  EXPECT_FALSE(table_->add("http://w0/", Role::kPlain).ok());
  EXPECT_EQ(state_of("http://w0"), "starting");
}

TEST_F(Workers, AreLostAfterSilenceAndBackAfterAnswers) {
  make(PolicyKind::kRoundRobin, 1);
  for (int i = 0; i < 2; ++i) table_->report(1, ProbeResult::kNoAnswer);
  EXPECT_EQ(state_of("http://w0"), "ready");
  table_->report(1, ProbeResult::kNoAnswer);
  EXPECT_EQ(state_of("http://w0"), "lost");
  EXPECT_EQ(pick(), nullptr);
  table_->report(1, ProbeResult::kReady);
  EXPECT_EQ(pick(), nullptr);
  table_->report(1, ProbeResult::kReady);
  EXPECT_NE(pick(), nullptr);
  table_->report(1, ProbeResult::kNotReady);
  EXPECT_EQ(state_of("http://w0"), "not_ready");
  EXPECT_EQ(pick(), nullptr);
  table_->report(1, ProbeResult::kReady);
  EXPECT_NE(pick(), nullptr);
}

TEST_F(Workers, ABreakerOpensWaitsTriesAndCloses) {
  config_.breaker = {.failures = 3, .successes = 2, .open_s = 30, .window_s = 60};
  make(PolicyKind::kRoundRobin, 1);
  for (const double pause_s : {61.0, 1.0, 1.0}) {
    ASSERT_NE(pick(), nullptr);
    pick()->end(Outcome::kBad);
    clock_.advance(pause_s);
  }
  ASSERT_NE(pick(), nullptr) << "the first failure is older than the window";
  auto old = pick();
  pick()->end(Outcome::kBad);
  EXPECT_EQ(pick(), nullptr);
  old->end(Outcome::kBad);  // sent before it opened
  clock_.advance(29);
  EXPECT_EQ(pick(), nullptr);
  clock_.advance(1);
  auto trial = pick();
  ASSERT_NE(trial, nullptr);
  EXPECT_EQ(pick(), nullptr) << "one trial at a time";
  trial->end(Outcome::kBad);
  EXPECT_EQ(pick(), nullptr);
  clock_.advance(30);
  pick()->end(Outcome::kUnknown);
  pick()->end(Outcome::kGood);
  EXPECT_EQ(std::string(table_->list()[0].breaker), "half_open");
  pick()->end(Outcome::kGood);
  EXPECT_EQ(std::string(table_->list()[0].breaker), "closed");
  auto one = pick(), two = pick();
  EXPECT_TRUE(one && two);
  EXPECT_EQ(table_->list()[0].open_requests, 2);
}

TEST(WorkerUrl, IsReadOrRefusedByName) {
  const auto url = parse_worker_url("http://[::1]:8100/base/");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->host, "::1");
  EXPECT_EQ(url->port, "8100");
  EXPECT_EQ(url->authority, "[::1]:8100");
  EXPECT_EQ(url->path, "/base");
  EXPECT_EQ(url->text, "http://[::1]:8100/base");
  EXPECT_EQ(parse_worker_url("http://host")->port, "80");
  for (const char* text : {"https://a", "a:80", "http://", "http://:80", "http://a:0", "http://a:x", "http://a:99999",
                           "http://a b", "http://[::1", "http://a/\r\nX: y", "http://u@h", "http://a?x"})
    EXPECT_FALSE(parse_worker_url(text).ok()) << text;
}

}  // namespace
}  // namespace perigee
