// Logging: one line per event to standard error, never from the step path.
//
//   log_info("loaded ", n, " tensors in ", s, " s");
//
// Lines carry a time and a level. The text never holds prompt or reply content. To log never waits for a reader: where
// standard error is a pipe, a terminal or a socket, a thread of its own writes, and over 4,096 waiting lines or 4 MiB
// lines are dropped and counted. To a file lines are written at once.
#pragma once

#include <string>
#include <string_view>

#include "base/check.h"

namespace perigee {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void set_log_level(LogLevel level);
void log_line(LogLevel level, std::string_view text) noexcept;

// Returns when what was logged is written, or after a second. For whoever ends the process by _Exit(); at a normal end
// it is called.
void flush_log();

// For a process that ends now: flushes, then writes `text`, unless nothing takes it within a second.
void write_last_words(std::string_view text);

template <typename... Parts>
void log_debug(const Parts&... parts) {
  log_line(LogLevel::kDebug, str_cat(parts...));
}
template <typename... Parts>
void log_info(const Parts&... parts) {
  log_line(LogLevel::kInfo, str_cat(parts...));
}
template <typename... Parts>
void log_warning(const Parts&... parts) {
  log_line(LogLevel::kWarning, str_cat(parts...));
}
template <typename... Parts>
void log_error(const Parts&... parts) {
  log_line(LogLevel::kError, str_cat(parts...));
}

}  // namespace perigee
