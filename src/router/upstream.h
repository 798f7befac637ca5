// UpstreamCall: one request to a worker and its reply, read as it arrives, on one event loop.
//
// Connections that can carry another request are kept, by worker (IdleSockets). One that the worker has closed
// meanwhile is replaced without anybody hearing of it, as long as no byte of a reply has come.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "router/http_response.h"
#include "router/worker_table.h"
#include "server/http_loop.h"

namespace perigee {

// Connections of one loop that wait for their next request. Used on that loop. Those that workers have closed are
// cleared away, so that workers that come and go leave no open files behind.
class IdleSockets {
 public:
  std::shared_ptr<HttpSocket> take(uint64_t worker);  // nullptr: there is none that still lives
  void keep(uint64_t worker, std::shared_ptr<HttpSocket> socket);

 private:
  void sweep();

  std::unordered_map<uint64_t, std::vector<std::shared_ptr<HttpSocket>>> sockets_;  // the latest used last
  double next_sweep_s_ = 0;
};

struct UpstreamTimes {
  double connect_s = 5;
  double silence_s = 1800;  // without a byte of the reply
  double write_s = 60;      // without a byte taken by the worker
};

struct UpstreamTarget {
  uint64_t worker = 0;
  SocketAddress address;
};

class UpstreamCall {
 public:
  UpstreamCall(std::shared_ptr<HttpLoop> loop, IdleSockets& idle, const UpstreamTimes& times)
      : loop_(std::move(loop)), idle_(idle), times_(times) {}
  UpstreamCall(const UpstreamCall&) = delete;
  UpstreamCall& operator=(const UpstreamCall&) = delete;
  ~UpstreamCall() { cancel(); }

  // Sends `head` and `body`, and reads to the end of the reply's head. False: fault() says why there is none. Both
  // texts must outlive the wait. Called once.
  Task<bool> begin(UpstreamTarget target, std::string_view head, std::string_view body);
  const ResponseHead& head() const { return parser_->head(); }

  // The bytes of the body that have arrived since, at least one. "": whole() or fault().
  Task<std::string> read();
  // The whole body; nullopt: fault(), which a body over `max_bytes` is, too.
  Task<std::optional<std::string>> read_all(size_t max_bytes);
  bool whole() const { return whole_; }
  const std::string& fault() const { return fault_; }
  bool cancelled() const { return cancelled_; }

  void end_within(double s);  // cancels it then, if it has not ended; called once it reads
  void cancel();              // closes the connection; whoever waits for it goes on with a fault

 private:
  Task<bool> connect(const SocketAddress& address);
  Task<bool> exchange_heads(std::string_view head, std::string_view body);
  bool take(std::string_view bytes, std::string& out);  // false: there is nothing to wait for
  bool fail(std::string why);
  std::string end_of_connection();

  const std::shared_ptr<HttpLoop> loop_;
  IdleSockets& idle_;
  const UpstreamTimes times_;
  uint64_t worker_ = 0;
  std::shared_ptr<HttpSocket> socket_;
  std::optional<ResponseParser> parser_;
  std::string received_;  // with the head
  bool sent_ = false;     // the whole request: else the worker would read the next one as the rest of it
  bool has_head_ = false, cancelled_ = false, heard_ = false, whole_ = false;
  std::optional<HttpSocket::Steady::time_point> end_at_;
  std::string fault_;
};

}  // namespace perigee
