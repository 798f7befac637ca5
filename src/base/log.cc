#include "base/log.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace perigee {
namespace {

constexpr size_t kMaxLines = 4096;
constexpr size_t kMaxBytes = 4u << 20;
constexpr std::chrono::seconds kFlushLimit(1);

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
  }
  return "info";
}

const char* colour_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "\033[36m";
    case LogLevel::kInfo: return "\033[32m";
    case LogLevel::kWarning: return "\033[33m\033[1m";
    case LogLevel::kError: return "\033[31m\033[1m";
  }
  return "";
}

// "2026-11-22 10:24:50.123 info TEXT\n"
std::string line_of(LogLevel level, std::string_view text, bool coloured) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm local{};
  localtime_r(&now.tv_sec, &local);
  char time[32];
  const size_t n = std::strftime(time, sizeof time, "%Y-%m-%d %H:%M:%S", &local);
  std::snprintf(time + n, sizeof time - n, ".%03d ", static_cast<int>(now.tv_nsec / 1'000'000));
  std::string line = time;
  line.reserve(line.size() + text.size() + 24);
  if (coloured) line += colour_of(level);
  line += name_of(level);
  if (coloured) line += "\033[0m";
  line += ' ';
  line += text;
  line += '\n';
  return line;
}

void write_whole(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, bytes.data(), bytes.size());
    if (n < 0 && errno == EAGAIN) {  // somebody made it non-blocking
      pollfd entry{STDERR_FILENO, POLLOUT, 0};
      ::poll(&entry, 1, 100);
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nobody is left to tell
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

// Lines on their way to a reader that may stop reading. Never destroyed: threads may log while the process ends.
class LogQueue {
 public:
  // Says so when it could not take the line, for want of room or memory; it is counted then.
  void push(std::string line) {
    const std::lock_guard lock(mutex_);
    if (lines_.size() >= kMaxLines || bytes_ + line.size() > kMaxBytes) {
      ++dropped_;
      return;
    }
    if (writer_of_ != ::getpid()) start_writer();
    const size_t size = line.size();
    lines_.push_back(std::move(line));
    bytes_ += size;
    arrived_.notify_one();
  }
  void count_dropped() {
    const std::lock_guard lock(mutex_);
    ++dropped_;
  }
  void flush() {
    std::unique_lock lock(mutex_);
    if (writer_of_ != ::getpid()) return;
    written_.wait_for(lock, kFlushLimit, [this] { return lines_.empty() && !writing_; });
  }

 private:
  void start_writer() {
    lines_.clear();  // of a child after fork(): its parent writes them
    bytes_ = 0;
    // Without signals: one that ends the process, or that another thread waits for, must not find this one.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { write_all(); }).detach();
      writer_of_ = ::getpid();
    } catch (const std::exception&) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  static void say_dropped(size_t dropped) noexcept {
    try {
      write_whole(line_of(LogLevel::kWarning, fmt::format("{} log lines dropped: nothing read them", dropped), false));
    } catch (const std::exception&) {
      write_whole("log lines dropped: out of memory\n");
    }
  }
  void write_all() {
    std::unique_lock lock(mutex_);
    for (;;) {
      arrived_.wait(lock, [this] { return !lines_.empty(); });
      std::vector<std::string> lines;  // unlike a deque it needs no memory to be empty
      lines.swap(lines_);
      bytes_ = 0;
      const size_t dropped = std::exchange(dropped_, 0);
      writing_ = true;
      lock.unlock();
      for (const std::string& line : lines) write_whole(line);
      if (dropped > 0) say_dropped(dropped);
      lock.lock();
      writing_ = false;
      written_.notify_all();
    }
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable arrived_, written_;
  std::vector<std::string> lines_;
  size_t bytes_ = 0;
  size_t dropped_ = 0;
  bool writing_ = false;
  pid_t writer_of_ = 0;  // the process whose thread writes
};

LogQueue& queue() {
  alignas(LogQueue) static std::byte memory[sizeof(LogQueue)];  // none is asked for: lines are counted without any
  static LogQueue* const instance = [] {
    auto* made = new (memory) LogQueue;
    std::atexit(flush_log);
    return made;
  }();
  return *instance;
}

std::atomic<LogLevel> lowest_level{LogLevel::kInfo};

// Where nobody has to read what is written for the write to end.
bool never_waits_for_a_reader() {
  struct stat about {};
  return ::fstat(STDERR_FILENO, &about) == 0 && S_ISREG(about.st_mode);
}

}  // namespace

void set_log_level(LogLevel level) {
  lowest_level = level;
}

void log_line(LogLevel level, std::string_view text) noexcept {
  if (level < lowest_level.load(std::memory_order_relaxed)) return;
  try {
    const bool direct = never_waits_for_a_reader();
    std::string line = line_of(level, text, !direct && ::isatty(STDERR_FILENO) == 1);
    if (direct)
      write_whole(line);
    else
      queue().push(std::move(line));
  } catch (const std::exception&) {
    queue().count_dropped();
  }
}

void flush_log() {
  queue().flush();
}

void write_last_words(std::string_view text) {
  flush_log();
  pollfd entry{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&entry, 1, static_cast<int>(std::chrono::milliseconds(kFlushLimit).count())) <= 0) return;
  constexpr size_t kNeverWaits = 4096;  // a pipe that takes anything takes as much
  const ssize_t written = ::write(STDERR_FILENO, text.data(), std::min(text.size(), kNeverWaits));
  static_cast<void>(written);
}

}  // namespace perigee
