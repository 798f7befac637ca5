// Leases over TCP: the server of a LeaseTable, and the Peer that reads one from elsewhere. The frames are wire.h's.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "base/thread.h"
#include "kv/peer.h"
#include "kv/socket.h"

namespace perigee {

struct TcpOptions {
  std::string secret;      // both sides' the same
  double handshake_s = 5;  // until both are known
  double silence_s = 10;   // of a peer within a frame, or before a reply
  double idle_s = 600;     // of a connection without a request
  int32_t max_connections = 512;
  int32_t streams = 4;            // connections of one transfer, where it has as many pieces
  int64_t piece_bytes = 1 << 20;  // of one read, at least a unit
  bool areas = true;              // by memory that both processes map, where both can
  bool units_over_tcp = true;     // else the others' carriers alone
  bool ucx = false;               // units in host memory go over UCX (ucx_path.h), or not at all

  // For leases of so many seconds: a peer that says nothing is given up before the lease that it gave has ended.
  static TcpOptions for_leases(std::string secret, double lease_s) {
    return {.secret = std::move(secret), .handshake_s = lease_s / 6, .silence_s = lease_s / 3};
  }
};

bool is_loopback(const std::string& host);

// Serves a table until it goes. A thread for each connection.
class LeaseServer {
 public:
  // Port 0: any. kBadInput: a host beyond loopback without a secret. `table` outlives the server.
  static Result<std::unique_ptr<LeaseServer>> start(LeaseTable& table, const std::string& host, int port,
                                                    TcpOptions options);
  ~LeaseServer() { stop(); }
  void stop();  // ends all connections, and waits for their threads. One caller
  int port() const { return listener_.port(); }
  int64_t num_refused() const { return num_refused_; }  // connections that ended with a bad frame or tag

 private:
  struct Connection {
    Socket socket;
    Thread thread;
    std::atomic<bool> ended{false};
  };
  LeaseServer(LeaseTable& table, Socket listener, TcpOptions options);
  void accept();
  Status serve_within_memory(const Socket& socket);
  Status serve(const Socket& socket);

  LeaseTable& table_;
  const Socket listener_;
  const TcpOptions options_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> num_refused_{0};
  std::list<Connection> connections_;  // of the thread that accepts
  Thread thread_;
};

// Peers are named "host:port". A connection that was lost while it was idle is made anew.
Connect connect_by_tcp(TcpOptions options);

}  // namespace perigee
