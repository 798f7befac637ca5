// The answer to one request: bytes queued by the handler, written by the connection's coroutine, while another watches
// for a client that leaves.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "server/http_connection.h"
#include "server/http_types.h"

namespace perigee {

class SocketExchange : public Exchange, public std::enable_shared_from_this<SocketExchange> {
 public:
  SocketExchange(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpShared> shared)
      : loop_(std::move(loop)), shared_(std::move(shared)), wake(loop_->context()), poll(loop_->context()) {}

  void respond(HttpReply reply) override;
  void begin_stream(HttpHeaders headers) override;
  void write(std::string data) override;
  void finish(bool close_in) override;
  void on_disconnect(std::function<void()> callback) override;
  void post(std::function<void()> work) override;
  void abandon() noexcept override { abandoned = true; }
  std::shared_ptr<HttpLoop> loop() override { return loop_; }

  void lose();     // the client is gone: tells the handler, unless the answer was complete
  void comment();  // into a stream, unless an event is half written: it would split it
  // Sends what a client that only stopped sending passes over, and what resets the connection of one that has left: a
  // comment in a stream, else, where the version knows them, an interim response.
  void ask_for_life();

  bool ended = false;      // the handler has said everything
  bool gone = false;       // the client has left
  bool streaming = false;  // begin_stream() was called
  bool close = false;      // the connection ends with this answer
  bool http11 = true;
  bool head_only = false;  // the request was HEAD
  std::string unsent;
  std::atomic<bool> abandoned{false};

 private:
  std::string head(int status, std::string_view content_type, const HttpHeaders& headers) const;
  void end();

  const std::shared_ptr<HttpLoop> loop_;
  std::string last_bytes_;  // of the stream's body
  const std::shared_ptr<HttpShared> shared_;
  std::function<void()> callback_;

 public:
  boost::asio::steady_timer wake;  // waited on by the writer; cancelled when there is something to do
  boost::asio::steady_timer poll;  // waited on by the watcher
};

using SocketExchangePtr = std::shared_ptr<SocketExchange>;

// Writes what the exchange queues until it is complete. False: the client is gone.
Task<bool> write_answer(ConnectionPtr connection, SocketExchangePtr exchange);

// Ends the exchange when its client leaves. A client that only shuts down its sending side still gets its answer.
Task<> watch_client(ConnectionPtr connection, SocketExchangePtr exchange);

// The bytes of a whole reply.
std::string reply_bytes(const HttpReply& reply, bool head_only, bool close);

// Sends `reply` outside any handler and ends the connection.
Task<> refuse(ConnectionPtr connection, HttpReply reply, bool head_only);

// The same where memory has run out, unless an answer has begun: the reply needs none.
Task<> refuse_without_memory(ConnectionPtr connection);

// One request on a serving loop, from the end of its head to the end of its answer: the check of the head, the body
// under its budget and its deadline, the handler, the answer. Null: the connection has ended. Otherwise it goes back to
// where heads are read. Throws std::bad_alloc with the connection closed.
Task<std::shared_ptr<HttpPeer>> serve_request(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpPeer> peer,
                                              HttpHead head);

}  // namespace perigee
