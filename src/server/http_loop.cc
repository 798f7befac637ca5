#include "server/http_loop.h"

#include <boost/asio/post.hpp>

#include "base/log.h"
#include "server/http_connection.h"

namespace perigee {

void HttpLoop::start() {
  thread_ = std::thread([this] { run(); });
}

// What throws is a callback that ran out of memory; the callbacks after it have done nothing wrong.
void HttpLoop::run() {
  for (;;) {
    try {
      context_.run();
      return;
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "an event loop ran out of memory and goes on");
    }
  }
}

void HttpLoop::post(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  posted_.push_back(std::move(work));
  if (scheduled_) return;
  try {
    boost::asio::post(context_, [this] { run_posted(); });
  } catch (const std::exception&) {
    posted_.pop_back();
    throw;
  }
  scheduled_ = true;
}

void HttpLoop::run_posted() {
  std::vector<std::function<void()>> work;
  {
    const std::lock_guard lock(mutex_);
    work.swap(posted_);
    scheduled_ = false;
  }
  for (auto& item : work) {
    try {
      item();
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "posted work ran out of memory");
    }
  }
}

void HttpLoop::close() {
  closing = true;
  for (HttpConnection* connection : connections) connection->close();  // destroys none: its coroutine does
  for (boost::asio::steady_timer* timer : periodic) timer->cancel();
  std::vector<std::function<void()>> dropped;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    dropped.swap(posted_);
  }
  work_.reset();
}

}  // namespace perigee
