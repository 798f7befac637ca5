#include "kv/tcp_peer.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "base/log.h"
#include "kv/area_reader.h"
#include "kv/framed_socket.h"

namespace perigee {
namespace {

class TcpPeer final : public Peer {
 public:
  TcpPeer(std::string peer, CacheShape here, TcpOptions options, std::stop_token stop)
      : peer_(std::move(peer)), here_(std::move(here)), options_(std::move(options)), stop_(std::move(stop)) {}

  Result<LeaseHold> open(const LeaseName& lease, std::span<const int32_t> tokens, int32_t num_blocks) override {
    ASSIGN_OR_RETURN(const Held held, ask<Held>(OpenLease{lease, num_blocks, {tokens.begin(), tokens.end()}}, {}));
    return held.hold;
  }
  Status read(const LeaseName& lease, UnitRange units, std::span<uint8_t> out) override {
    ASSIGN_OR_RETURN(const Done done, ask<Done>(ReadUnits{lease, units}, out));
    static_cast<void>(done);
    return {};
  }
  Result<LeaseHold> extend(const LeaseName& lease) override {
    ASSIGN_OR_RETURN(const Held held, ask<Held>(ExtendLease{lease}, {}));
    return held.hold;
  }
  Status release(const LeaseName& lease) override {
    ASSIGN_OR_RETURN(const Done done, ask<Done>(ReleaseLease{lease}, {}));
    static_cast<void>(done);
    return {};
  }
  Result<uint64_t> await_growth(uint64_t known, double wait_s) override {
    const AwaitGrowth request{.known = known, .wait_ms = static_cast<uint32_t>(wait_s * 1000)};
    ASSIGN_OR_RETURN(const Grown grown, ask<Grown>(request, {}, wait_s));
    return grown.count;
  }
  Status pull(const LeaseName& lease, UnitRange units, const PageStore& store, const UnitPages& to,
              const std::stop_token& dropped) override;

  Status connect();

 private:
  Result<WireMessage> ask_for_carrier(const Carry& carry);
  Status ask_for_areas(const PageStore& store);
  Status ask_for_ucx();
  size_t connect_streams(int64_t num_pieces);
  Status pull_in_streams(const LeaseName& lease, UnitRange units, const PageStore& store, const UnitPages& to,
                         const std::stop_token& dropped);
  // Each request may be repeated without harm, so one whose connection proves to be gone is made once more. The peer
  // answers when it likes to, within `wait_s`. Done: the bytes are in `out`, or there was nothing to say.
  template <typename Reply>
  Result<Reply> ask(const WireMessage& request, std::span<uint8_t> out, double wait_s = 0) {
    const bool is_used = frames_ && may_be_gone_;
    if (!frames_) RETURN_IF_ERROR(connect());
    bool answered = false;
    auto reply = ask_once(request, out, wait_s, answered);
    if (is_used && !answered && !reply.ok()) {
      RETURN_IF_ERROR(connect());
      reply = ask_once(request, out, wait_s, answered);
    }
    may_be_gone_ = true;  // when it is asked again
    const Reply* wanted = reply.ok() ? std::get_if<Reply>(&*reply) : nullptr;
    if (!answered || (reply.ok() && wanted == nullptr)) frames_.reset();
    if (!reply.ok()) return reply.error();
    if (wanted == nullptr) return bad_input("a reply out of turn", "type");
    return *wanted;
  }
  Result<WireMessage> ask_once(const WireMessage& request, std::span<uint8_t> out, double wait_s, bool& answered);

