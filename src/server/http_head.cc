#include "server/http_head.h"

#include <cctype>
#include <string>

namespace perigee {

namespace {

constexpr HeadFault kMalformed{400, "malformed request head"};

// Header names whose number decides where a body ends or which host is meant.
struct FieldCounts {
  int content_length = 0, transfer_encoding = 0, host = 0;
};

HeadFault check_line(std::string_view line, FieldCounts& counts) {
  if (line.front() == ' ' || line.front() == '\t') return {400, "folded header lines are not accepted"};
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || colon == 0) return kMalformed;
  std::string name(line.substr(0, colon));
  if (name.find_first_of(" \t") != std::string::npos) return {400, "blank before the colon of a header"};
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  counts.content_length += name == "content-length";
  counts.transfer_encoding += name == "transfer-encoding";
  counts.host += name == "host";
  return {};
}

}  // namespace

HeadFault check_head(std::string_view head, const HeadLimits& limits) {
  if (head.size() > limits.max_bytes) return {431, "request head too large"};
  if (head.find('\0') != std::string_view::npos) return kMalformed;
  FieldCounts counts;
  size_t num_lines = 0;
  bool http10 = false;
  while (!head.empty()) {
    const size_t end = head.find_first_of("\r\n");
    if (end == std::string_view::npos || head.substr(end, 2) != "\r\n") return {400, "bare CR or LF in request head"};
    const std::string_view line = head.substr(0, end);
    head.remove_prefix(end + 2);
    if (line.size() > limits.max_line_bytes) return {431, "header line too long"};
    if (line.empty()) break;
    if (num_lines++ == 0) {
      http10 = line.ends_with("HTTP/1.0");
      continue;
    }
    if (num_lines > limits.max_headers + 1) return {431, "too many headers"};
    if (const HeadFault fault = check_line(line, counts); fault.status != 0) return fault;
  }
  if (num_lines == 0) return kMalformed;
  if (counts.content_length > 1 || counts.transfer_encoding > 1) return {400, "repeated length header"};
  if (counts.content_length > 0 && counts.transfer_encoding > 0)
    return {400, "both Content-Length and Transfer-Encoding"};
  if (counts.host > 1 || (counts.host == 0 && !http10)) return {400, "exactly one Host header is required"};
  return {};
}

}  // namespace perigee
