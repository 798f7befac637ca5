// The signals that a serving process handles: SIGTERM and SIGINT end it in order, a second one at once.
#pragma once

#include <csignal>
#include <functional>
#include <optional>

namespace perigee {

// They are blocked in this and all later threads, so that waiting for them is the only way to see them.
class Signals {
 public:
  Signals();
  // SIGTERM or SIGINT; nullopt: `limit` is over. The others mean nothing here, and end nothing.
  std::optional<int> wait(timespec limit) const;
  int wait() const;
  static const char* name(int signal) { return signal == SIGTERM ? "SIGTERM" : "SIGINT"; }

 private:
  sigset_t set_;
};

// Ends the process without its destructors: what runs in it cannot be waited for.
[[noreturn]] void leave(int code);

// A second signal ends the process at once. A SIGTERM within a second of the first is its echo: whoever signals the
// process group and a supervisor that passes it on both send one. Where `code` is not 0, the process ends with it.
[[noreturn]] void stop_at_second_signal(const Signals& signals, const std::function<int()>& code);

}  // namespace perigee
