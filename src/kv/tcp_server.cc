#include <fmt/core.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <vector>

#include "base/log.h"
#include "kv/area_reader.h"
#include "kv/framed_socket.h"
#include "kv/tcp_peer.h"

namespace perigee {
namespace {

WireMessage refusal(const Error& error) {
  return Refused{.code = error.code, .why = error.message};
}
WireMessage answer(const Status& status) {
  return status.ok() ? WireMessage(Done()) : refusal(status.error());
}
WireMessage answer(const Result<LeaseHold>& hold) {
  return hold.ok() ? WireMessage(Held{*hold}) : refusal(hold.error());
}
WireMessage answer(const Result<uint64_t>& growth) {
  return growth.ok() ? WireMessage(Grown{*growth}) : refusal(growth.error());
}

// The replies of one connection.
class Session {
 public:
  Session(LeaseTable& table, FramedSocket& frames, const TcpOptions& options)
      : table_(table), frames_(frames), options_(options) {}

  Status reply(const FramedSocket::Frame& request) {
    ASSIGN_OR_RETURN(const WireMessage message, decode_payload(request.header.type, request.payload));
    if (const auto* read = std::get_if<ReadUnits>(&message)) return reply_to(*read, request.header.number);
    if (const auto* stage = std::get_if<StageUnits>(&message))
      return frames_.send(staged(*stage), request.header.number);
    if (const auto* carry = std::get_if<Carry>(&message)) return frames_.send(carried(*carry), request.header.number);
    WireMessage reply = refusal(bad_input("no request", "type"));
    if (const auto* open = std::get_if<OpenLease>(&message))
      reply = answer(table_.open(open->lease, open->tokens, open->num_blocks));
    else if (const auto* extend = std::get_if<ExtendLease>(&message))
      reply = answer(table_.extend(extend->lease));
    else if (const auto* released = std::get_if<ReleaseLease>(&message))
      reply = answer(release(released->lease));
    else if (const auto* awaits = std::get_if<AwaitGrowth>(&message))
      reply = answer(table_.await_growth(awaits->known, std::min(awaits->wait_ms, kMaxGrowthWaitMs) / 1000.0));
    return frames_.send(reply, request.header.number);
  }

 private:
  Status release(const LeaseName& lease) {
    table_.release(lease);
    return {};
  }
  Status reply_to(const ReadUnits& read, uint32_t number) {
    const int64_t bytes = read.units.count * table_.shape().unit_bytes(read.units.group);
    if (read.units.count < 1 || bytes > static_cast<int64_t>(kMaxReadBytes))
      return frames_.send(refusal(bad_input("a read of too many units", "units")), number);
    staging_.resize(static_cast<size_t>(bytes));
    const Status status = table_.read(read.lease, read.units, staging_);
    return status.ok() ? frames_.send_raw(staging_, number, ucx_.get()) : frames_.send(answer(status), number);
  }

  WireMessage carried(const Carry& carry);
  Result<std::vector<uint8_t>> take_ucx(std::span<const uint8_t> address);
  WireMessage staged(const StageUnits& stage);

