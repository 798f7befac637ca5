#include "sim/pd/world.h"

#include <algorithm>
#include <utility>

namespace perigee::sim {
namespace {

constexpr size_t kTraceLines = 60;
constexpr double kNever = 1e200;

World* g_world = nullptr;

}  // namespace

World::World(uint64_t seed, int num_processes)
    : judge{seed, 0}, rng(seed), processes_(static_cast<size_t>(num_processes)) {
  g_world = this;
  for (Process& process : processes_) process.alive = true;
  judge.before_failure = [this] {
    for (const std::string& line : trace_) std::printf("  %s\n", line.c_str());
  };
}

World::~World() {
  g_world = nullptr;
}

World& World::now() {
  return *g_world;
}

void World::add_trace(std::string line) {
  char time[32];
  std::snprintf(time, sizeof time, "%9.4f  ", time_s_);
  trace_.push_back(time + std::move(line));
  if (trace_.size() > kTraceLines) trace_.pop_front();
}

// --- Time ---

double World::clock_s(int process) const {
  const Process& of = processes_[static_cast<size_t>(process)];
  return of.offset_s + of.rate * time_s_;
}

int World::current_process() const {
  const Fiber* fiber = Fiber::current();
  return fiber != nullptr ? fiber->process() : entered_;
}

void World::at(double time_s, std::function<void()> event) {
  events_.push_back({std::max(time_s, time_s_), num_events_++, std::move(event)});
  std::push_heap(events_.begin(), events_.end());
}

bool World::run(const std::function<bool()>& done, double until_s) {
  while (!done()) {
    if (events_.empty() || events_.front().time_s > until_s) return false;
    std::pop_heap(events_.begin(), events_.end());
    const Event event = std::move(events_.back());
    events_.pop_back();
    time_s_ = event.time_s;
    judge.tick = static_cast<int64_t>(event.number);
    event.what();
  }
  return true;
}

// --- Processes ---

void World::set_clock(int process, double offset_s, double rate) {
  Process& of = processes_[static_cast<size_t>(process)];
  of.offset_s = offset_s;
  of.rate = rate;
}

void World::stop(int process, double for_s) {
  Process& of = processes_[static_cast<size_t>(process)];
  of.stopped_until_s = std::max(of.stopped_until_s, time_s_ + for_s);
  trace("process ", process, " stops for ", for_s, " s");
}

void World::kill(int process, bool heard) {
  processes_[static_cast<size_t>(process)].alive = false;
  trace("process ", process, " dies", heard ? "" : " unheard");
  for (auto& [fd, end] : ends_) {
    if (end.process != process || end.over) continue;
    end.over = true;
    wake_all(end.waiting);
    if (heard && !end.listens) end_peer(end.peer, draw_delay_s());
  }
}

int World::start(int process) {
  Process& of = processes_[static_cast<size_t>(process)];
  of.alive = true;
  of.stopped_until_s = 0;
  trace("process ", process, " starts anew");
  return ++of.life;
}

// --- Fibers ---

std::shared_ptr<Fiber> World::spawn(std::function<void()> body) {
  const Fiber* maker = Fiber::current();
  const int process = current_process();
  const int life = maker != nullptr ? maker->life() : processes_[static_cast<size_t>(process)].life;
  auto fiber = std::make_shared<Fiber>(process, life, std::move(body));
  fibers_.push_back(fiber);
  after(0, [this, fiber] { resume(fiber.get()); });
  return fiber;
}

// A process that is stopped runs later.
void World::resume(Fiber* fiber) {
  const double until_s = stopped_until_s(fiber->process());
  if (until_s > time_s_ && alive(fiber->process())) {
    at(until_s, [this, fiber] { resume(fiber); });
    return;
  }
  fiber->resume();
  if (fiber->ended()) wake_all(fiber->joiners);
}

bool World::wait(double seconds) {
  Fiber* fiber = Fiber::current();
  CHECK(fiber != nullptr, "the main loop would wait");
  const uint64_t wait = ++fiber->num_waits;
  fiber->woken = false;
  bool in_time = true;
  const double rate = processes_[static_cast<size_t>(fiber->process())].rate;
  if (seconds < kNever)
    after(std::max(seconds, 0.0) / rate, [this, fiber, wait, &in_time] {
      if (fiber->ended() || fiber->num_waits != wait || fiber->woken) return;
      in_time = false;
      fiber->woken = true;
      resume(fiber);
    });
  Fiber::suspend();
  return in_time;
}

void World::wake(Fiber* fiber) {
  if (fiber->ended() || fiber->woken) return;
  fiber->woken = true;
  after(0, [this, fiber] { resume(fiber); });
}

void World::wake_all(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : std::exchange(waiting, {})) wake(fiber);
}

