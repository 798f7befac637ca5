// Two engines of one process, one of which computes prompts and the other their outputs, answer like one: whatever
// their tensor-parallel and dcp sizes, chunks, caches and preemptions.
#include <cstdio>
#include <filesystem>

#include "base/eventually.h"
#include "kv/lease_tag.h"
#include "kv/peer.h"
#include "pairwise.h"
#include "tasks.h"
#include "tensor/cuda/gpus.h"

namespace perigee {
namespace {

struct Sizes {
  int32_t tp = 1, dcp = 1;
};

EngineConfig of_sizes(EngineConfig config, Sizes sizes) {
  config.rank.size = sizes.tp;
  config.rank.limits.dcp_size = sizes.dcp;
  if (sizes.tp > 1) config.rank.layout = RankLayout::kTensorParallel;
  config.rank_timeouts.behind_s = 1e6;
  config.scheduling.prefix_caching = true;
  return config;
}

// A node that prefills, and one that takes from it.
struct Pair {
  std::unique_ptr<Engine> prefill, decode;

  Pair(EngineConfig p, EngineConfig d, const std::function<Connect(const Connect&)>& through = {}) {
    p.handover.gives = true;
    prefill = make_engine(p);
    d.handover.connect = connect_in_process(*prefill->leases());
    if (through) d.handover.connect = through(d.handover.connect);
    d.handover.on_failure = ImportEnd::kFail;
    decode = make_engine(d);
  }
  ~Pair() { decode.reset(); }  // it reads the other's memory

