#include "main/signals.h"

#include <cstdlib>

#include "base/clock.h"
#include "base/log.h"

namespace perigee {

Signals::Signals() {
  sigemptyset(&set_);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) sigaddset(&set_, signal);
  pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a log that may not grow any more loses lines, and ends nothing
}

std::optional<int> Signals::wait(timespec limit) const {
  const int signal = sigtimedwait(&set_, nullptr, &limit);
  if (signal == SIGTERM || signal == SIGINT) return signal;
  if (signal > 0) log_info(signal == SIGHUP ? "SIGHUP" : signal == SIGUSR1 ? "SIGUSR1" : "SIGUSR2", " has no effect");
  return std::nullopt;
}

int Signals::wait() const {
  for (;;)
    if (const auto signal = wait({.tv_sec = 3600})) return *signal;
}

void leave(int code) {
  flush_log();
  std::_Exit(code);
}

void stop_at_second_signal(const Signals& signals, const std::function<int()>& code) {
  constexpr double kEchoSeconds = 1;
  const double first_s = system_clock().now_s();
  for (;;) {
    const int signal = signals.wait();
    if (const int now = code(); now != 0) leave(now);
    if (signal == SIGTERM && system_clock().now_s() - first_s < kEchoSeconds) {
      log_info("SIGTERM again within a second: the same one");
      continue;
    }
    log_warning("second signal: stopping now");
    leave(0);
  }
}

}  // namespace perigee
