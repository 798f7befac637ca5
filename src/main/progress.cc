#include "main/progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"

namespace perigee {

void Progress::operator()(const char* phase, int64_t done, int64_t total) {
  const double now = system_clock().now_s();
  if (phase != phase_) {
    if (phase_ != nullptr) begin_s_ = now;  // the first phase began when this object was made
    phase_ = phase;
    last_s_ = now;
  }
  if (done < total && now - last_s_ < 1.0) return;
  last_s_ = now;
  const double elapsed = std::max(now - begin_s_, 1e-9), rate = static_cast<double>(done) / elapsed;
  log_info(fmt::format("{}: {:.{}f} of {:.{}f} {} ({:.0f} %), {:.{}f} {}/s, {:.0f} s left", phase,
                       static_cast<double>(done) / size_, digits_, static_cast<double>(total) / size_, digits_, unit_,
                       total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100.0, rate / size_,
                       digits_, unit_, rate > 0 ? static_cast<double>(total - done) / rate : 0.0));
}

}  // namespace perigee