  // What a router asks for: one token of the prefill node, and what it is told passed on: at its end, or at once.
  std::vector<Reply> run(const std::vector<Job>& jobs, LeaseWish wish = LeaseWish::kAtEnd) const {
    Collector prefilled, decoded;
    std::mutex mutex;
    std::vector<std::optional<RemotePrefix>> leases(jobs.size());
    std::vector<bool> known(jobs.size());
    for (size_t i = 0; i < jobs.size(); ++i) {
      EngineRequest request = request_of(jobs[i]);
      request.sampling.max_tokens = 1;
      request.sampling.prompt_logprobs = -1;
      request.lease = wish;
      CHECK(prefill
                ->submit(request,
                         [&, i, sink = prefilled.sink(i)](OutputChunk&& chunk) {
                           {
                             const std::lock_guard lock(mutex);
                             if (chunk.lease) leases[i] = chunk.lease;
                             known[i] = known[i] || chunk.lease || chunk.finish;
                           }
                           if (!chunk.ids.empty() || chunk.finish) sink(std::move(chunk));
                         })
                .ok());
    }
    if (wish == LeaseWish::kAtEnd) prefilled.wait(jobs.size());
    for (size_t i = 0; i < jobs.size(); ++i) {
      CHECK(eventually([&] {
        const std::lock_guard lock(mutex);
        return known[i];
      }));
      EngineRequest request = request_of(jobs[i]);
      const bool leased = static_cast<int64_t>(jobs[i].prompt.size()) > kBlockTokens;
      EXPECT_EQ(leases[i].has_value(), leased) << "job " << i;
      request.remote = leases[i];
      CHECK(decode->submit(request, decoded.sink(i)).ok());
    }
    if (wish != LeaseWish::kAtEnd) prefilled.wait(jobs.size());
    return decoded.wait(jobs.size());
  }
  bool all_released() const {
    return eventually([&] { return prefill->leases()->counts().held == 0 && prefill->stats().scheduler.leases == 0; });
  }
};

// Where a draft's cache lies (ADR 0030): in the blocks, beside them, and by head.
struct Draft {
  const char* name;
  const char* folder;  // after the model's
  std::optional<LatentFormat> cache = {};
  Eagle3::Layer p = Eagle3::Layer::kDivided, d = p;
};
std::vector<Draft> drafts_of(const TestModel& model) {
  std::vector<Draft> out = {{"latents", "-eagle3-mla"}, {"latents in fp8", "-eagle3-mla", LatentFormat::kF8E4M3}};
  if (!std::filesystem::exists(model.folder + "-eagle3")) return out;
  out.push_back({"heads", "-eagle3"});
  out.push_back(
      {"heads to whole, bf16", "-eagle3", LatentFormat::kBF16, Eagle3::Layer::kDivided, Eagle3::Layer::kWhole});
  return out;
}

struct Setting {
  Sizes p, d;
  size_t cache = 0;  // of kCaches
  bool chunked = false, cached = false, crowded = false, early = false;
  std::optional<Draft> draft = {};
};

// A GPU has one rank.
std::vector<Setting> settings(const TestModel& model) {
  constexpr std::array<Sizes, 4> kSizes = {{{1, 1}, {2, 1}, {2, 2}, {4, 2}}};
  const auto fits = [num_gpus = model.device == Device::kCuda ? std::ssize(list_gpus()) : 8](Sizes sizes) {
    return sizes.tp <= num_gpus;
  };
  const auto num_sizes = static_cast<int>(std::count_if(kSizes.begin(), kSizes.end(), fits));  // the first ones
  const std::vector<Draft> drafts = drafts_of(model);
  const std::vector<int> factors = {num_sizes, num_sizes, kCaches.size(), 2, 2, 2, static_cast<int>(drafts.size()) + 1,
                                    2};
  std::vector<Setting> out;
  for (const Combination& c : soak_requested() ? full_product(factors) : pairwise_cover(factors))
    out.push_back({.p = kSizes[static_cast<size_t>(c[0])],
                   .d = kSizes[static_cast<size_t>(c[1])],
                   .cache = static_cast<size_t>(c[2]),
                   .chunked = c[3] != 0,
                   .cached = c[4] != 0,
                   .crowded = c[5] != 0,
                   .early = c[7] != 0,
                   .draft = c[6] == 0 ? std::nullopt : std::optional(drafts[static_cast<size_t>(c[6] - 1)])});
  return out;
}

class HandoverEquality : public testing::TestWithParam<TestModel> {
 protected:
  EngineConfig config_ = base_config(GetParam());
};

// Prompts of three and of four blocks less four tokens, some of them twice.
std::vector<Job> prompts_of(std::vector<Job> jobs) {
  size_t turn = 0;
  for (Job& job : jobs) {
    const size_t length = (3 + turn++ % 2) * kBlockTokens - 4;
    CHECK(job.prompt.size() >= length, "a task of ", job.prompt.size(), " tokens");
    job.prompt.erase(job.prompt.begin(), job.prompt.end() - static_cast<std::ptrdiff_t>(length));
    job.max_tokens = soak_requested() ? 48 : 12;
  }
  return jobs;
}

int32_t num_preemptions(const std::vector<Reply>& replies) {
  int32_t sum = 0;
  for (const Reply& reply : replies) sum += reply.preemptions.back();
  return sum;
}

bool is_imported(const Reply& reply) {
  return reply.cached >= 2 * kBlockTokens;
}

// Replies whose sequence began with all of its prompt but one token.
int64_t num_from_tails(const std::vector<Job>& jobs, const std::vector<Reply>& replies) {
  int64_t count = 0;
  for (size_t i = 0; i < jobs.size(); ++i) count += replies[i].cached + 1 == std::ssize(jobs[i].prompt) ? 1 : 0;
  return count;
}

TEST_P(HandoverEquality, TaskRepliesUpToTies) {
  std::array<std::unique_ptr<Engine>, kCaches.size()> ones;  // by cache
  std::array<std::vector<Reply>, kCaches.size()> wanted;
  std::vector<Job> jobs;
  for (size_t cache = 0; cache < kCaches.size(); ++cache) {
    config_.rank.load.cache = kCaches[cache];
    ones[cache] = make_engine(config_);
    if (jobs.empty()) jobs = prompts_of(task_jobs(GetParam(), *ones[cache], num_jobs(4, 24)));
    wanted[cache] = run(*ones[cache], jobs, true);
  }
  for (const Setting& setting : settings(GetParam())) {
    EngineConfig config = config_;
    if (setting.draft) {  // whose cache is handed over, too
      config.rank.limits.num_drafts = 3;
      config.rank.draft_model = GetParam().folder + setting.draft->folder;
      config.rank.draft_cache = setting.draft->cache;
    }
    config.rank.load.cache = kCaches[setting.cache];
    config.rank.limits.max_step_tokens = setting.chunked ? GetParam().budgets[1] : 2048;
    EngineConfig prefill = of_sizes(config, setting.p), decode = of_sizes(config, setting.d);
    if (setting.draft) prefill.rank.draft_layer = setting.draft->p;
    if (setting.draft) decode.rank.draft_layer = setting.draft->d;
    if (setting.crowded && setting.draft) {  // whose pages are larger
      const auto like = make_engine(decode);
      decode.rank.cache_bytes =
          (decode.rank.cache_bytes / like->num_pages() + 1) * (8 / setting.d.dcp + 2 * int64_t{like->state_pages()});
      decode.scheduling.max_model_len = 5 * kBlockTokens;
    } else if (setting.crowded) {
      decode = with_cache_of(decode, *ones[setting.cache], 8);
    }
    const std::string what =
        str_cat("P tp ", setting.p.tp, " dcp ", setting.p.dcp, ", D tp ", setting.d.tp, " dcp ", setting.d.dcp, ", ",
                latent_format_name(kCaches[setting.cache]), setting.chunked ? ", chunked" : "",
                setting.cached ? ", cached" : "", setting.crowded ? ", crowded" : "",
                setting.draft ? str_cat(", drafts of ", setting.draft->name) : "", setting.early ? ", early" : "");
    const LeaseWish wish = setting.early ? LeaseWish::kFromStart : LeaseWish::kAtEnd;
    SCOPED_TRACE(what);
    const Pair pair(prefill, decode);
    std::vector<Reply> replies = pair.run(jobs, wish);
    const SchedulerGauges gauges = pair.decode->stats().scheduler;
    EXPECT_GT(gauges.imported_blocks, 0);
    EXPECT_EQ(gauges.failed_imports, 0);
    EXPECT_EQ(gauges.speculation.accepted() > 0, setting.draft.has_value());
    if (setting.cached) replies = pair.run(jobs, wish);
    if (!setting.crowded) {
      EXPECT_TRUE(setting.cached || std::all_of(replies.begin(), replies.end(), is_imported));
      EXPECT_EQ(num_from_tails(jobs, replies) > 0, !setting.cached);
      EXPECT_EQ(pair.decode->stats().scheduler.imported_blocks, gauges.imported_blocks) << "a hit was sent again";
    }
    std::printf("%d preemptions; ", num_preemptions(replies));
    print(what.c_str(), jobs, compare(*ones[setting.cache], jobs, wanted[setting.cache], replies));
    EXPECT_TRUE(pair.all_released());
  }
}

// Replies would be the same with any drafts: what has travelled shows in how many are accepted.
TEST_P(HandoverEquality, DraftsAreAcceptedAsOnOneNode) {
  if (GetParam().device == Device::kCuda) GTEST_SKIP() << "sizes are of several ranks";
  for (const Draft& draft : drafts_of(GetParam())) {
    EngineConfig config = config_;
    config.rank.limits.num_drafts = 3;
    config.rank.draft_model = GetParam().folder + draft.folder;
    config.rank.load.cache = LatentFormat::kBF16;
    config.rank.draft_cache = draft.cache;
    const auto one = make_engine(config);
    std::vector<Job> jobs = prompts_of(task_jobs(GetParam(), *one, 4));
    for (Job& job : jobs) job.max_tokens = 48;
    run(*one, jobs, true);
    const int64_t wanted = one->stats().scheduler.speculation.accepted();
    for (const auto& [p, d] : {std::pair<Sizes, Sizes>{{1, 1}, {1, 1}}, {{2, 1}, {4, 2}}, {{2, 2}, {1, 1}}}) {
      SCOPED_TRACE(str_cat(draft.name, ", P tp ", p.tp, " dcp ", p.dcp, ", D tp ", d.tp, " dcp ", d.dcp));
      EngineConfig prefill = of_sizes(config, p), decode = of_sizes(config, d);
      prefill.rank.draft_layer = draft.p;
      decode.rank.draft_layer = draft.d;
      const Pair pair(prefill, decode);
      pair.run(jobs, LeaseWish::kFromStart);
      const SchedulerGauges gauges = pair.decode->stats().scheduler;
      EXPECT_EQ(gauges.failed_imports, 0);
      std::printf("%s: %d accepted, %d on one node\n", draft.name, static_cast<int>(gauges.speculation.accepted()),
                  static_cast<int>(wanted));
      EXPECT_NEAR(static_cast<double>(gauges.speculation.accepted()), static_cast<double>(wanted),
                  0.02 * static_cast<double>(wanted));
    }
  }
}

// On nodes of one layout, in deterministic mode, bit for bit.
TEST_P(HandoverEquality, DeterministicBits) {
  for (const Sizes sizes : {Sizes{1, 1}, Sizes{2, 2}}) {
    if (GetParam().device == Device::kCuda && std::ssize(list_gpus()) < sizes.tp) continue;
    SCOPED_TRACE(str_cat("tp ", sizes.tp, ", dcp ", sizes.dcp));
    EngineConfig config = of_sizes(config_, sizes);
    config.rank.limits.deterministic = true;
    config.rank.limits.max_step_tokens = 256;
    const auto one = make_engine(config);
    const std::vector<Job> jobs = prompts_of(task_jobs(GetParam(), *one, 3));
    const std::vector<Reply> wanted = run(*one, jobs, true);
    const Pair pair(config, config);
    const std::vector<Reply> replies = pair.run(jobs, LeaseWish::kFromStart);
    EXPECT_GT(pair.decode->stats().scheduler.imported_blocks, 0);
    for (size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(replies[i].error, "");
      EXPECT_EQ(replies[i].ids, wanted[i].ids);
      EXPECT_TRUE(replies[i].logprobs == wanted[i].logprobs);
    }
  }
}

// Each way in which a lease is not what the request says ends in an error, or in the same reply computed anew.
TEST_P(HandoverEquality, WhatIsNotTheSameIsNotRead) {
  const Pair pair(of_sizes(config_, {1, 1}), of_sizes(config_, {1, 1}));
  const std::vector<Job> jobs = prompts_of(task_jobs(GetParam(), *pair.prefill, 2));
  const std::vector<Reply> wanted = run(*make_engine(config_), jobs, false);
  const auto lease_of = [&](const Job& job) {
    std::optional<RemotePrefix> lease;
    EngineRequest request = request_of(job);
    request.sampling.max_tokens = 1;
    request.lease = LeaseWish::kAtEnd;
    Collector done;
    CHECK(pair.prefill
              ->submit(request,
                       [&, sink = done.sink(0)](OutputChunk&& chunk) {
                         if (chunk.finish) lease = chunk.lease;
                         sink(std::move(chunk));
                       })
              .ok());
    done.wait(1);
    CHECK(lease.has_value());
    return *lease;
  };
  auto reply_with = [&, turn = 0](RemotePrefix remote) mutable {
    EngineRequest request = request_of(jobs[0]);
    request.cache_salt = str_cat(turn++);  // nothing is cached here
    remote.tag = lease_tag("", remote);
    request.remote = remote;
    Collector done;
    CHECK(pair.decode->submit(request, done.sink(0)).ok());
    return done.wait(1)[0];
  };
  EngineRequest too_long = request_of(jobs[0]);
  too_long.sampling.max_tokens = 1 << 30;
  too_long.remote = lease_of(jobs[0]);
  EXPECT_EQ(pair.decode->submit(too_long, {}).error().field, "max_tokens");
  EXPECT_TRUE(eventually([&] { return pair.prefill->leases()->counts().held == 0; }));
  EXPECT_EQ(pair.prefill->leases()->counts().released, 1) << "nobody will read it, so it ends before its time";

  RemotePrefix other = lease_of(jobs[1]);
  other.num_blocks = 2;
  EXPECT_NE(reply_with(other).error.find("the lease"), std::string::npos) << "of other tokens, or too few blocks";
  RemotePrefix restarted = lease_of(jobs[0]);
  ++restarted.lease.incarnation;
  EXPECT_NE(reply_with(restarted).error.find("the lease is over"), std::string::npos);
  RemotePrefix good = lease_of(jobs[0]);
  EXPECT_EQ(reply_with(good).ids, wanted[0].ids);
  EXPECT_NE(reply_with(good).error.find("the lease is over"), std::string::npos) << "it was let go";

  EngineRequest request = request_of(jobs[0]);
  request.remote = good;
  request.remote->peer = "elsewhere:5600";
  EXPECT_NE(pair.decode->submit(request, {}).error().message.find("remote_tag does not fit:"), std::string::npos);
  request.remote->num_blocks = 100;
  request.remote->tag = lease_tag("", *request.remote);
  EXPECT_NE(pair.decode->submit(request, {}).error().message.find("100 blocks"), std::string::npos);
  EXPECT_FALSE(pair.prefill->submit(request, {}).ok()) << "it takes nothing";
}

// A peer that opens no lease before it may.
class SlowPeer final : public Peer {
 public:
  SlowPeer(std::unique_ptr<Peer> peer, const std::atomic<bool>& may_open)
      : peer_(std::move(peer)), may_open_(may_open) {}
  Result<LeaseHold> open(const LeaseName& lease, std::span<const int32_t> tokens, int32_t num_blocks) override {
    CHECK(eventually([&] { return may_open_.load(); }), "nobody lets it open");
    return peer_->open(lease, tokens, num_blocks);
  }
  Status read(const LeaseName& lease, UnitRange units, std::span<uint8_t> out) override {
    return peer_->read(lease, units, out);
  }
  Result<LeaseHold> extend(const LeaseName& lease) override { return peer_->extend(lease); }
  Result<uint64_t> await_growth(uint64_t known, double wait_s) override { return peer_->await_growth(known, wait_s); }
  Status release(const LeaseName& lease) override { return peer_->release(lease); }

