#include "sim/pd/simulation.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "sim/chain_constraint.h"
#include "sim/pd/client.h"

namespace perigee::sim {
namespace {

constexpr int32_t kNumRequests = 64;
constexpr double kLeaseS = 2.0, kLongestS = 400.0;

// A node that does both is two workers of the router, by two paths.
std::string url_of(int process, Role role) {
  return str_cat("http://127.0.0.1:", process, role == Role::kPrefill ? "/p" : "/d");
}

SocketAddress address_of(int process) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(process));
  SocketAddress address;
  std::memcpy(&address.storage, &to, sizeof to);
  address.size = sizeof to;
  return address;
}

int32_t shared_token(uint64_t stream, int32_t position) {
  return static_cast<int32_t>(random_u64(stream + 77, static_cast<uint64_t>(position)) % kVocabulary);
}

}  // namespace

PdSimulation::PdSimulation(uint64_t seed, bool tracing) : world_(seed, 8) {
  world_.tracing = tracing;
  Rng& rng = world_.rng;
  if (seed % 4 != 0) {
    faults_ = {.weather = rng.chance(0.7),
               .leaves = rng.chance(0.6),
               .cuts = rng.chance(0.4),
               .lies = rng.chance(0.4),
               .parts = rng.chance(0.4),
               .stops = rng.chance(0.4),
               .kills = rng.chance(0.5)};
    if (faults_.quiet()) faults_.weather = true;
  }
  draw_model();
  const int num_prefill = static_cast<int>(rng.between(1, 2)), num_decode = 2;
  const bool both = rng.chance(0.25);
  num_nodes_ = num_prefill + num_decode;
  setups_.resize(static_cast<size_t>(num_nodes_) + 1);
  nodes_.resize(setups_.size());
  http_doors().assign(setups_.size(), nullptr);
  http_calls().clear();
  TableConfig table;
  constexpr PolicyKind kPolicies[] = {PolicyKind::kRoundRobin, PolicyKind::kRandom, PolicyKind::kPowerOfTwo,
                                      PolicyKind::kCacheAware};
  table.prefill.kind = kPolicies[rng.below(4)];
  table.decode.kind = kPolicies[rng.below(4)];
  table.prefill.seed = table.decode.seed = seed;
  table.breaker = {.failures = 5, .successes = 1, .open_s = 1, .window_s = 10};
  table_ = std::make_shared<WorkerTable>(table, system_clock());
  ForwardConfig flow{.split = true, .max_retries = 3, .times = {.connect_s = 1, .silence_s = 15, .write_s = 5}};
  if (faults_.quiet()) flow.times.silence_s = 100;  // small caches are slow
  shared_ = std::make_shared<ForwardShared>(flow, table_);
  for (int process = 1; process <= num_nodes_; ++process) {
    const bool gives = both || process <= num_prefill, takes = both || process > num_prefill;
    setups_[static_cast<size_t>(process)] = draw_node(process, gives, takes);
    start_node(process);
    const bool added = (!gives || table_->add(url_of(process, Role::kPrefill), Role::kPrefill).ok()) &&
                       (!takes || table_->add(url_of(process, Role::kDecode), Role::kDecode).ok());
    world_.judge.require(added, "a worker is refused");
  }
  world_.on_touch = [this](int process, const void* page) {
    if (const Node* node = nodes_[static_cast<size_t>(process)].get()) node->check_touch(page);
  };
  num_to_begin_ = kNumRequests;
}

PdSimulation::~PdSimulation() = default;

void PdSimulation::draw_model() {
  Rng& rng = world_.rng;
  state_units_ = rng.chance(0.5) ? 4 : 0;
  model_.deterministic = rng.chance(0.3);
  constexpr int32_t kAlignments[] = {1, 16, 64, 128};
  model_.attention_alignment = kAlignments[rng.below(4)];
  model_.max_model_len = static_cast<int32_t>(rng.between(250, 450));
  model_.admission_reserve = rng.chance(0.5) ? nullptr : reserve_page_each;
}

