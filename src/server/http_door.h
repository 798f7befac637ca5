// The door: the one loop where connections stand between requests. It reads heads, answers probes itself and hands
// every other request to a serving loop, so a probe is answered whatever the serving loops do.
//
// It bounds who stands there. A new connection has its head time from the accept on, a kept one its idle time. When all
// places are taken, the connections that were silent for longest make room; some places are never given to requests,
// so that a probe gets in while every other one is served. Nothing here depends on the client's address.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <vector>

#include "server/http_connection.h"
#include "server/http_types.h"

namespace perigee {

class HttpDoor {
 public:
  // Requests are dealt to `serving` in turn. Outlives the threads of all loops.
  HttpDoor(std::shared_ptr<HttpLoop> loop, std::vector<std::shared_ptr<HttpLoop>> serving,
           std::shared_ptr<HttpShared> shared);
  HttpDoor(const HttpDoor&) = delete;
  HttpDoor& operator=(const HttpDoor&) = delete;

  // On the door's loop. Takes the connections that wait at a listening socket; false: it could not, try again later.
  bool accept_from(int listener);
  // On the door's loop. Reads the next head of a connection; without memory to, the connection closes.
  void enter(std::shared_ptr<HttpPeer> peer);

 private:
  using Standing = std::list<HttpConnection*>;
  class Place;

  void make_room();
  void evict_longest_silent();
  void say_closed(const std::string& why);  // in the log, once in a while

  Task<> stand(std::shared_ptr<HttpPeer> peer);
  Task<bool> receive(ConnectionPtr connection, HttpHead& head);
  Task<HeadFault> read_head(ConnectionPtr connection, Place& place, HttpHead& head);
  Task<bool> answer_probe(ConnectionPtr connection, const HttpHead& head, HttpReply reply);
  void hand_over(const ConnectionPtr& connection, HttpHead head);
  Task<> serve(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpPeer> peer, HttpHead head);

  const std::shared_ptr<HttpLoop> loop_;
  const std::vector<std::shared_ptr<HttpLoop>> serving_;
  const std::shared_ptr<HttpShared> shared_;
  size_t next_ = 0;    // of serving_
  Standing standing_;  // the longest silent first
  std::chrono::steady_clock::time_point quiet_until_;
};

}  // namespace perigee
