// Logging: one line per event to standard error, never from the step path.
//
//   log_info("loaded ", n, " tensors in ", s, " s");
//
// Lines carry a time and a level. The text never holds prompt or reply content.
#pragma once

#include <string>
#include <string_view>

#include "base/check.h"

namespace perigee {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void set_log_level(LogLevel level);
void log_line(LogLevel level, std::string_view text);

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
