// Fields: reads the members of a JSON object, each with its type and range, and remembers the first fault.
//
// null means absent. Every member asked for counts as known, so what is left afterwards are the unknown ones. A fault
// is one Error: it names the field, the limit and the way out, and never repeats a value that the client sent.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace perigee {

class Fields {
 public:
  // Keeps a reference. `where` prefixes names in messages: "messages[2]." or "".
  explicit Fields(const Json& object, std::string where = "") : object_(object), where_(std::move(where)) {}

  // Present values outside [low, high], not finite, or of another type are faults. integer() takes 5.0 for 5.
  std::optional<double> real(std::string_view name, double low, double high);
  std::optional<int64_t> integer(std::string_view name, int64_t low, int64_t high);
  bool flag(std::string_view name, bool fallback);
  std::optional<std::string> text(std::string_view name, size_t max_bytes);
  const Json* array(std::string_view name, size_t max_items);
  const Json* object(std::string_view name);
  std::optional<std::string> choice(std::string_view name, std::initializer_list<std::string_view> allowed);
  const Json* any(std::string_view name);  // the member, or nullptr when absent or null

  // A member that this server does not offer: anything but absent, null or `harmless` (numbers by value) is a fault.
  void refuse(std::string_view name, std::string_view why, const Json& harmless = Json());

  void fail(std::string_view name, const std::string& message);
  void adopt(const Fields& members);  // the first fault of a member's own fields
  bool ok() const { return !error_; }
  Status status() const { return error_ ? Status(*error_) : Status(); }

  // Members that nobody asked for. One that resembles a known name is a fault that says which; so call it last.
  std::vector<std::string> unknown();
  // For objects whose other members have no meaning either: any that nobody asked for is a fault.
  void refuse_unknown();

 private:
  bool is_known(std::string_view name) const;
  const Json& object_;
  std::string where_;
  std::vector<std::string_view> known_;
  std::optional<Error> error_;
};

// An unknown member that resembles one of `known`: 400 that says which; `where` is the prefix of its name.
Status check_spelling(std::string_view name, std::span<const std::string_view> known, const std::string& where);

// The integer that `value` holds, 5.0 included; nothing for other types, fractions and magnitudes over 2^53 as double.
std::optional<int64_t> as_integer(const Json& value);

}  // namespace perigee
