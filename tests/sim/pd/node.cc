#include "sim/pd/node.h"

#include <algorithm>
#include <utility>

#include "base/json.h"
#include "kv/lease_tag.h"
#include "sim/chain_constraint.h"

namespace perigee::sim {
namespace {

const char* finish_name(FinishReason reason) {
  constexpr const char* kNames[] = {"stop", "length", "cancelled", "deadline", "error"};
  return kNames[static_cast<size_t>(reason)];
}

constexpr int64_t kPageBytes = kBlockTokens * sizeof(uint64_t);
constexpr double kLongestImportS = 60;
constexpr const char* kTransfer = "kv_transfer_params";

// A page is a block of 64 words, or one unit of the state.
CacheLayout layout_of(int64_t state_units) {
  const CacheGroup blocks = CacheGroup::latent(1, 3, 1, LatentFormat::kBF16);
  if (state_units == 0) return {blocks};
  return {blocks, CacheGroup::state(1, state_units, kPageBytes, 0)};
}

std::string ids_text(const std::vector<int32_t>& ids) {
  std::string text = "[";
  for (const int32_t id : ids) text += (text.size() > 1 ? "," : "") + std::to_string(id);
  return text + "]";
}

std::vector<int32_t> ids_of(const Json& list) {
  std::vector<int32_t> ids;
  for (const Json& id : list.as_array()) ids.push_back(static_cast<int32_t>(id.as_int()));
  return ids;
}

int64_t number_of(const Json& object, const char* key, int64_t otherwise) {
  const Json* member = object.find(key);
  return member == nullptr || member->is_null() ? otherwise : member->as_int();
}

// What another node holds, if the parameters say so.
std::optional<RemotePrefix> remote_of(const Json& parameters) {
  const Json* peer = parameters.find("remote");
  if (peer == nullptr || !peer->is_string()) return std::nullopt;
  const uint64_t incarnation = std::strtoull(parameters.find("incarnation")->as_string().c_str(), nullptr, 10);
  return RemotePrefix{.peer = peer->as_string(),
                      .lease = {incarnation, number_of(parameters, "lease", 0)},
                      .num_blocks = static_cast<int32_t>(number_of(parameters, "blocks", 0)),
                      .tag = parameters.find("tag")->as_string()};
}

}  // namespace

Node::Node(World& world, const NodeSetup& setup)
    : Harness(world.judge, Rng(world.rng.next()), setup.config, 1), world_(world), setup_(setup) {
  std::vector<RankPages> ranks;
  const int32_t dcp = config_.dcp_size;
  for (int32_t i = 0; i < dcp; ++i)
    ranks.push_back({.base = reinterpret_cast<uint8_t*>(ranks_[0].memory(i)),
                     .layout = layout_of(setup.state_units / dcp),
                     .shard = i,
                     .num_shards = dcp,
                     .dcp_index = i});
  judge_.require(ranks[0].layout.page_bytes() == kPageBytes, "pages of another size");
  store_ = PageStore(ranks);
  shape_.model = setup.model;
  shape_.deterministic = config_.deterministic;
  shape_.lease_ms = static_cast<int64_t>(setup.handover.lease_s * 1000);
  store_.describe(shape_);
  now_s_ = world.clock_s(setup.process);
  world.enter(setup.process);
  HandoverPosts posts{.lease = [this](LeaseOver over) { post(over); },
                      .import = [this](ImportOver over) { post(std::move(over)); }};
  handovers_ = std::make_unique<Handovers>(store_, shape_, setup.handover, std::move(posts));
  judge_.require(handovers_->listen().ok(), "no lease server");
  engine_ = Thread([this] { run(); });
  world.leave();
  http_doors()[static_cast<size_t>(setup.process)] = [this](const std::shared_ptr<HttpCall>& call) { take(call); };
}

Node::~Node() {
  stopping_ = true;
  engine_.join();
  handovers_->close();
}

// The engine's thread. It looks for work less often while it has none.
void Node::run() {
  while (!stopping_) {
    tick();
    (void)world_.wait((busy() ? 0.02 : 0.1) * (0.5 + rng_.unit()));
  }
}

void Node::die(bool heard) {
  http_doors()[static_cast<size_t>(setup_.process)] = nullptr;
  for (auto& [sequence, open] : open_) {
    open.call->on_disconnect = nullptr;
    if (heard) open.call->fail("the connection was reset");
  }
  for (Message& message : mailbox_) {
    auto* start = std::get_if<Start>(&message);
    if (start == nullptr) continue;
    start->call->on_disconnect = nullptr;
    if (heard) start->call->fail("the connection was reset");
  }
}

void Node::refuse(HttpCall& call, int status, const std::string& why) const {
  call.begin(status, false);
  call.write("{\"error\":\"" + why + "\"}");
  call.finish();
}

// Any thread's part of Engine::submit().
void Node::take(const std::shared_ptr<HttpCall>& call) {
  const auto parsed = parse_json(call->body);
  judge_.require(parsed.ok(), "a body that is not JSON");
  judge_.require(call->id.starts_with("request-"), "a request without its id");
  const Json& body = *parsed;
  Start start{.call = call, .arrival_s = world_.clock_s(setup_.process)};
  EngineRequest& request = start.request;
  request.prompt = std::make_shared<const std::vector<int32_t>>(ids_of(*body.find("prompt")));
  SamplingParams& sampling = request.sampling;
  sampling.max_tokens = static_cast<int32_t>(number_of(body, "max_tokens", 16));
  sampling.min_tokens = static_cast<int32_t>(number_of(body, "min_tokens", 0));
  sampling.seed = std::strtoull(body.find("seed")->as_string().c_str(), nullptr, 10);
  if (const Json* stops = body.find("stop_token_ids")) sampling.stop_ids = ids_of(*stops);
  if (const Json* salt = body.find("cache_salt")) request.cache_salt = salt->as_string();
  request.timeout_s = static_cast<double>(number_of(body, "timeout_ms", 0)) / 1000;
  if (body.find("constrained") != nullptr) request.constraint = std::make_shared<ChainConstraint>(sampling.seed);
  if (const Json* parameters = body.find(kTransfer)) {
    const Json* leases = parameters->find("do_remote_decode");
    const bool early = setup_.announces && parameters->find("announce_early") != nullptr;
    if (leases != nullptr && leases->as_bool()) request.lease = early ? LeaseWish::kFromStart : LeaseWish::kAtEnd;
    request.remote = remote_of(*parameters);
  }
  if (const Status fits = handovers_->check(request); !fits.ok()) {
    world_.count("a request refused for its lease");
    handovers_->release(*request.remote);
    return refuse(*call, 400, fits.error().message);
  }
  if (scheduler_.gauges().waiting + std::ssize(mailbox_) >= setup_.queue_length ||
      !scheduler_.fits(std::ssize(*request.prompt), sampling.max_tokens)) {
    world_.count(request.remote ? "a request with a lease refused for want of room"
                                : "a request refused for want of room");
    if (request.remote) handovers_->release(*request.remote);
    return refuse(*call, 429, "full");
  }
  call->on_disconnect = [this, call] { post(Stop{call}); };
  post(std::move(start));
}

void Node::handle(Start& start) {
  const EngineRequest& request = start.request;
  const SequenceId sequence(static_cast<int64_t>(requests_.size()));
  const Json body = *parse_json(start.call->body);
  const Json* streams = body.find("stream");
  Open& open = open_[sequence];
  open = {.call = start.call,
          .lease = request.lease != LeaseWish::kNone,
          .streams = streams != nullptr && streams->as_bool(),
          .imports = request.remote.has_value()};
  sequences_[start.call.get()] = sequence;
  Submit wanted{.sequence = sequence,
                .prompt = request.prompt,
                .sampling = std::make_shared<SamplingParams>(request.sampling),
                .arrival_s = start.arrival_s,
                .deadline_s = request.timeout_s > 0 ? start.arrival_s + request.timeout_s : 0,
                .cache_salt = request.cache_salt,
                .constraint = request.constraint};
  handovers_->prepare(request, sequence, wanted);
  world_.trace("node ", setup_.process, " sequence ", sequence, " begins: ", request.prompt->size(), " tokens, ",
               wanted.lease != LeaseWish::kNone ? "leases"
               : wanted.remote_blocks > 0       ? "imports"
                                                : "alone");
  submit(std::move(wanted));
}

void Node::handle(const Stop& stop) {
  const auto found = sequences_.find(stop.call.get());
  if (found == sequences_.end()) return;
  const bool awaits = imports_.contains(found->second);
  world_.count(awaits ? "a cancel while bytes are on their way" : "a cancel");
  world_.trace("node ", setup_.process, " sequence ", found->second, " is cancelled", awaits ? " while it awaits" : "");
  cancel(found->second, FinishReason::kCancelled);
}

void Node::handle(const LeaseOver& over) {
  end_lease(over.sequence);
  world_.count("a lease ended");
  world_.trace("node ", setup_.process, " lease ", over.sequence, " is free");
  handovers_->handle(over, scheduler_);
}

void Node::handle(const ImportOver& over) {
  const bool ended = requests_[static_cast<size_t>(over.sequence.value)].ended;
  using How = TransferEnd::How;
  const bool fails = setup_.handover.on_failure == ImportEnd::kFail;
  const bool arrived = over.end.how == How::kArrived, withdrawn = over.end.how == How::kWithdrawn;
  const bool dropped = over.end.how == How::kDropped;
  judge_.require(ended || !dropped, "node ", setup_.process, " import ", over.sequence, " is dropped but wanted");
  const bool tail_too = imports_.at(over.sequence).has_tail() && over.end.arrived != ImportEnd::kWithoutTail;
  const bool no_checkpoint = over.end.arrived == ImportEnd::kWithoutCheckpoint;
  const ImportEnd end = arrived                ? over.end.arrived
                        : withdrawn || dropped ? ImportEnd::kRecompute
                                               : setup_.handover.on_failure;
  const char* what = dropped                    ? "an import dropped"
                     : ended                    ? "an import ended after its sequence"
                     : arrived && no_checkpoint ? "an import arrived without a checkpoint"
                     : arrived && tail_too      ? "an import arrived with its tail"
                     : arrived                  ? "an import arrived"
                     : withdrawn                ? "an import withdrawn"
                     : fails                    ? "an import failed its request"
                                                : "an import failed and is computed";
  world_.count(what);
  world_.trace("node ", setup_.process, " import ", over.sequence, ": ", what, over.end.why ? ": " : "",
               over.end.why ? over.end.why->message : "");
  import_begun_s_.erase(over.sequence);
  end_import(over.sequence, end);
  handovers_->handle(over, scheduler_);
  take_updates();
}

void Node::tick() {
  judge_.tick = world_.judge.tick;
  now_s_ = world_.clock_s(setup_.process);
  const bool was_busy = busy();
  for (size_t i = mailbox_.size(); i > 0; --i) {
    Message message = std::move(mailbox_.front());
    mailbox_.pop_front();
    std::visit([this](auto& of) { handle(of); }, message);
  }
  if (rng_.chance(0.8)) plan_step();
  for (const Import& import : new_imports_) {
    world_.count(import.empty() ? "an import that needs nothing" : "an import posted");
    if (!import.empty() && import.first_block > 0) world_.count("an import after a hit");
    world_.trace("node ", setup_.process, " import ", import.sequence, ": ", import.blocks.size(), " blocks from ",
                 import.first_block, import.checkpoint.empty() ? "" : " and a state");
  }
  for (const auto& [sequence, import] : imports_) {
    const double begun_s = import_begun_s_.try_emplace(sequence, world_.time_s()).first->second;
    judge_.require(world_.time_s() - begun_s < kLongestImportS, "node ", setup_.process, " import ", sequence,
                   " does not end");
  }
  handovers_->post(std::exchange(new_imports_, {}));
  if (rng_.chance(0.7)) give_masks();
  run_ranks();
  if (!flights_.empty() && rng_.chance(0.7)) deliver();
  for (const LeaseGrowth& growth : std::exchange(new_growth_, {})) deliver_growth(growth);
  handovers_->expire();
  for (const SequenceUpdate& update : std::exchange(updates_, {})) deliver_update(update);
  if (was_busy) check_books();
}

// The parameters of the reply. One in some is a lie, as a client could tell it.
std::string Node::transfer_params(const std::optional<RemotePrefix>& lease) {
  if (!lease) return "{\"remote\":null}";
  RemotePrefix told = *lease;
  if (!world_.calm && rng_.chance(setup_.lie_chance)) {
    world_.count("a lie about a lease");
    switch (rng_.below(5)) {
      case 0: told.lease.number = rng_.between(0, told.lease.number); break;
      case 1: ++told.lease.incarnation; break;
      case 2: told.num_blocks += static_cast<int32_t>(rng_.between(-1, 1)); break;
      case 3: told.peer = "node:" + std::to_string(rng_.between(1, 5)); break;
      default: told.peer = "nowhere"; break;
    }
    if (rng_.chance(0.7)) told.tag = lease_tag(setup_.handover.secret, told);
  }
  return str_cat("{\"remote\":\"", told.peer, "\",\"incarnation\":\"", told.lease.incarnation,
                 "\",\"lease\":", told.lease.number, ",\"blocks\":", told.num_blocks, ",\"tag\":\"", told.tag, "\"}");
}

void Node::deliver_growth(const LeaseGrowth& growth) {
  constexpr const char* kStages[] = {"a lease grown", "a lease whole", "a lease withdrawn", "a lease failed"};
  const std::optional<RemotePrefix> lease = handovers_->grow(growth);
  world_.count(lease ? "a lease announced" : kStages[static_cast<size_t>(growth.stage)]);
  world_.trace("node ", setup_.process, " lease ", growth.lease->sequence, " has ", growth.lease->blocks.size(),
               " blocks of ", growth.num_tokens,
               " tokens: ", lease ? "announced" : kStages[static_cast<size_t>(growth.stage)]);
  const auto found = open_.find(growth.lease->sequence);
  if (!lease || found == open_.end()) return;
  found->second.announced = true;
  found->second.call->begin(200, true);
  found->second.call->write(str_cat("data: {\"kv_transfer_params\":", transfer_params(lease), "}\n\n"));
}

void Node::deliver_update(const SequenceUpdate& update) {
  const std::optional<RemotePrefix> lease = update.finish ? handovers_->end(update) : std::nullopt;
  const bool no_checkpoint = setup_.state_units > 0 && lease && update.lease->checkpoint.empty();
  if (lease) world_.count(no_checkpoint ? "a lease granted without a checkpoint" : "a lease granted");
  const auto found = open_.find(update.sequence);
  judge_.require(found != open_.end(), "an update for nobody's sequence ", update.sequence);
  Open& open = found->second;
  HttpCall& call = *open.call;
  open.ids.insert(open.ids.end(), update.ids.begin(), update.ids.end());
  if (open.streams && !open.ids.empty() && !open.begun) {
    open.begun = true;
    call.begin(200, true);
  }
  if (open.begun && !update.ids.empty())
    call.write("data: {\"ids\":" + ids_text({update.ids.begin(), update.ids.end()}) + "}\n\n");
  if (!update.finish) return;
  world_.trace("node ", setup_.process, " sequence ", update.sequence, " ends: ", finish_name(*update.finish), " ",
               update.error);
  const bool good = *update.finish == FinishReason::kStop || *update.finish == FinishReason::kLength;
  if (*update.finish == FinishReason::kDeadline) world_.count("a deadline passed");
  const std::string reply =
      str_cat("{\"ids\":", ids_text(open.ids), ",\"finish\":\"", finish_name(*update.finish), "\"",
              open.lease && !open.announced ? ",\"kv_transfer_params\":" + transfer_params(lease) : "", "}");
  const std::string error =
      str_cat("data: {\"error\":{\"code\":500,\"message\":\"", finish_name(*update.finish), "\"}}\n\n");
  if (open.announced) {
    call.write(good ? str_cat("data: ", reply, "\n\ndata: [DONE]\n\n") : error);
    call.finish();
  } else if (!good && !open.begun) {
    refuse(call, 500, finish_name(*update.finish));
  } else if (open.begun) {
    call.write(good ? str_cat("data: {\"finish\":\"", finish_name(*update.finish), "\"}\n\ndata: [DONE]\n\n") : error);
    call.finish();
  } else {
    call.begin(200, false);
    call.write(reply);
    call.finish();
  }
  sequences_.erase(&call);
  open_.erase(found);
}

// INV-14: a transfer reads leased pages, and writes those that an import fills.
void Node::check_touch(const void* page) const {
  const auto* word = static_cast<const uint64_t*>(page);
  auto& pools = const_cast<FakeWorker&>(ranks_[0]);
  for (int32_t index = 0; index < config_.dcp_size; ++index) {
    const std::ptrdiff_t words = word - pools.memory(index);
    if (words < 0 || words >= static_cast<std::ptrdiff_t>(config_.num_pages) * kBlockTokens) continue;
    const PageId id(static_cast<int32_t>(words / kBlockTokens));
    const size_t bit = bit_of({id, index});
    for (const auto& [sequence, growth] : leases_)
      if (growth.stage == LeaseStage::kGrows && !growth.lease->blocks.empty() && bit_of(growth.lease->blocks[0]) == bit)
        world_.count("a lease read while it grows");
    judge_.require(is_leased(bit) || filling().test(bit), "node ", setup_.process, ": page ", id, " at dcp index ",
                   index, " is touched by a transfer and neither leased nor to be filled");
  }
}

void Node::check_rest() {
  judge_.require(live_.empty() && mailbox_.empty() && open_.empty(), "node ", setup_.process, " has ", live_.size(),
                 " sequences that do not end");
  judge_.require(imports_.empty(), "node ", setup_.process, " has ", imports_.size(), " imports that do not end");
  judge_.require(leases_.empty(), "node ", setup_.process, " has ", leases_.size(), " leases that do not end");
  judge_.require(handover_counts().leases.held == 0, "node ", setup_.process, " lends what is free");
  check_end();
}

void Node::stop_serving() {
  http_doors()[static_cast<size_t>(setup_.process)] = nullptr;
}

}  // namespace perigee::sim
