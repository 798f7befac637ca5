// The simulation's clock, threads and sockets, under the names that src/kv and src/router use.

#include "base/clock.h"
#include "base/thread.h"
#include "kv/socket.h"
#include "sim/pd/world.h"

namespace perigee {
namespace {

using sim::Fiber;
using sim::World;

struct ClockHere final : Clock {
  double now_s() const override { return World::now().here_s(); }
};

Error over(const char* what) {
  return Error(Code::kUnavailable, what);
}

}  // namespace

const Clock& system_clock() {
  static const ClockHere clock;
  return clock;
}

double wall_time_s() {
  return World::now().time_s();
}

Thread::Thread(std::function<void()> body) : fiber_(World::now().spawn(std::move(body))) {}

void Thread::join() {
  while (!fiber_->ended()) {
    fiber_->joiners.push_back(Fiber::current());
    (void)World::now().wait(1e300);
  }
  fiber_.reset();
}

void WaitCondition::notify_one() {
  if (waiting_.empty()) return;
  World::now().wake(waiting_.front());
  waiting_.erase(waiting_.begin());
}

void WaitCondition::notify_all() {
  for (Fiber* fiber : std::exchange(waiting_, {})) World::now().wake(fiber);
}

bool WaitCondition::wait_s(std::unique_lock<std::mutex>& lock, double seconds) {
  Fiber* const fiber = Fiber::current();
  waiting_.push_back(fiber);
  lock.unlock();
  const bool in_time = World::now().wait(seconds);
  std::erase(waiting_, fiber);
  lock.lock();
  return in_time;
}

void sleep_s(double seconds) {
  (void)World::now().wait(seconds);
}

void about_to_touch(const void* page) {
  World& world = World::now();
  const int process = world.current_process();
  if (world.on_touch) world.on_touch(process, page);
  if (Fiber::current() == nullptr || !world.rng.chance(0.1)) return;
  (void)world.wait(world.rng.unit() * 0.03);
  if (world.on_touch) world.on_touch(process, page);
}

// "node:N"
void Socket::Shut::operator()() const noexcept {
  World::now().shut(fd);
}

void Socket::end_with(const std::stop_token& stop) {
  if (stop.stop_possible()) on_stop_ = std::make_unique<std::stop_callback<Shut>>(stop, Shut{fd_});
}

Result<Socket> Socket::connect(const std::string& peer, double timeout_s, const std::stop_token& stop) {
  World& world = World::now();
  const size_t colon = peer.rfind(':');
  const int to = colon == std::string::npos ? 0 : std::atoi(peer.c_str() + colon + 1);
  if (to < 1) return bad_input("no such peer", "peer");
  const double there_s = world.passes_at_s(world.current_process(), to) - world.time_s();
  if (there_s > timeout_s) {
    world.count("a connection timed out");
    sleep_s(timeout_s);
    return over("no connection in time");
  }
  Socket socket(world.connect(to));
  if (!socket.valid()) return over("connection refused");
  socket.end_with(stop);
  if (stop.stop_requested()) return over("the engine is shutting down");
  return socket;
}

Result<Socket> Socket::listen(const std::string&, int) {
  return Socket(World::now().listen());
}

Result<Socket> Socket::accept() const {
  const int fd = World::now().accept(fd_);
  return fd < 0 ? Result<Socket>(over("stopped")) : Result<Socket>(Socket(fd));
}

int Socket::port() const {
  return World::now().port(fd_);
}

Status Socket::send(std::span<const uint8_t> bytes, double) const {
  if (bytes.empty()) return {};
  return World::now().send(fd_, bytes) ? Status() : Status(over("the connection is over"));
}

Status Socket::receive(std::span<uint8_t> bytes, double timeout_s, double end_s) const {
  while (!bytes.empty()) {
    const double left_s = end_s - system_clock().now_s();
    if (left_s <= 0) return over("the peer was too slow");
    const int64_t got = World::now().receive(fd_, bytes, std::min(timeout_s, left_s));
    if (got < 0) {
      World::now().count("a peer was silent too long");
      return over("the peer was silent");
    }
    if (got == 0) return over("the peer has closed the connection");
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
  return {};
}

bool Socket::is_over() const {
  return false;  // only carriers that the simulation does not have look at it
}

void Socket::stop() const {
  if (fd_ >= 0) Shut{fd_}();
}

void Socket::close() {
  on_stop_.reset();
  if (fd_ >= 0) World::now().close(std::exchange(fd_, -1));
}

}  // namespace perigee
