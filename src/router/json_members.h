// The members of the object that a JSON text is, as spans of that text: what the router reads and rewrites of a body
// without building it. Members that it does not name stay as they came, byte for byte.
//
// Only strings and brackets are followed: whether the rest is JSON, the worker says. One pass, no copies.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace perigee {

struct JsonMember {
  std::string_view key;    // between its quotes, escapes as they were written
  std::string_view value;  // without blanks around it
};

class JsonMembers {
 public:
  // nullopt: not an object, brackets or strings that do not end, or over 256 members.
  static std::optional<JsonMembers> read(std::string_view text);  // `text` outlives it

  const JsonMember* find(std::string_view key) const;  // the last one of that name

  // The object without those members, and with `more`, the text of members such as `"a":1`, at its end.
  std::string rewritten(std::initializer_list<std::string_view> without, std::string_view more) const;

 private:
  std::vector<JsonMember> members_;
};

}  // namespace perigee
