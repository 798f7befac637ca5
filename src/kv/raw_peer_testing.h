// Test only: a client of a LeaseServer that knows the secret and may ask for anything.
#pragma once

#include <string>
#include <utility>

#include "base/check.h"
#include "kv/framed_socket.h"

namespace perigee {

class RawPeer {
 public:
  RawPeer(int port, const std::string& secret, uint64_t incarnation)
      : socket_(std::move(Socket::connect("127.0.0.1:" + std::to_string(port), kSilenceS)).value()),
        frames_(socket_, kSilenceS) {
    const Nonce nonce = make_nonce();
    CHECK(frames_.send(Hello{nonce}, 0).ok());
    const auto welcome = frames_.receive<Welcome>(kMaxHandshakeBytes);
    CHECK(welcome.ok() && frames_.send(Proof{tag_of(secret, "client", nonce, welcome->nonce)}, 0).ok());
    frames_.begin_session(session_of(secret, nonce, welcome->nonce), 0, kSilenceS);
    CHECK(frames_.receive<Ready>(kMaxHandshakeBytes).ok());
    frames_.set_incarnation(incarnation);
  }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // An error: the connection has ended, or the reply is raw bytes.
  Result<WireMessage> ask(const WireMessage& request) { return ask(request, ++number_); }
  Result<WireMessage> ask(const WireMessage& request, uint32_t number) {
    RETURN_IF_ERROR(frames_.send(request, number));
    ASSIGN_OR_RETURN(const FramedSocket::Frame frame, frames_.receive_frame(kMaxReadBytes, kSilenceS));
    return decode_payload(frame.header.type, frame.payload);
  }

 private:
  static constexpr double kSilenceS = 60;  // far longer than a busy machine takes
  const Socket socket_;
  FramedSocket frames_;
  uint32_t number_ = 0;
};

}  // namespace perigee
