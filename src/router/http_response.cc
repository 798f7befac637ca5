#include "router/http_response.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

namespace perigee {

namespace {

constexpr HeadLimits kLimits{.max_bytes = 64u << 10, .max_line_bytes = 16u << 10, .max_headers = 200};
constexpr size_t kMaxBodyBytes = 1ull << 50;  // whoever collects a body has a cap of his own
constexpr int kMaxInterim = 8;
constexpr HeadFault kBadStatusLine{400, "not a status line of HTTP/1.1"};

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

HeadFault parse_status_line(std::string_view line, ResponseHead& head) {
  if (!line.starts_with("HTTP/1.1 ") && !line.starts_with("HTTP/1.0 ")) return kBadStatusLine;
  const std::string_view code = line.substr(9, 3);
  if (code.size() != 3 || !all_digits(code) || (line.size() > 12 && line[12] != ' ')) return kBadStatusLine;
  std::from_chars(code.data(), code.data() + code.size(), head.status);
  head.keep_alive = line[7] == '1';
  return head.status >= 100 && head.status < 600 ? HeadFault() : kBadStatusLine;
}

}  // namespace

const std::string* ResponseHead::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (same_ignoring_case(key, name)) return &value;
  return nullptr;
}

ResponseParser::Event ResponseParser::fail(std::string what) {
  state_ = State::kFault;
  fault_ = std::move(what);
  return Event::kFault;
}

ResponseParser::Event ResponseParser::read_head(std::string_view& bytes) {
  const size_t known = head_bytes_.size();
  head_bytes_.append(bytes.substr(0, kLimits.max_bytes + 1 - known));
  const size_t size = head_end_.find(head_bytes_);
  if (size == 0 && head_bytes_.size() > kLimits.max_bytes) return fail("its head is too large");
  bytes.remove_prefix((size > 0 ? size : head_bytes_.size()) - known);
  if (size == 0) return Event::kMore;
  head_ = ResponseHead();
  const std::string text = std::exchange(head_bytes_, {}).substr(0, size);
  head_end_ = HeadEnd();
  const auto take_first = [this](std::string_view line) { return parse_status_line(line, head_); };
  if (const HeadFault fault = parse_lines(text, kLimits, take_first, head_.headers); fault.status != 0)
    return fail(fmt::format("malformed head: {}", fault.message));
  if (head_.status >= 200) return begin_body();
  if (head_.status == 101 || ++interim_ > kMaxInterim) return fail("interim replies that were not asked for");
  return read_head(bytes);
}

ResponseParser::Event ResponseParser::begin_body() {
  std::optional<size_t> length;
  int codings = 0;
  for (const auto& [name, value] : head_.headers) {
    if (same_ignoring_case(name, "content-length")) {
      if (length || !all_digits(value) || value.size() > 15) return fail("a bad Content-Length");
      std::from_chars(value.data(), value.data() + value.size(), length.emplace());
    } else if (same_ignoring_case(name, "transfer-encoding")) {
      if (++codings > 1 || !same_ignoring_case(value, "chunked")) return fail("a transfer coding other than chunked");
    } else if (same_ignoring_case(name, "connection")) {
      for (const std::string_view option : elements_of(value))
        if (same_ignoring_case(option, "close")) head_.keep_alive = false;
    }
  }
  if (length && codings > 0) return fail("both Content-Length and Transfer-Encoding");
  state_ = State::kBody;
  if (head_.status == 204 || head_.status == 304) length = 0;
  head_.to_end = !length && codings == 0;
  head_.keep_alive = head_.keep_alive && !head_.to_end;
  if (!head_.to_end) framing_.emplace(length, kMaxBodyBytes);
  return Event::kHead;
}

ResponseParser::Event ResponseParser::read_body(std::string_view& bytes, std::string_view& data) {
  if (head_.to_end) {
    data = std::exchange(bytes, {});
    return data.empty() ? Event::kMore : Event::kData;
  }
  const BodyFraming::Status status = framing_->next(bytes, data);
  if (status == BodyFraming::Status::kDone) state_ = State::kWhole;
  if (status == BodyFraming::Status::kMalformed || status == BodyFraming::Status::kTooLarge)
    return fail("malformed chunks");
  if (!data.empty()) return Event::kData;
  return state_ == State::kWhole ? Event::kWhole : Event::kMore;
}

ResponseParser::Event ResponseParser::next(std::string_view& bytes, std::string_view& data) {
  data = {};
  switch (state_) {
    case State::kHead: return read_head(bytes);
    case State::kBody: return read_body(bytes, data);
    case State::kWhole: return Event::kWhole;
    case State::kFault: break;
  }
  return Event::kFault;
}

ResponseParser::Event ResponseParser::end() {
  if (state_ == State::kWhole) return Event::kWhole;
  if (state_ == State::kBody && head_.to_end) {
    state_ = State::kWhole;
    return Event::kWhole;
  }
  if (state_ == State::kFault) return Event::kFault;
  return fail(state_ == State::kBody ? "the connection ended before the reply did" : "the connection ended");
}

}  // namespace perigee
