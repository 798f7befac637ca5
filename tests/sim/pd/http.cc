#include "sim/pd/http.h"

#include <utility>

namespace perigee::sim {

std::vector<HttpDoor>& http_doors() {
  static std::vector<HttpDoor> doors;
  return doors;
}

std::vector<std::weak_ptr<HttpCall>>& http_calls() {
  static std::vector<std::weak_ptr<HttpCall>> calls;
  return calls;
}

void HttpCall::ask() {
  World& world = World::now();
  std::erase_if(http_calls(), [](const auto& call) { return call.expired(); });
  http_calls().push_back(weak_from_this());
  const double arrival_s = world.passes_at_s(0, node) + world.draw_delay_s();
  if (world.rng.chance(world.weather.refuse)) return fail("cannot connect");
  world.at(arrival_s, [self = shared_from_this()] {
    World& now = World::now();
    if (self->over_) return;
    const HttpDoor& door = http_doors()[static_cast<size_t>(self->node)];
    if (!now.alive(self->node) || !door) return self->fail("cannot connect");
    const double until_s = now.stopped_until_s(self->node);
    now.at(until_s, [self] {
      const HttpDoor& later = http_doors()[static_cast<size_t>(self->node)];
      if (later) later(self);
    });
  });
}

void HttpCall::go_on() {
  if (waiting) std::exchange(waiting, nullptr).resume();
}

void HttpCall::fail(std::string why) {
  World::now().after(0, [self = shared_from_this(), why = std::move(why)] {
    if (self->over_) return;
    self->over_ = true;
    self->fault = why;
    self->go_on();
  });
}

void HttpCall::hang_up() {
  if (std::exchange(over_, true)) return;
  if (fault.empty()) fault = "cancelled";
  World& world = World::now();
  world.at(world.passes_at_s(0, node) + world.draw_delay_s(), [self = shared_from_this()] {
    self->gone_ = true;
    if (self->on_disconnect) std::exchange(self->on_disconnect, nullptr)();
  });
  world.after(0, [self = shared_from_this()] { self->go_on(); });
}

void HttpCall::cut() {
  if (over_ || whole) return;
  World::now().count("an HTTP connection cut");
  fail("the connection broke");
  World::now().after(World::now().draw_delay_s(), [self = shared_from_this()] {
    self->gone_ = true;
    if (self->on_disconnect) std::exchange(self->on_disconnect, nullptr)();
  });
}

// In order, unless the node dies meanwhile: what it has sent may arrive still.
void HttpCall::send_back(std::function<void()> what) {
  World& world = World::now();
  if (gone_ || !world.alive(node)) return;
  last_arrival_s_ = std::max(last_arrival_s_, world.passes_at_s(0, node) + world.draw_delay_s());
  world.at(last_arrival_s_, [self = shared_from_this(), what = std::move(what)] {
    if (self->over_) return;
    what();
    self->go_on();
  });
}

void HttpCall::begin(int status_in, bool streams_in) {
  send_back([this, status_in, streams_in] {
    has_head = true;
    status = status_in;
    streams = streams_in;
  });
}

void HttpCall::write(std::string piece) {
  send_back([this, piece = std::move(piece)] { pieces.push_back(piece); });
}

void HttpCall::finish() {
  on_disconnect = nullptr;
  send_back([this] {
    whole = true;
    over_ = true;
  });
}

}  // namespace perigee::sim
