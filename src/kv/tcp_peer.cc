#include "kv/tcp_peer.h"

#include <optional>
#include <utility>

#include "kv/framed_socket.h"

namespace perigee {
namespace {

class TcpPeer final : public Peer {
 public:
  TcpPeer(std::string peer, CacheShape here, TcpOptions options, std::stop_token stop)
      : peer_(std::move(peer)), here_(std::move(here)), options_(std::move(options)), stop_(std::move(stop)) {}

  Status open(const LeaseName& lease, std::span<const int32_t> tokens, int32_t num_blocks) override {
    return ask(OpenLease{lease, num_blocks, {tokens.begin(), tokens.end()}}, {});
  }
  Status read(const LeaseName& lease, UnitRange units, std::span<uint8_t> out) override {
    return ask(ReadUnits{lease, units}, out);
  }
  Status extend(const LeaseName& lease) override { return ask(ExtendLease{lease}, {}); }
  Status release(const LeaseName& lease) override { return ask(ReleaseLease{lease}, {}); }

  Status connect();

 private:
  // Each request may be repeated without harm, so one whose connection proves to be gone is made once more.
  Status ask(const WireMessage& request, std::span<uint8_t> out) {
    const bool is_used = frames_ && number_ > 0;
    if (!frames_) RETURN_IF_ERROR(connect());
    bool answered = false;
    Status status = ask_once(request, out, answered);
    if (is_used && !answered && !status.ok()) {
      RETURN_IF_ERROR(connect());
      status = ask_once(request, out, answered);
    }
    if (!answered) frames_.reset();
    return status;
  }
  Status ask_once(const WireMessage& request, std::span<uint8_t> out, bool& answered);

  const std::string peer_;
  const CacheShape here_;
  const TcpOptions options_;
  const std::stop_token stop_;
  Socket socket_;
  std::optional<FramedSocket> frames_;  // while connected
  uint32_t number_ = 0;                 // of the newest request of this connection
};

Status TcpPeer::connect() {
  frames_.reset();
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
  return {};
}

// `answered`: the connection is as good as it was.
Status TcpPeer::ask_once(const WireMessage& request, std::span<uint8_t> out, bool& answered) {
  RETURN_IF_ERROR(frames_->send(request, ++number_));
  ASSIGN_OR_RETURN(const WireHeader header, frames_->receive_header(kMaxReadBytes, options_.silence_s));
  if (header.number != number_) return bad_input("the reply to another request", "number");
  if (header.type == kRawBytes) {
    if (out.empty() || header.payload_bytes != out.size()) return bad_input("a reply of another size", "payload_bytes");
    RETURN_IF_ERROR(frames_->receive_payload(header, out));
    answered = true;
    return {};
  }
  if (header.payload_bytes > kMaxHandshakeBytes) return bad_input("a reply that is too long", "payload_bytes");
  std::vector<uint8_t> payload(header.payload_bytes);
  RETURN_IF_ERROR(frames_->receive_payload(header, payload));
  ASSIGN_OR_RETURN(const WireMessage reply, decode_payload(header.type, payload));
  if (const auto* refused = std::get_if<Refused>(&reply)) {
    answered = true;
    return Error(refused->code, refused->why);
  }
  if (!std::holds_alternative<Done>(reply) || !out.empty()) return bad_input("a reply out of turn", "type");
  answered = true;
  return {};
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
