// World: virtual time, processes, and the network between them.
//
// A process is a node or the router (number 0, with the clients). Each has a clock that starts anywhere and runs a
// little fast or slow. It can stop for a while, as by SIGSTOP, and die, heard or unheard; its fibers then go on in an
// afterlife in which no byte reaches anybody, until its memory is given back.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/rng.h"
#include "sim/judge.h"
#include "sim/pd/fiber.h"

namespace perigee::sim {

// Chances of what the network does to a segment, which is what one send() gives it, and its delays in seconds.
struct Weather {
  double cut = 0, corrupt = 0, repeat = 0, reorder = 0, slow = 0;
  double delay_s = 0.002, slow_s = 0.5;
  double refuse = 0;  // a connection
};

class World {
 public:
  World(uint64_t seed, int num_processes);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  static World& now();  // the one there is

  // --- Time ---
  double time_s() const { return time_s_; }
  double clock_s(int process) const;  // as that process reads it
  double here_s() const { return clock_s(current_process()); }
  int current_process() const;
  void at(double time_s, std::function<void()> event);
  void after(double delay_s, std::function<void()> event) { at(time_s_ + delay_s, std::move(event)); }
  // Runs events until `done`. False: none is left, or the time is over.
  bool run(const std::function<bool()>& done, double until_s);

  // --- Processes ---
  bool alive(int process) const { return processes_[static_cast<size_t>(process)].alive; }
  void set_clock(int process, double offset_s, double rate);
  void stop(int process, double for_s);  // it does nothing meanwhile
  double stopped_until_s(int process) const { return processes_[static_cast<size_t>(process)].stopped_until_s; }
  void kill(int process, bool heard);  // its connections end; unheard: nobody is told
  int start(int process);              // a new life; the life's number, from 1
  // Of everything that is made meanwhile; -1: the main loop's own.
  void enter(int process) { entered_ = process; }
  void leave() { entered_ = 0; }

  // --- Fibers, and their waits ---
  std::shared_ptr<Fiber> spawn(std::function<void()> body);  // of the current process
  bool wait(double seconds);                                 // of the current fiber; false: nobody woke it
  void wake(Fiber* fiber);

  // --- The network ---
  Weather weather;
  void part(int a, int b, double for_s);   // nothing passes between them meanwhile; what is sent comes later
  double passes_at_s(int a, int b) const;  // not before that
  // For messages that are not segments (HTTP): how long one takes now.
  double draw_delay_s();

  void count(std::string_view what, int64_t times = 1) { counts_[std::string(what)] += times; }
  const std::map<std::string, int64_t>& counts() const { return counts_; }
  void note(uint64_t value) { hash_ = mix64(hash_ * 31 + value); }
  uint64_t hash() const { return hash_; }
  // The newest lines are printed when the judge finds something.
  template <typename... Parts>
  void trace(const Parts&... parts) {
    if (tracing) add_trace(str_cat(parts...));
  }
  bool tracing = false;
  bool calm = false;  // nothing goes wrong any more

  Judge judge;
  Rng rng;
  std::function<void(int process, const void* page)> on_touch;

  // --- Sockets: kv/socket.h ---
  int connect(int to);  // -1: refused
  int listen();         // of the current process
  int accept(int fd);   // -1: it was stopped
  int port(int fd) const;
  bool send(int fd, std::span<const uint8_t> bytes);
  // Some bytes: how many; 0: the connection has ended; -1: none within that time.
  int64_t receive(int fd, std::span<uint8_t> bytes, double timeout_s);
  void shut(int fd);  // ends it and all waits on it
  void close(int fd);

 private:
  struct Event {
    double time_s;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return time_s != other.time_s ? time_s > other.time_s : number > other.number;
    }
  };
  struct Process {
    bool alive = false;
    int life = 0;
    double offset_s = 0, rate = 1, stopped_until_s = 0;
  };
  struct End {  // of a connection, or what listens
    int process = 0, life = 0, peer = -1;
    std::deque<uint8_t> bytes;
    std::deque<int> accepted;
    bool over = false;
    bool listens = false;
    double last_arrival_s = 0;       // of what it was sent
    std::vector<uint8_t> held_back;  // a segment that the next one overtakes
    std::vector<uint8_t> newest;     // the last segment that it was sent
    std::vector<Fiber*> waiting;
  };

  End* end(int fd);
  void resume(Fiber* fiber);
  void deliver(int fd, std::vector<uint8_t> segment);
  void end_peer(int fd, double delay_s);
  void wake_all(std::vector<Fiber*>& waiting);
  bool is_dead(const End& end) const;
  void add_trace(std::string line);

  double time_s_ = 0;
  uint64_t num_events_ = 0;
  std::vector<Event> events_;  // a heap
  std::vector<Process> processes_;
  int entered_ = 0;
  std::vector<std::shared_ptr<Fiber>> fibers_;
  std::map<int, End> ends_;
  int next_fd_ = 1;
  std::map<std::pair<int, int>, double> parted_;
  std::map<std::string, int64_t> counts_;
  uint64_t hash_ = 0;
  std::deque<std::string> trace_;
};

}  // namespace perigee::sim
