#include "server/http_types.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

namespace perigee {

bool same_ignoring_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  });
}

const std::string* HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (same_ignoring_case(key, name)) return &value;
  return nullptr;
}

const char* http_reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Payload Too Large";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 502: return "Bad Gateway";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    case 505: return "HTTP Version Not Supported";
    default: return "Unknown";
  }
}

namespace {

constexpr std::string_view kCrlf = "\r\n";
constexpr std::string_view kHeadEnd = "\r\n\r\n";
constexpr HeadFault kMalformed{400, "malformed request head"};
constexpr HeadFault kBadLength{400, "Content-Length must be one number in decimal digits"};

// The characters of names and methods (RFC 9110, section 5.6.2).
constexpr std::array<bool, 256> make_token_table() {
  std::array<bool, 256> table{};
  for (int c = 0; c < 128; ++c)
    table[static_cast<size_t>(c)] = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  for (const char c : std::string_view("!#$%&'*+-.^_`|~")) table[static_cast<unsigned char>(c)] = true;
  return table;
}

bool is_token(std::string_view text) {
  static constexpr std::array<bool, 256> kToken = make_token_table();
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return kToken[static_cast<uint8_t>(c)]; });
}

bool is_control(char c) {
  return (static_cast<uint8_t>(c) < 0x20 && c != '\t') || c == 0x7F;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Takes the next line off `text`. False: it does not end in CR LF, or holds one of them elsewhere.
bool take_line(std::string_view& text, std::string_view& line) {
  const size_t end = text.find_first_of(kCrlf);
  if (end == std::string_view::npos || text.substr(end, 2) != kCrlf) return false;
  line = text.substr(0, end);
  text.remove_prefix(end + 2);
  return true;
}

HeadFault parse_request_line(std::string_view line, HttpHead& head) {
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) return kMalformed;
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (!is_token(method) || target.empty()) return kMalformed;
  if (!std::all_of(target.begin(), target.end(), [](char c) { return c > 0x20 && c < 0x7F; }))
    return {400, "the request target must be visible ASCII; escape other bytes as %XX"};
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    const bool other = version.starts_with("HTTP/") && version.size() == 8 && version[5] >= '2';
    return other ? HeadFault{505, "only HTTP/1.1 and HTTP/1.0 are spoken here"} : kMalformed;
  }
  head.http11 = head.keep_alive = version == "HTTP/1.1";
  head.request.method = method;
  if (!target.starts_with('/')) return {};
  const size_t mark = target.find('?');
  head.request.path = target.substr(0, mark);
  if (mark != std::string_view::npos) head.request.query = target.substr(mark + 1);
  return {};
}

HeadFault parse_header_line(std::string_view line, HttpHeaders& headers) {
  if (line.front() == ' ' || line.front() == '\t') return {400, "folded header lines are not accepted"};
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return kMalformed;
  const std::string_view name = line.substr(0, colon);
  if (name.find_first_of(" \t") != std::string_view::npos) return {400, "blank before the colon of a header"};
  const std::string_view value = trimmed(line.substr(colon + 1));
  if (!is_token(name) || std::any_of(value.begin(), value.end(), is_control)) return kMalformed;
  headers.emplace_back(name, value);
  return {};
}

// Where the body ends: the headers that two readers must not understand differently.
class Framing {
 public:
  HeadFault take(const std::string& name, std::string_view value, const HeadLimits& limits, HttpHead& head) {
    if (same_ignoring_case(name, "host")) ++hosts_;
    if (same_ignoring_case(name, "content-length")) return take_length(value, limits, head);
    if (same_ignoring_case(name, "transfer-encoding")) return take_coding(value, head);
    return {};
  }
  HeadFault check(const HttpHead& head) const {
    if (lengths_ > 0 && codings_ > 0) return {400, "both Content-Length and Transfer-Encoding"};
    if (codings_ > 0 && !head.http11) return {400, "Transfer-Encoding in HTTP/1.0"};
    if (hosts_ > 1 || (hosts_ == 0 && head.http11)) return {400, "exactly one Host header is required"};
    return {};
  }