// A layout of its own: dcp indices, pages, budget, slots, drafts.
NodeSetup PdSimulation::draw_node(int process, bool gives, bool takes) {
  Rng& rng = world_.rng;
  NodeSetup setup{.process = process, .state_units = state_units_};
  SchedulerConfig& config = setup.config;
  config = model_;
  config.dcp_size = 1 << rng.below(3);
  config.max_sequences = static_cast<int32_t>(rng.between(3, 16));
  const int32_t num_blocks = static_cast<int32_t>(rng.between(8, rng.chance(0.6) ? 16 : 40));
  config.num_pages = (num_blocks + config.dcp_size - 1) / config.dcp_size;
  if (state_units_ > 0) {
    config.state_pages = static_cast<int32_t>(state_units_) / config.dcp_size;
    config.num_pages += config.state_pages * static_cast<int32_t>(rng.between(6, 14));
    constexpr int32_t kIntervals[] = {0, 1, 2, 64};
    config.checkpoint_interval_blocks = kIntervals[rng.below(4)];
    config.checkpoint_rolling_blocks = static_cast<int32_t>(rng.below(3));
  }
  config.num_pages = std::min(config.num_pages, 128 / config.dcp_size);
  config.max_step_tokens = static_cast<int32_t>(config.attention_alignment + rng.between(40, 300));
  config.hash_seed = rng.next();
  config.hash_bits = rng.chance(0.2) ? 4 : 128;
  config.num_drafts = rng.chance(0.4) ? static_cast<int32_t>(rng.between(1, kMaxDrafts)) : 0;
  setup.handover.secret = "secret";
  setup.handover.gives = gives;
  if (gives) setup.handover.listens = {.host = "node"};
  if (takes)
    setup.handover.connect = connect_by_tcp({.secret = "secret",
                                             .handshake_s = 0.5,
                                             .silence_s = 1.0,
                                             .streams = static_cast<int32_t>(rng.between(1, 3)),
                                             .piece_bytes = 1});
  setup.handover.on_failure = rng.chance(0.6) ? ImportEnd::kRecompute : ImportEnd::kFail;
  setup.handover.lease_s = kLeaseS;
  setup.handover.piece_bytes = rng.between(1, 4) * kBlockTokens * static_cast<int64_t>(sizeof(uint64_t));
  setup.queue_length = static_cast<int32_t>(faults_.quiet() || rng.chance(0.7) ? 200 : rng.between(2, 10));
  setup.lie_chance = faults_.lies ? 0.1 : 0;
  setup.announces = rng.chance(0.8);
  if (takes && !faults_.quiet() && rng.chance(0.03)) setup.model = "another";
  return setup;
}

void PdSimulation::start_node(int process) {
  Rng& rng = world_.rng;
  const auto index = static_cast<size_t>(process);
  world_.set_clock(process, rng.unit() * 1e6, 0.95 + 0.1 * rng.unit());
  (void)world_.start(process);
  NodeSetup& setup = setups_[index];
  setup.handover.incarnation = rng.next() | 1;
  nodes_[index] = std::make_unique<Node>(world_, setup);
}

// What the router's probes find (src/router/health_checks.cc needs sockets).
void PdSimulation::ask_health() {
  for (const WorkerView& worker : table_->list()) {
    const int process = std::atoi(worker.url.port.c_str());
    const bool answers = world_.alive(process) && world_.stopped_until_s(process) <= world_.time_s() &&
                         world_.passes_at_s(0, process) <= world_.time_s();
    table_->set_address(worker.id, address_of(process));
    table_->report(worker.id, answers ? ProbeResult::kReady : ProbeResult::kNoAnswer);
  }
  world_.after(0.25, [this] { ask_health(); });
}

// A shared stream or a former prompt up to some point, then tokens of its own.
std::shared_ptr<const std::vector<int32_t>> PdSimulation::draw_prompt() {
  Rng& rng = world_.rng;
  const auto longest = std::min(model_.max_model_len - 90, 330);
  const auto length = static_cast<int32_t>(rng.chance(0.15) ? rng.between(1, 63) : rng.between(64, longest));
  if (!prompts_.empty() && rng.chance(0.1)) return prompts_[rng.below(prompts_.size())];
  auto prompt = std::make_shared<std::vector<int32_t>>();
  const uint64_t stream = rng.below(4);
  const int64_t shared = rng.chance(0.6) ? rng.between(0, length) : 0;
  for (int32_t i = 0; i < length; ++i)
    prompt->push_back(i < shared ? shared_token(stream, i) : static_cast<int32_t>(rng.below(kVocabulary)));
  return prompt;
}

