// What a worker sends the router, whole and in pieces: never a crash, the pieces change nothing, a body is never longer
// than what came, and only a reply that was read to its end is whole. The same bytes as a body: what the router
// rewrites stays an object with the members that it kept.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "router/forward.h"
#include "router/http_response.h"
#include "router/json_members.h"

namespace {

struct Read {
  int status = 0;
  std::string body;
  bool whole = false;
  bool operator==(const Read&) const = default;
};

Read read_reply(std::string_view bytes, size_t piece) {
  using Event = perigee::ResponseParser::Event;
  perigee::ResponseParser parser;
  Read out;
  Event event = Event::kMore;
  while (!bytes.empty() && event == Event::kMore) {
    std::string_view part = bytes.substr(0, piece), data;
    bytes.remove_prefix(part.size());
    do {
      event = parser.next(part, data);
      if (event == Event::kHead) out.status = parser.head().status;
      CHECK(event == Event::kData || data.empty());
      out.body.append(data);
    } while (event == Event::kHead || event == Event::kData);
    CHECK(event != Event::kMore || part.empty(), "bytes that were not read");
  }
  if (event == Event::kMore) event = parser.end();
  out.whole = event == Event::kWhole;
  CHECK(out.whole == parser.fault().empty(), parser.fault());
  CHECK(!out.whole || (out.status >= 200 && out.status < 600));
  return out;
}

void check_body(std::string_view body) {
  const auto members = perigee::JsonMembers::read(body);
  const auto prefill = perigee::prefill_body(body);
  CHECK(members.has_value() == prefill.has_value());
  perigee::prompt_text(body);
  const auto decode = perigee::decode_body(body, body);
  if (!members) return;
  const auto again = perigee::JsonMembers::read(*prefill);
  CHECK(!again || (again->find("max_tokens")->value == "1" && again->find("stream")->value == "false"), *prefill);
  const auto with_transfer = decode ? perigee::JsonMembers::read(*decode) : std::nullopt;
  CHECK(!with_transfer || with_transfer->find("kv_transfer_params")->value.starts_with('{'), *decode);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Read whole = read_reply(bytes, 1u << 20);
  CHECK(whole.body.size() <= bytes.size());
  CHECK(whole == read_reply(bytes, 1 + data[0] % 32), "the pieces change the reply");
  check_body(bytes);
  return 0;
}