  const std::string peer_;
  const CacheShape here_;
  const TcpOptions options_;
  const std::stop_token stop_;
  Socket socket_;
  std::optional<FramedSocket> frames_;  // while connected
  uint32_t number_ = 0;                 // of the newest request of this connection
  std::unique_ptr<AreaReader> areas_;   // of this connection; null: units come over it
  bool asked_for_areas_ = false;
  std::string why_no_areas_ = "caches that do not lie on GPUs, or are not to be mapped";
  std::unique_ptr<UcxPath> ucx_;                   // of this connection; null: units come over it
  std::vector<std::unique_ptr<TcpPeer>> streams_;  // further connections, which read only
  size_t most_streams_ = SIZE_MAX;
  bool may_be_gone_ = false;  // the connection, since it was last heard of
};

Status TcpPeer::connect() {
  frames_.reset();
  areas_.reset();
  ucx_.reset();
  asked_for_areas_ = false;
  may_be_gone_ = false;
  number_ = 0;
  ASSIGN_OR_RETURN(socket_, Socket::connect(peer_, options_.handshake_s, stop_));
  FramedSocket frames(socket_, options_.handshake_s);
  const Nonce nonce = make_nonce();
  RETURN_IF_ERROR(frames.send(Hello{nonce}, 0));
  ASSIGN_OR_RETURN(const Welcome welcome, frames.receive<Welcome>(kMaxHandshakeBytes));
  if (!same_tag(welcome.tag, tag_of(options_.secret, "server", nonce, welcome.nonce)))
    return bad_input("the peer " + peer_ + " does not know the secret", "tag");
  RETURN_IF_ERROR(frames.send(Proof{tag_of(options_.secret, "client", nonce, welcome.nonce)}, 0));
  frames.begin_session(session_of(options_.secret, nonce, welcome.nonce), 0, options_.silence_s);
  ASSIGN_OR_RETURN(const Ready ready, frames.receive<Ready>(kMaxHandshakeBytes));
  RETURN_IF_ERROR(check_same(here_, ready.shape));
  frames.set_incarnation(ready.incarnation);
  frames_.emplace(frames);
  Status status = options_.ucx ? ask_for_ucx() : Status();
  if (!status.ok()) frames_.reset();
  return status;
}

// Carried or Refused. After an error the connection must end.
Result<WireMessage> TcpPeer::ask_for_carrier(const Carry& carry) {
  RETURN_IF_ERROR(frames_->send(carry, ++number_));
  ASSIGN_OR_RETURN(const FramedSocket::Frame frame,
                   frames_->receive_frame(kMaxBlobBytes + kMaxHandshakeBytes, options_.silence_s));
  if (frame.header.number != number_) return bad_input("the reply to another request", "number");
  ASSIGN_OR_RETURN(WireMessage reply, decode_payload(frame.header.type, frame.payload));
  if (!std::holds_alternative<Carried>(reply) && !std::holds_alternative<Refused>(reply))
    return bad_input("a reply out of turn", "type");
  return reply;
}

Status TcpPeer::ask_for_ucx() {
  ASSIGN_OR_RETURN(std::unique_ptr<UcxPath> path, UcxPath::create());
  ASSIGN_OR_RETURN(const WireMessage reply, ask_for_carrier(Carry{kCarryUcx, path->address()}));
  if (const auto* refused = std::get_if<Refused>(&reply))
    return Error(refused->code,
                 fmt::format("{} does not take UCX, which \"backends\" asks for: {}", peer_, refused->why));
  RETURN_IF_ERROR(path->connect(std::get<Carried>(reply).blob));
  ucx_ = std::move(path);
  return {};
}

// Once a connection: whether units can come another way. Only a lost connection is an error.
Status TcpPeer::ask_for_areas(const PageStore& store) {
  asked_for_areas_ = true;
  const auto stays_with_tcp = [&](const Error& why) {
    if (options_.units_over_tcp) log_info("cache transfers from ", peer_, ": over TCP; by CUDA IPC not: ", why.message);
    why_no_areas_ = why.message;
  };
  ASSIGN_OR_RETURN(const WireMessage reply, ask_for_carrier(Carry{kCarryCudaIpc, host_id()}));
  if (const auto* refused = std::get_if<Refused>(&reply)) {
    stays_with_tcp(Error(refused->code, refused->why));
    return {};
  }
  Result<std::unique_ptr<AreaReader>> mapped = AreaReader::map(store, std::get<Carried>(reply).blob);
  if (mapped.ok()) log_info("cache transfers from ", peer_, ": by CUDA IPC");
  if (mapped.ok())
    areas_ = std::move(*mapped);
  else
    stays_with_tcp(mapped.error());
  return {};
}

Status TcpPeer::pull(const LeaseName& lease, UnitRange units, const PageStore& store, const UnitPages& to,
                     const std::stop_token& dropped) {
  if (!frames_) RETURN_IF_ERROR(connect());
  Status status;
  if (options_.areas && store.can_map() && !asked_for_areas_) status = ask_for_areas(store);
  if (status.ok() && !(areas_ && AreaReader::fits(store, units.group))) {
    if (options_.units_over_tcp || options_.ucx) return pull_in_streams(lease, units, store, to, dropped);
    return Error(Code::kUnavailable, "\"backends\" allows no TCP, and CUDA IPC cannot be used: " + why_no_areas_);
  }
  if (status.ok()) status = areas_->pull(*frames_, number_, options_.silence_s, lease, units, store, to, dropped);
  if (!status.ok()) {
    areas_.reset();
    frames_.reset();
  }
  return status;
}

// As many as there are pieces for, if they can be had: the first one is enough.
size_t TcpPeer::connect_streams(int64_t num_pieces) {
  const auto wanted = static_cast<size_t>(std::clamp<int64_t>(num_pieces, 1, options_.streams) - 1);
  while (streams_.size() < std::min(wanted, most_streams_)) {
    auto made = std::make_unique<TcpPeer>(peer_, here_, options_, stop_);
    if (!made->connect().ok()) {
      most_streams_ = streams_.size();  // nobody waits for that twice
      break;
    }
    streams_.push_back(std::move(made));
  }
  return std::min(streams_.size(), wanted);
}

// Each connection takes the next piece, so a slow one holds up no other. While one waits for its piece, another one's
// is gathered, checked or scattered. Pieces stay in the cores' caches from the socket to the pages.
Status TcpPeer::pull_in_streams(const LeaseName& lease, UnitRange units, const PageStore& store, const UnitPages& to,
                                const std::stop_token& dropped) {
  const int64_t unit_bytes = store.unit_bytes(units.group);
  const auto in_piece = static_cast<int32_t>(std::max<int64_t>(1, options_.piece_bytes / unit_bytes));
  const int32_t num_pieces = (units.count + in_piece - 1) / in_piece;
  const size_t num_streams = connect_streams(num_pieces);
  std::vector<std::vector<uint8_t>> staging(num_streams + 1);
  for (auto& each : staging) each.resize(static_cast<size_t>(std::min(in_piece, units.count) * unit_bytes));
  std::vector<Status> ends(num_streams + 1);
  std::atomic<int32_t> next{0};
  const auto pull = [&](TcpPeer& peer, size_t stream) -> Status {
    for (int32_t i = next++; i < num_pieces; i = next++) {
      if (stop_.stop_requested()) return Error(Code::kUnavailable, "the engine is shutting down");
      if (dropped.stop_requested()) return dropped_import();
      const int32_t done = i * in_piece, count = std::min(in_piece, units.count - done);
      const UnitRange piece{units.group, units.first + done, count};
      const auto bytes = std::span(staging[stream]).first(static_cast<size_t>(count * unit_bytes));
      RETURN_IF_ERROR(peer.read(lease, piece, bytes));
      RETURN_IF_ERROR(store.scatter(to, piece, bytes));
    }
    return {};
  };
  const auto run = [&](TcpPeer& peer, size_t stream) {
    try {
      ends[stream] = pull(peer, stream);
    } catch (const std::bad_alloc&) {
      ends[stream] = Error(Code::kExhausted, "no memory for a transfer");
    }
    if (!ends[stream].ok()) next = num_pieces;  // nor need the others go on
    peer.may_be_gone_ = true;                   // before it is asked again
  };
  std::vector<Thread> threads;
  threads.reserve(num_streams);
  try {
    for (size_t i = 0; i < num_streams; ++i)
      threads.emplace_back([&run, &stream = *streams_[i], i] { run(stream, i + 1); });
  } catch (const std::exception&) {  // no thread, or no memory for it: the others do it
  }
  run(*this, 0);
  for (Thread& thread : threads) thread.join();
  for (const Status& end : ends) RETURN_IF_ERROR(end);
  return {};
}

// `answered`: the connection is as good as it was.
Result<WireMessage> TcpPeer::ask_once(const WireMessage& request, std::span<uint8_t> out, double wait_s,
                                      bool& answered) {
  RETURN_IF_ERROR(frames_->send(request, ++number_));
  ASSIGN_OR_RETURN(const WireHeader header, frames_->receive_header(kMaxReadBytes, options_.silence_s + wait_s));
  if (header.number != number_) return bad_input("the reply to another request", "number");
  if (header.type == kRawBytes) {
    if (out.empty() || header.payload_bytes != out.size()) return bad_input("a reply of another size", "payload_bytes");
    RETURN_IF_ERROR(frames_->receive_payload(header, out, ucx_.get()));
    answered = true;
    return WireMessage(Done());
  }
  if (header.payload_bytes > kMaxHandshakeBytes) return bad_input("a reply that is too long", "payload_bytes");
  std::vector<uint8_t> payload(header.payload_bytes);
  RETURN_IF_ERROR(frames_->receive_payload(header, payload));
  ASSIGN_OR_RETURN(const WireMessage reply, decode_payload(header.type, payload));
  if (const auto* refused = std::get_if<Refused>(&reply)) {
    answered = true;
    return Error(refused->code, refused->why);
  }
  if (!out.empty()) return bad_input("a reply out of turn", "type");
  answered = true;
  return reply;
}

}  // namespace

Connect connect_by_tcp(TcpOptions options) {
  return [options = std::move(options)](const std::string& peer, const CacheShape& here,
                                        std::stop_token stop) -> Result<std::unique_ptr<Peer>> {
    auto made = std::make_unique<TcpPeer>(peer, here, options, std::move(stop));
    RETURN_IF_ERROR(made->connect());
    return std::unique_ptr<Peer>(std::move(made));
  };
}

}  // namespace perigee