void PdSimulation::begin_request() {
  Rng& rng = world_.rng;
  const auto prompt = draw_prompt();
  prompts_.push_back(prompt);
  SamplingParams sampling;
  sampling.max_tokens = static_cast<int32_t>(rng.between(1, rng.chance(0.3) ? 90 : 24));
  sampling.seed = rng.next();
  if (rng.chance(0.3)) sampling.stop_ids = {static_cast<int32_t>(rng.below(kVocabulary))};
  const ChainConstraint constraint(sampling.seed);
  const bool constrained = rng.chance(0.2);
  const bool hurries = !faults_.quiet() && !world_.calm && rng.chance(0.05);
  std::string body = "{\"prompt\":[";
  for (const int32_t id : *prompt) body += (body.back() == '[' ? "" : ",") + std::to_string(id);
  body += str_cat("],\"max_tokens\":", sampling.max_tokens, ",\"seed\":\"", sampling.seed, "\"");
  if (!sampling.stop_ids.empty()) body += str_cat(",\"stop_token_ids\":[", sampling.stop_ids[0], "]");
  if (rng.chance(0.3)) body += ",\"cache_salt\":\"a\"";
  if (constrained) body += ",\"constrained\":true";
  if (rng.chance(0.7)) body += ",\"stream\":true";
  if (hurries) body += str_cat(",\"timeout_ms\":", rng.between(50, 2000));
  body += "}";
  Expected expected = run_alone(*prompt, sampling, sampling.max_tokens, static_cast<int32_t>(state_units_),
                                constrained ? &constraint : nullptr);
  const bool misfit = std::any_of(setups_.begin(), setups_.end(), [](const auto& of) { return of.model != "chain"; });
  const bool may_fail = !faults_.quiet() && (!world_.calm || misfit);
  const auto number = static_cast<int>(clients_.size());
  auto client = std::make_shared<Client>(world_, number, std::move(expected), may_fail);
  clients_.push_back(client);
  world_.trace("client ", number, " asks: ", prompt->size(), " tokens");
  world_.count("a client: asks");
  HttpRequest request{.method = "POST", .path = "/v1/completions", .body = std::move(body)};
  forward(shared_, idle_, client, std::move(request), "request-" + std::to_string(number));
  if (faults_.leaves && !world_.calm && rng.chance(0.2)) world_.after(rng.unit() * 2, [client] { client->leave(); });
}

// As by SIGTERM: what it lends and takes ends in order, and then its connections do.
void PdSimulation::end_node(int process) {
  world_.count("a process ended");
  const auto index = static_cast<size_t>(process);
  take_counts(*nodes_[index]);
  nodes_[index]->die(true);
  reap(std::move(nodes_[index]), process, [this, process] {
    world_.kill(process, true);
    world_.after(0.2 + world_.rng.unit(), [this, process] { start_node(process); });
  });
}

void PdSimulation::kill(int process) {
  const bool heard = world_.rng.chance(0.6);
  world_.count(heard ? "a process died" : "a process died unheard");
  const auto index = static_cast<size_t>(process);
  take_counts(*nodes_[index]);
  nodes_[index]->die(heard);
  world_.kill(process, heard);
  reap(std::move(nodes_[index]), process, [] {});
  world_.after(0.2 + 3 * world_.rng.unit(), [this, process] { start_node(process); });
}

// On a fiber: its threads are waited for.
void PdSimulation::reap(std::unique_ptr<Node> node, int process, const std::function<void()>& then) {
  ++num_dying_;
  world_.enter(process);
  world_.spawn([this, then, dying = std::shared_ptr<Node>(std::move(node))]() mutable {
    dying.reset();
    --num_dying_;
    then();
  });
  world_.leave();
}

// One thing that goes wrong, at times.
void PdSimulation::disturb() {
  Rng& rng = world_.rng;
  if (world_.calm) return;
  const auto any = [&] { return static_cast<int>(rng.between(1, num_nodes_)); };
  const int process = any();
  const bool alive = world_.alive(process) && nodes_[static_cast<size_t>(process)] != nullptr;
  switch (rng.below(6)) {
    case 0:
      if (!faults_.kills || !alive || !rng.chance(0.4)) break;
      if (rng.chance(0.7))
        kill(process);
      else
        end_node(process);
      break;
    case 1:
      if (!faults_.stops || !alive) break;
      world_.count("a process stopped");
      world_.stop(process, rng.chance(0.3) ? 5 * rng.unit() : 0.5 * rng.unit());
      break;
    case 2: {
      const int other = static_cast<int>(rng.between(0, num_nodes_));
      if (!faults_.parts || other == process) break;
      world_.count("a partition");
      world_.part(process, other, rng.chance(0.3) ? 6 * rng.unit() : 0.6 * rng.unit());
      break;
    }
    case 3: {
      std::vector<std::shared_ptr<HttpCall>> calls;
      for (const auto& call : http_calls())
        if (auto held = call.lock()) calls.push_back(std::move(held));
      if (faults_.cuts && !calls.empty()) calls[rng.below(calls.size())]->cut();
      break;
    }
    case 4:
      if (alive && rng.chance(0.2)) nodes_[static_cast<size_t>(process)]->drop_prefix_cache();
      break;
    default:
      if (!faults_.weather) break;
      world_.weather = rng.chance(0.3) ? Weather()
                                       : Weather{.cut = 0.01 * rng.unit(),
                                                 .corrupt = 0.02 * rng.unit(),
                                                 .repeat = 0.02 * rng.unit(),
                                                 .reorder = 0.02 * rng.unit(),
                                                 .slow = 0.1 * rng.unit(),
                                                 .delay_s = 0.001 + 0.02 * rng.unit(),
                                                 .slow_s = 1.5 * rng.unit(),
                                                 .refuse = 0.05 * rng.unit()};
      world_.count("the weather changed");
      break;
  }
  world_.after(0.15 * rng.unit(), [this] { disturb(); });
}

