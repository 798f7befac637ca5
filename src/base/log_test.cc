#include "base/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "base/eventually.h"

namespace perigee {
namespace {

// Standard error is a pipe while this lives.
class PipedError {
 public:
  PipedError() : saved_(::dup(STDERR_FILENO)) {
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[1]);
    reading_ = ends[0];
  }
  PipedError(const PipedError&) = delete;
  PipedError& operator=(const PipedError&) = delete;
  ~PipedError() {
    restore();
    if (reader_.joinable()) reader_.join();
    ::close(reading_);
  }
  void start_reading() {
    reader_ = std::thread([this] {
      char bytes[4096];
      for (ssize_t n = 1; n > 0;) {
        n = ::read(reading_, bytes, sizeof bytes);
        const std::lock_guard lock(mutex_);
        if (n > 0) text_.append(bytes, static_cast<size_t>(n));
      }
    });
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  void restore() {
    if (saved_ < 0) return;
    ::dup2(saved_, STDERR_FILENO);
    ::close(std::exchange(saved_, -1));
  }

 private:
  int saved_, reading_ = -1;
  std::thread reader_;
  std::mutex mutex_;
  std::string text_;
};

TEST(Log, APipeThatNobodyReadsHoldsNobodyUpAndWhatIsLostIsCounted) {
  constexpr size_t kLines = 20000;
  PipedError piped;
  for (size_t i = 0; i < kLines; ++i) log_info("line ", i, " ", std::string(100, 'x'));  // far more than a pipe holds
  piped.start_reading();
  // Told or counted, every line is there; the writer may count them in several goes.
  size_t told = 0, dropped = 0;
  EXPECT_TRUE(eventually([&] {
    told = dropped = 0;
    std::istringstream text(piped.text());
    for (std::string line; std::getline(text, line);) {
      const size_t at = line.find("warning ");
      if (line.find(" log lines dropped") == std::string::npos)
        ++told;
      else
        dropped += std::strtoul(line.c_str() + at + 8, nullptr, 10);
    }
    return told + dropped == kLines;
  })) << told
      << " told, " << dropped << " dropped";
  const std::string text = piped.text();
  EXPECT_GE(told, 1000u);
  EXPECT_NE(text.find(" info line 0 xxx"), std::string::npos);
  log_info("and on");
  flush_log();
  EXPECT_TRUE(eventually([&] { return piped.text().find(" info and on\n") != std::string::npos; }));
}

TEST(LogDeathTest, AProcessThatEndsAtOnceHasSaidWhy) {
  const auto end = [] {
    log_error("the reason");
    flush_log();
    std::_Exit(3);
  };
  EXPECT_EXIT(end(), testing::ExitedWithCode(3), "error the reason");
  EXPECT_EXIT(write_last_words("the last words\n"); std::_Exit(4), testing::ExitedWithCode(4), "^the last words\n$");
}

TEST(Log, LinesBelowTheLevelAreLeftOut) {
  testing::internal::CaptureStderr();
  set_log_level(LogLevel::kWarning);
  log_info("left out");
  log_warning("said");
  set_log_level(LogLevel::kInfo);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(log.find("left out"), std::string::npos);
  EXPECT_TRUE(log.ends_with(" warning said\n")) << log;
}

}  // namespace
}  // namespace perigee