// --- The network ---

double World::draw_delay_s() {
  double delay_s = weather.delay_s * (0.2 + 1.6 * rng.unit());
  if (rng.chance(weather.slow)) {
    count("a slow segment");
    delay_s += weather.slow_s * rng.unit();
  }
  return delay_s;
}

void World::part(int a, int b, double for_s) {
  double& until = parted_[std::minmax(a, b)];
  until = std::max(until, time_s_ + for_s);
  trace("processes ", a, " and ", b, " are parted for ", for_s, " s");
}

double World::passes_at_s(int a, int b) const {
  const auto found = parted_.find(std::minmax(a, b));
  return found == parted_.end() ? time_s_ : std::max(time_s_, found->second);
}

World::End* World::end(int fd) {
  const auto found = ends_.find(fd);
  return found == ends_.end() ? nullptr : &found->second;
}

bool World::is_dead(const End& end) const {
  const Process& process = processes_[static_cast<size_t>(end.process)];
  return !process.alive || process.life != end.life;
}

int World::listen() {
  const int process = current_process(), fd = next_fd_++;
  ends_[fd] = {.process = process, .life = processes_[static_cast<size_t>(process)].life, .listens = true};
  return fd;
}

// Within the fiber's wait for the way there and back.
int World::connect(int to) {
  const int from = current_process();
  const double there_s = passes_at_s(from, to) + draw_delay_s() - time_s_;
  const bool refused = rng.chance(weather.refuse);
  (void)wait(2 * there_s);
  if (!alive(from) || Fiber::current()->life() != processes_[static_cast<size_t>(from)].life) return -1;
  if (refused) count("a connection refused");
  const auto listener = std::find_if(ends_.begin(), ends_.end(), [&](const auto& entry) {
    return entry.second.listens && entry.second.process == to && !entry.second.over && !is_dead(entry.second);
  });
  if (refused || listener == ends_.end()) return -1;
  const int here = next_fd_++, there = next_fd_++;
  ends_[here] = {.process = from, .life = processes_[static_cast<size_t>(from)].life, .peer = there};
  ends_[there] = {.process = to, .life = processes_[static_cast<size_t>(to)].life, .peer = here};
  listener->second.accepted.push_back(there);
  wake_all(listener->second.waiting);
  return here;
}

int World::accept(int fd) {
  for (;;) {
    End* listener = end(fd);
    if (listener == nullptr || listener->over) return -1;
    if (!listener->accepted.empty()) {
      const int made = listener->accepted.front();
      listener->accepted.pop_front();
      return made;
    }
    listener->waiting.push_back(Fiber::current());
    (void)wait(kNever);
  }
}

int World::port(int fd) const {
  const auto found = ends_.find(fd);
  return found == ends_.end() ? 0 : found->second.process;
}