void PdSimulation::take_counts(Node& node) {
  const SchedulerGauges gauges = node.gauges();
  const HandoverCounts handovers = node.handover_counts();
  const LeaseCounts& leases = handovers.leases;
  world_.count("a preemption", gauges.preemptions);
  world_.count("a prefix hit", node.harness_counts().hits);
  world_.count("a start from a tail", node.harness_counts().tail_starts);
  world_.count("a tail given up", node.harness_counts().tails_given_up);
  world_.count("a step", gauges.steps);
  world_.count("an import that failed", handovers.transfers.failed);
  world_.count("a lease given back", gauges.leases_given_back);
  world_.count("a block imported", gauges.imported_blocks);
  world_.count("a lease released", leases.released);
  world_.count("a lease expired", leases.expired);
  world_.count("a read refused", leases.refused_reads);
}

bool PdSimulation::all_rest() const {
  for (int process = 1; process <= num_nodes_; ++process) {
    const auto& node = nodes_[static_cast<size_t>(process)];
    if (!node || !node->rests()) return false;
  }
  return num_dying_ == 0;
}

std::map<std::string, int64_t> PdSimulation::run() {
  ask_health();
  std::function<void()> next = [this, &next] {
    begin_request();
    if (--num_to_begin_ > 0) world_.after(0.2 * world_.rng.unit(), next);
  };
  world_.after(0.01, next);
  if (!faults_.quiet()) disturb();
  const auto all_ended = [this] {
    return num_to_begin_ == 0 &&
           std::all_of(clients_.begin(), clients_.end(), [](const auto& client) { return client->ended(); });
  };
  if (!world_.run(all_ended, kLongestS))
    for (size_t i = 0; i < clients_.size(); ++i)
      world_.judge.require(clients_[i]->ended(), "client ", i, " waits for ever");

  // The storm is over: what is left of it goes within two leases, and the nodes serve again without a restart.
  world_.calm = true;
  world_.weather = {};
  const double calm_s = world_.time_s() + 8;
  (void)world_.run([] { return false; }, calm_s);
  const bool rest = world_.run([this] { return all_rest(); }, calm_s + 2 * kLeaseS + 4);
  for (int process = 1; process <= num_nodes_; ++process) {
    world_.judge.require(nodes_[static_cast<size_t>(process)] != nullptr, "a node is not back");
    nodes_[static_cast<size_t>(process)]->check_rest();
  }
  world_.judge.require(rest, "a node does not come to rest");
  check_last_request();
  for (int process = 1; process <= num_nodes_; ++process) {
    const auto index = static_cast<size_t>(process);
    take_counts(*nodes_[index]);
    nodes_[index]->stop_serving();
    reap(std::move(nodes_[index]), process, [] {});
  }
  if (!world_.run([this] { return num_dying_ == 0; }, world_.time_s() + 30)) world_.judge.fail("a node does not close");
  if (faults_.quiet()) {
    const auto times = [&](const char* what) {
      const auto found = world_.counts().find(what);
      return found == world_.counts().end() ? 0 : found->second;
    };
    // A lease fails with its sequence, whose output is not finite: that the reader finds so, too.
    world_.judge.require(times("an import that failed") <= times("a lease failed"),
                         "an import failed, though nothing went wrong");
    world_.judge.require(times("a lease expired") == 0, "a lease expired, though nothing went wrong");
  }
  return world_.counts();
}

// As on the first day: with an import, and without a fault.
void PdSimulation::check_last_request() {
  for (int i = 0; i < 2; ++i) {
    begin_request();
    const auto client = clients_.back();
    (void)world_.run([&] { return client->ended(); }, world_.time_s() + 60);
    world_.judge.require(client->ended(), "the last client waits for ever");
  }
  (void)world_.run([this] { return all_rest(); }, world_.time_s() + 10);
}

}  // namespace perigee::sim
