// The body of a request: its framing undone (Content-Length or chunked), its memory charged to a budget that all
// bodies in flight share. Pure; thread-safe where it says so.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace perigee {

// Bytes that all bodies of a server may occupy at once. Thread-safe.
class BodyBudget {
 public:
  explicit BodyBudget(size_t limit_bytes) : limit_bytes_(limit_bytes) {}
  // False: it would pass the limit, and nothing is taken. Large bodies leave an eighth to bodies up to 1 MiB, so that a
  // few uploads do not keep every other request out.
  bool take(size_t bytes, size_t body_bytes);
  void give_back(size_t bytes) { used_ -= bytes; }
  size_t used() const { return used_; }
  size_t limit() const { return limit_bytes_; }

 private:
  const size_t limit_bytes_;
  std::atomic<size_t> used_{0};
};

// Where one body ends, in bytes that come in pieces of any size: Content-Length or chunked, of requests and of replies.
// Holds no memory.
class BodyFraming {
 public:
  // `content_length`: of the body; nullopt: it is chunked.
  BodyFraming(std::optional<size_t> content_length, size_t max_bytes);

  enum class Status { kMore, kDone, kMalformed, kTooLarge };

  // Takes bytes off the front, up to and including the next piece of the body, which becomes `data`; "" when none has
  // come. After anything but kMore nothing more is read.
  Status next(std::string_view& bytes, std::string_view& data);

  size_t taken() const { return taken_; }  // bytes of the body so far
  size_t most() const { return most_; }    // bytes that the whole body may have

 private:
  enum class State { kFixed, kSize, kExtension, kSizeEnd, kData, kDataCr, kDataLf, kTrailer, kTrailerEnd, kEnd };

  Status read_size(char c);
  Status end_size_line(char c);
  Status read_trailer(char c);
  Status read_frame(char c);

  const size_t max_bytes_, most_;
  State state_;
  size_t left_ = 0;  // bytes still to come of the body, or of the chunk
  size_t taken_ = 0;
  size_t line_bytes_ = 0;  // of the size line so far, or of all trailers
  bool line_empty_ = true;
};

// Reads one body. Memory grows with the bytes that arrive, never with the length that was announced, and is charged
// before it is allocated.
class BodyReader {
 public:
  // `content_length`: of the body; nullopt: it is chunked.
  BodyReader(std::shared_ptr<BodyBudget> budget, std::optional<size_t> content_length, size_t max_bytes);
  BodyReader(const BodyReader&) = delete;
  BodyReader& operator=(const BodyReader&) = delete;

  enum class Status { kMore, kDone, kMalformed, kTooLarge, kOverBudget };

  // Takes what belongs to the body off the front of `bytes`. After anything but kMore nothing more is read.
  Status read(std::string_view& bytes);

  size_t size() const { return body_.size(); }
  std::string take_body() { return std::move(body_); }
  std::shared_ptr<void> take_share() { return std::move(share_); }  // holds the charge until it is dropped

 private:
  struct Share;
  bool reserve(size_t bytes);

  std::shared_ptr<Share> share_;
  BodyFraming framing_;
  std::string body_;
};

}  // namespace perigee