bool World::send(int fd, std::span<const uint8_t> bytes) {
  End* from = end(fd);
  if (from == nullptr || from->over || is_dead(*from)) return false;
  End* to = end(from->peer);
  if (to == nullptr) return true;  // it is told so later
  std::vector<uint8_t> segment(bytes.begin(), bytes.end());
  note(segment.size());
  if (rng.chance(weather.corrupt)) {
    count("a segment corrupted");
    segment[rng.below(segment.size())] ^= static_cast<uint8_t>(1u << rng.below(8));
  }
  if (rng.chance(weather.cut)) {
    count("a connection cut");
    trace("the connection of processes ", from->process, " and ", to->process, " is cut");
    const int here = fd, there = from->peer;
    segment.resize(rng.below(segment.size() + 1));
    deliver(there, std::move(segment));
    end_peer(there, draw_delay_s());
    end_peer(here, draw_delay_s());
    return true;
  }
  if (rng.chance(weather.reorder) && to->held_back.empty()) {
    count("a segment overtaken");
    to->held_back = std::move(segment);
    const int there = from->peer;
    after(0.05, [this, there] {
      End* held = end(there);
      if (held != nullptr && !held->held_back.empty()) deliver(there, std::exchange(held->held_back, {}));
    });
    return true;
  }
  deliver(from->peer, segment);
  if (rng.chance(weather.repeat)) {  // alone, or with the one before it: a frame's header and payload are two
    count("a segment repeated");
    if (rng.chance(0.7)) deliver(from->peer, to->newest);
    deliver(from->peer, segment);
  }
  to->newest = std::move(segment);
  if (!to->held_back.empty()) deliver(from->peer, std::exchange(to->held_back, {}));
  return true;
}

// Each arrives after those before it.
void World::deliver(int fd, std::vector<uint8_t> segment) {
  End* to = end(fd);
  const End* from = end(to->peer);
  const double passes_s = from == nullptr ? time_s_ : passes_at_s(from->process, to->process);
  if (passes_s > time_s_) count("a segment held up by a partition");
  to->last_arrival_s = std::max(to->last_arrival_s, passes_s + draw_delay_s());
  at(to->last_arrival_s, [this, fd, segment = std::move(segment)] {
    End* end = this->end(fd);
    if (end == nullptr || end->over || is_dead(*end)) return;
    end->bytes.insert(end->bytes.end(), segment.begin(), segment.end());
    wake_all(end->waiting);
  });
}

void World::end_peer(int fd, double delay_s) {
  End* to = end(fd);
  if (to == nullptr) return;
  to->last_arrival_s = std::max(to->last_arrival_s, time_s_ + delay_s);
  at(to->last_arrival_s, [this, fd] {
    End* end = this->end(fd);
    if (end == nullptr) return;
    end->over = true;
    wake_all(end->waiting);
  });
}

int64_t World::receive(int fd, std::span<uint8_t> bytes, double timeout_s) {
  for (bool again = false;; again = true) {
    End* from = end(fd);
    if (from == nullptr || is_dead(*from)) return 0;
    if (!from->bytes.empty()) {
      const size_t count = std::min(bytes.size(), from->bytes.size());
      std::copy_n(from->bytes.begin(), count, bytes.begin());
      from->bytes.erase(from->bytes.begin(), from->bytes.begin() + static_cast<std::ptrdiff_t>(count));
      return static_cast<int64_t>(count);
    }
    if (from->over) return 0;
    if (again) return -1;
    from->waiting.push_back(Fiber::current());
    (void)wait(timeout_s);
    if (End* left = end(fd)) std::erase(left->waiting, Fiber::current());
  }
}

void World::shut(int fd) {
  End* end = this->end(fd);
  if (end == nullptr || end->over) return;
  end->over = true;
  wake_all(end->waiting);
  if (!end->listens && !is_dead(*end)) end_peer(end->peer, draw_delay_s());
}

void World::close(int fd) {
  shut(fd);
  const auto found = ends_.find(fd);
  if (found == ends_.end()) return;
  for (const int waiting : std::exchange(found->second.accepted, {})) close(waiting);
  ends_.erase(fd);
}

}  // namespace perigee::sim
