// The raw head of a request, checked before any parser sees it.
//
// What proxies and servers read differently is refused rather than repaired (request smuggling, SEC-40 and SEC-47 of
// the reliability notes): folded lines, bare CR or LF, NUL, blanks before the colon, repeated or conflicting lengths.
#pragma once

#include <cstddef>
#include <string_view>

namespace perigee {

struct HeadLimits {
  size_t max_bytes = 64u << 10;
  size_t max_line_bytes = 16u << 10;
  size_t max_headers = 100;
};

struct HeadFault {
  int status = 0;  // 0: the head is fine
  const char* message = "";
};

// `head` is everything up to and including the blank line.
HeadFault check_head(std::string_view head, const HeadLimits& limits);

}  // namespace perigee