 private:
  const std::unique_ptr<Peer> peer_;
  const std::atomic<bool>& may_open_;
};

TEST_P(HandoverEquality, WhoWaitsForAnotherNodeIsNotStuck) {
  std::atomic<bool> may_open{false};
  const auto slowly = [&may_open](const Connect& connect) -> Connect {
    return [&may_open, connect](const std::string& peer, const CacheShape& here,
                                const std::stop_token& stop) -> Result<std::unique_ptr<Peer>> {
      ASSIGN_OR_RETURN(std::unique_ptr<Peer> reached, connect(peer, here, stop));
      return std::unique_ptr<Peer>(std::make_unique<SlowPeer>(std::move(reached), may_open));
    };
  };
  const Pair pair(of_sizes(config_, {1, 1}), of_sizes(config_, {1, 1}), slowly);
  const std::vector<Job> jobs = prompts_of(task_jobs(GetParam(), *pair.prefill, 1));
  std::thread waits([&] {
    const auto is_waited_for = [](const Engine& engine) {
      const EngineStats stats = engine.stats();
      return stats.scheduler.awaiting + stats.scheduler.leases > 0;
    };
    EXPECT_TRUE(eventually([&] { return is_waited_for(*pair.decode) && is_waited_for(*pair.prefill); }));
    const double since_s = system_clock().now_s();
    EXPECT_TRUE(eventually([&] {
      const double waited_s = system_clock().now_s() - since_s;
      return waited_s > 1 && pair.decode->stats().stalled_s < waited_s / 2;
    })) << "the engine counts as stuck";
    may_open = true;
  });
  const std::vector<Reply> replies = pair.run(jobs);
  waits.join();
  EXPECT_EQ(replies[0].error, "");
}

INSTANTIATE_TEST_SUITE_P(, HandoverEquality, testing::ValuesIn(on_all_devices()), name_of);

}  // namespace
}  // namespace perigee
