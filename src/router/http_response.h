// ResponseParser: the bytes of one HTTP/1.1 reply in, its head and the pieces of its body out, as they arrive.
//
// A worker is not trusted to speak well: every length has a cap, and what two readers could frame differently is a
// fault, as in requests (server/http_types.h). Pure: it knows no sockets.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "server/http_body.h"
#include "server/http_types.h"

namespace perigee {

struct ResponseHead {
  int status = 0;
  HttpHeaders headers;
  bool keep_alive = true;  // the connection can carry another request once this reply is whole
  bool to_end = false;     // the body lasts until the connection ends: only its content tells whether it is whole

  const std::string* header(std::string_view name) const;
};

class ResponseParser {
 public:
  enum class Event {
    kMore,   // all bytes are read, and the reply is not whole
    kHead,   // head() is known
    kData,   // a piece of the body
    kWhole,  // the reply is whole; bytes past it are left
    kFault,  // fault() says why; nothing more is read
  };

  // Takes bytes off the front of `bytes`, up to the next event. `data` is a view into them.
  Event next(std::string_view& bytes, std::string_view& data);
  // The connection has ended: kWhole or kFault.
  Event end();

  const ResponseHead& head() const { return head_; }
  const std::string& fault() const { return fault_; }

 private:
  enum class State { kHead, kBody, kWhole, kFault };
  Event fail(std::string what);
  Event read_head(std::string_view& bytes);
  Event begin_body();
  Event read_body(std::string_view& bytes, std::string_view& data);

  State state_ = State::kHead;
  std::string head_bytes_;
  HeadEnd head_end_;
  int interim_ = 0;  // 1xx replies so far
  ResponseHead head_;
  std::optional<BodyFraming> framing_;  // none: to the end
  std::string fault_;
};

}  // namespace perigee