 private:
  HeadFault take_length(std::string_view value, const HeadLimits& limits, HttpHead& head) {
    constexpr size_t kMaxDigits = 15;
    if (++lengths_ > 1) return kBadLength;
    if (value.empty() || !std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; }))
      return kBadLength;
    value.remove_prefix(std::min(value.find_first_not_of('0'), value.size()));
    if (value.size() > kMaxDigits) return {413, ""};
    for (const char c : value) head.content_length = 10 * head.content_length + static_cast<size_t>(c - '0');
    return head.content_length > limits.max_body_bytes ? HeadFault{413, ""} : HeadFault{};
  }
  HeadFault take_coding(std::string_view value, HttpHead& head) {
    if (++codings_ > 1) return {400, "repeated Transfer-Encoding"};
    head.chunked = same_ignoring_case(value, "chunked");
    if (head.chunked) return {};
    bool other_coding = false;
    bool well_formed = true;
    for (const std::string_view coding : elements_of(value)) {
      well_formed = well_formed && is_token(coding);
      other_coding = other_coding || !same_ignoring_case(coding, "chunked");
    }
    if (well_formed && other_coding) return {501, "the only transfer coding here is chunked"};
    return {400, "malformed Transfer-Encoding"};
  }

  int hosts_ = 0, lengths_ = 0, codings_ = 0;
};

// What else decides how the connection goes on.
HeadFault take_manners(const std::string& name, std::string_view value, HttpHead& head) {
  if (same_ignoring_case(name, "connection")) {
    bool close = false;
    for (const std::string_view option : elements_of(value)) {
      close = close || same_ignoring_case(option, "close");
      head.keep_alive = head.keep_alive || same_ignoring_case(option, "keep-alive");
    }
    if (close) head.keep_alive = false;
  } else if (same_ignoring_case(name, "expect") && head.http11) {
    head.expects_continue = same_ignoring_case(value, "100-continue");
    if (!head.expects_continue) return {417, "the only expectation met here is 100-continue"};
  } else if (same_ignoring_case(name, "content-encoding") && !value.empty() && !same_ignoring_case(value, "identity")) {
    return {415, "compressed request bodies are not accepted; send them as they are"};
  }
  return {};
}

// Of several faults the framing's is told, since it says why the connection must end.
HeadFault read_meaning(const HeadLimits& limits, HttpHead& head) {
  Framing framing;
  HeadFault manners;
  for (const auto& [name, value] : head.request.headers) {
    if (const HeadFault fault = framing.take(name, value, limits, head); fault.status != 0) return fault;
    if (manners.status == 0) manners = take_manners(name, value, head);
  }
  if (const HeadFault fault = framing.check(head); fault.status != 0) return fault;
  return manners;
}

}  // namespace

std::vector<std::string_view> elements_of(std::string_view list) {
  std::vector<std::string_view> elements;
  for (;;) {
    const size_t comma = list.find(',');
    elements.push_back(trimmed(list.substr(0, comma)));
    if (comma == std::string_view::npos) return elements;
    list.remove_prefix(comma + 1);
  }
}

HeadFault parse_lines(std::string_view text, const HeadLimits& limits,
                      const std::function<HeadFault(std::string_view)>& take_first, HttpHeaders& headers) {
  if (text.size() > limits.max_bytes) return {431, "request head too large"};
  for (size_t num_lines = 0; !text.empty(); ++num_lines) {
    std::string_view line;
    if (!take_line(text, line)) return {400, "bare CR or LF in request head"};
    if (line.size() > limits.max_line_bytes) return {431, "header line too long"};
    if (line.empty()) return num_lines > 0 && text.empty() ? HeadFault() : kMalformed;
    if (num_lines > limits.max_headers) return {431, "too many headers"};
    const HeadFault fault = num_lines == 0 ? take_first(line) : parse_header_line(line, headers);
    if (fault.status != 0) return fault;
  }
  return kMalformed;
}

HeadFault parse_head(std::string_view text, const HeadLimits& limits, HttpHead& head) {
  if (text.size() <= limits.max_bytes && text.starts_with(kCrlf))
    text.remove_prefix(2);  // some clients send one after the body before
  const auto take_first = [&head](std::string_view line) { return parse_request_line(line, head); };
  const HeadFault fault = parse_lines(text, limits, take_first, head.request.headers);
  return fault.status != 0 ? fault : read_meaning(limits, head);
}

size_t HeadEnd::find(std::string_view text) {
  const size_t end = text.find(kHeadEnd, seen_);
  if (end != std::string_view::npos) return end + kHeadEnd.size();
  seen_ = text.size() < kHeadEnd.size() ? 0 : text.size() - kHeadEnd.size() + 1;
  return 0;
}

}  // namespace perigee
