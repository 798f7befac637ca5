// The head of a request: bytes in, request line, headers and framing out. Pure.
//
// What proxies and servers read differently is refused rather than repaired, because a request that two of them frame
// differently lets one client speak in another's name (request smuggling): folded lines, bare CR or LF, control
// characters, blanks before the colon, repeated, listed or signed lengths, both length headers, and every transfer
// coding other than exactly `chunked`. Time is linear in the size of the head.
#pragma once

#include <cstddef>
#include <string_view>

#include "server/http_types.h"

namespace perigee {

struct HeadLimits {
  size_t max_bytes = 64u << 10;
  size_t max_line_bytes = 16u << 10;
  size_t max_headers = 100;
  size_t max_body_bytes = 32u << 20;
};

struct HttpHead {
  HttpRequest request;  // without its body
  bool http11 = true;
  bool keep_alive = true;
  bool chunked = false;
  bool expects_continue = false;
  size_t content_length = 0;  // of the body, when not chunked

  bool has_body() const { return chunked || content_length > 0; }
};

struct HeadFault {
  int status = 0;  // 0: the head is fine
  const char* message = "";
};

// `text` is everything up to and including the blank line. `head` is meaningful when the status is 0. Faults are 400,
// 413, 415, 417, 431, 501 and 505; after any of them the connection must be closed.
HeadFault parse_head(std::string_view text, const HeadLimits& limits, HttpHead& head);

// Finds the end of a head in bytes that arrive in pieces: each byte is looked at once.
class HeadEnd {
 public:
  // The size of the head at the start of `text`, 0 while it is not complete. `text` is what the last call saw, and
  // more.
  size_t find(std::string_view text);

 private:
  size_t seen_ = 0;  // no head ends before here
};

}  // namespace perigee
