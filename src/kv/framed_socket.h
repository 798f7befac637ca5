// FramedSocket: frames of wire.h over a Socket. Every frame of a session has its digest and incarnation checked; its
// number is checked by whoever counts the requests.
#pragma once

#include <fmt/core.h>

#include <span>
#include <vector>

#include "base/clock.h"
#include "kv/socket.h"
#include "kv/ucx_path.h"
#include "kv/wire.h"

namespace perigee {

class FramedSocket {
 public:
  struct Frame {
    WireHeader header;
    std::vector<uint8_t> payload;
  };

  // The handshake is over within `handshake_s`: who is not known holds no connection by sending a byte now and then.
  FramedSocket(const Socket& socket, double handshake_s)
      : socket_(socket), silence_s_(handshake_s), end_s_(system_clock().now_s() + handshake_s) {}

  void begin_session(uint64_t session, uint64_t incarnation, double silence_s) {
    session_ = session;
    incarnation_ = incarnation;
    silence_s_ = silence_s;
    end_s_ = kNever;
  }
  void set_incarnation(uint64_t incarnation) { incarnation_ = incarnation; }

  Status send(const WireMessage& message, uint32_t number) const {
    std::vector<uint8_t> bytes;
    encode(message, number, incarnation_, session_, bytes);
    return socket_.send(bytes, silence_s_);
  }
  // `ucx`: the way of its payload; null: the socket. The same of receive_payload().
  Status send_raw(std::span<const uint8_t> payload, uint32_t number, UcxPath* ucx = nullptr) const {
    std::array<uint8_t, kWireHeaderBytes> header;
    encode_raw_header(payload, number, incarnation_, session_, header);
    RETURN_IF_ERROR(socket_.send(header, silence_s_));
    if (ucx == nullptr) return socket_.send(payload, silence_s_);
    return ucx->send(payload, silence_s_, [this] { return socket_.is_over(); });
  }

  // Waits at most idle_s for its first byte.
  Result<WireHeader> receive_header(size_t max_bytes, double idle_s) const {
    std::array<uint8_t, kWireHeaderBytes> bytes;
    RETURN_IF_ERROR(socket_.receive(std::span(bytes).first(1), idle_s, end_s_));
    RETURN_IF_ERROR(socket_.receive(std::span(bytes).subspan(1), silence_s_, end_s_));
    return decode_header(bytes, max_bytes);
  }
  Status receive_payload(const WireHeader& header, std::span<uint8_t> payload, UcxPath* ucx = nullptr) const {
    RETURN_IF_ERROR(ucx == nullptr ? socket_.receive(payload, silence_s_, end_s_)
                                   : ucx->receive(payload, silence_s_, [this] { return socket_.is_over(); }));
    RETURN_IF_ERROR(check_digest(header, payload, session_));
    if (incarnation_ != 0 && header.incarnation != incarnation_)
      return bad_input("a frame for another life of this process", "incarnation");
    return {};
  }
  Result<Frame> receive_frame(size_t max_bytes, double idle_s) const {
    Frame frame;
    ASSIGN_OR_RETURN(frame.header, receive_header(max_bytes, idle_s));
    frame.payload.resize(frame.header.payload_bytes);
    RETURN_IF_ERROR(receive_payload(frame.header, frame.payload));
    return frame;
  }
  template <typename T>
  Result<T> receive(size_t max_bytes) const {
    ASSIGN_OR_RETURN(const Frame frame, receive_frame(max_bytes, silence_s_));
    ASSIGN_OR_RETURN(const WireMessage message, decode_payload(frame.header.type, frame.payload));
    const T* wanted = std::get_if<T>(&message);
    if (wanted == nullptr) return bad_input("a frame out of turn", "type");
    return *wanted;
  }

 private:
  const Socket& socket_;
  static constexpr double kNever = 1e300;
  double silence_s_, end_s_;
  uint64_t session_ = 0, incarnation_ = 0;
};

}  // namespace perigee