  LeaseTable& table_;
  FramedSocket& frames_;
  const TcpOptions& options_;
  std::vector<uint8_t> staging_;
  Areas areas_;
  std::unique_ptr<UcxPath> ucx_;
};

Result<std::vector<uint8_t>> Session::take_ucx(std::span<const uint8_t> address) {
  ASSIGN_OR_RETURN(std::unique_ptr<UcxPath> path, UcxPath::create());
  RETURN_IF_ERROR(path->connect(address));
  ucx_ = std::move(path);
  return ucx_->address();
}

WireMessage Session::carried(const Carry& carry) {
  if (carry.kind == kCarryUcx && options_.ucx) {
    Result<std::vector<uint8_t>> address = take_ucx(carry.blob);
    return address.ok() ? WireMessage(Carried{std::move(*address)}) : refusal(address.error());
  }
  if (carry.kind != kCarryCudaIpc || !options_.areas)
    return refusal(Error(Code::kUnavailable, "this node has no such carrier"));
  if (!is_this_host(carry.blob)) return refusal(Error(Code::kUnavailable, "the nodes run on different hosts"));
  if (areas_.empty()) {
    Result<Areas> given = table_.store().give_areas();
    if (!given.ok()) return refusal(given.error());
    areas_ = std::move(*given);
  }
  return Carried{show_areas(areas_)};
}

WireMessage Session::staged(const StageUnits& stage) {
  const int64_t bytes = stage.units.count * table_.shape().unit_bytes(stage.units.group);
  if (areas_.empty() || stage.slot < 0 || stage.slot >= kAreaSlots || stage.units.count < 1 ||
      stage.units.count > kMaxSlotUnits || bytes > kAreaSlotBytes)
    return refusal(bad_input("units that fit no slot", "units"));
  StagedUnits units;
  const Status status =
      table_.read(stage.lease, stage.units, [&](const PageStore& store, const UnitPages& pages) -> Status {
        ASSIGN_OR_RETURN(units, store.stage(pages, stage.units, areas_, stage.slot));
        return {};
      });
  return status.ok() ? WireMessage(std::move(units)) : refusal(status.error());
}

}  // namespace

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

Result<std::unique_ptr<LeaseServer>> LeaseServer::start(LeaseTable& table, const std::string& host, int port,
                                                        TcpOptions options) {
  if (options.secret.empty() && !is_loopback(host))
    return bad_input(
        fmt::format("a port for cache transfers on {} needs a secret, as on every address beyond loopback: "
                    "whoever reaches it could read prompts' caches",
                    host),
        "kv-transfer-config");
  ASSIGN_OR_RETURN(Socket listener, Socket::listen(host, port));
  return std::unique_ptr<LeaseServer>(new LeaseServer(table, std::move(listener), std::move(options)));
}

LeaseServer::LeaseServer(LeaseTable& table, Socket listener, TcpOptions options)
    : table_(table), listener_(std::move(listener)), options_(std::move(options)), thread_([this] { accept(); }) {}

void LeaseServer::stop() {
  if (stopping_.exchange(true)) return;
  listener_.stop();
  thread_.join();
  for (Connection& connection : connections_) connection.socket.stop();
  for (Connection& connection : connections_) connection.thread.join();
}

void LeaseServer::accept() {
  while (!stopping_) {
    auto accepted = listener_.accept();
    if (!accepted.ok()) {
      if (!stopping_) log_warning("cache transfers: ", accepted.error().message);
      if (!stopping_) sleep_s(0.1);
      continue;
    }
    connections_.remove_if([](Connection& connection) {
      const bool ended = connection.ended;  // read once: it may end meanwhile
      if (ended) connection.thread.join();
      return ended;
    });
    if (std::ssize(connections_) >= options_.max_connections) {  // the socket goes, which closes it
      ++num_refused_;
      log_warning("cache transfers: a connection over the limit of ", options_.max_connections, " was refused");
      continue;
    }
    Connection& connection = connections_.emplace_back();
    connection.socket = std::move(*accepted);
    const auto run = [this, &connection] {
      const Status status = serve_within_memory(connection.socket);
      if (!status.ok() && status.error().code == Code::kBadInput) {
        ++num_refused_;
        log_warning("cache transfers: a connection was refused: ", status.error().message);
      }
      connection.socket.stop();
      connection.ended = true;
    };
    try {
      connection.thread = Thread(run);
    } catch (const std::system_error& error) {
      log_warning("cache transfers: no thread for a connection: ", error.what());
      connections_.pop_back();
    }
  }
}

// Frames are up to 64 MiB: without memory for one only its connection ends.
Status LeaseServer::serve_within_memory(const Socket& socket) {
  try {
    return serve(socket);
  } catch (const std::bad_alloc&) {
    return Error(Code::kExhausted, "no memory for a frame");
  }
}

Status LeaseServer::serve(const Socket& socket) {
  FramedSocket frames(socket, options_.handshake_s);
  ASSIGN_OR_RETURN(const Hello hello, frames.receive<Hello>(kMaxHandshakeBytes));
  const Nonce nonce = make_nonce();
  RETURN_IF_ERROR(frames.send(Welcome{nonce, tag_of(options_.secret, "server", hello.nonce, nonce)}, 0));
  ASSIGN_OR_RETURN(const Proof proof, frames.receive<Proof>(kMaxHandshakeBytes));
  if (!same_tag(proof.tag, tag_of(options_.secret, "client", hello.nonce, nonce)))
    return bad_input("it does not know the secret", "tag");
  frames.begin_session(session_of(options_.secret, hello.nonce, nonce), table_.incarnation(), options_.silence_s);
  RETURN_IF_ERROR(frames.send(Ready{table_.shape(), table_.incarnation()}, 0));
  Session session(table_, frames, options_);
  for (uint32_t number = 1; !stopping_; ++number) {
    ASSIGN_OR_RETURN(const FramedSocket::Frame request, frames.receive_frame(kMaxRequestBytes, options_.idle_s));
    if (request.header.number != number) return bad_input("a frame that was repeated or left out", "number");
    RETURN_IF_ERROR(session.reply(request));
  }
  return {};
}

}  // namespace perigee
