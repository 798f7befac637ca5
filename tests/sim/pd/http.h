// HTTP between the router and the nodes, without its bytes: one request, and the pieces of its reply as they arrive.
#pragma once

#include <coroutine>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "sim/pd/world.h"

namespace perigee::sim {

struct HttpCall : std::enable_shared_from_this<HttpCall> {
  explicit HttpCall(int node_in) : node(node_in) {}

  const int node;
  std::string id, body;  // of the request

  // --- The node's side ---
  void begin(int status, bool streams);
  void write(std::string piece);
  void finish();                        // the reply is whole
  std::function<void()> on_disconnect;  // the router is gone

  // --- The router's side ---
  void ask();  // sends the request
  void hang_up();
  void fail(std::string why);
  std::deque<std::string> pieces;
  bool has_head = false, streams = false, whole = false;
  int status = 0;
  std::string fault;
  std::coroutine_handle<> waiting;

  // As if the connection had broken; both sides hear of it.
  void cut();

 private:
  void send_back(std::function<void()> what);
  void go_on();
  double last_arrival_s_ = 0;
  bool over_ = false;  // on the router's side
  bool gone_ = false;  // on the node's
};

// A node's door, by process; null while it does not listen.
using HttpDoor = std::function<void(std::shared_ptr<HttpCall>)>;
std::vector<HttpDoor>& http_doors();
// Calls under way, for faults.
std::vector<std::weak_ptr<HttpCall>>& http_calls();

}  // namespace perigee::sim
