// Json: a parsed JSON value, and the one parser and the one writer that everything in perigee uses.
//
// Objects keep the order of their keys, because tool schemas reach prompts in that order. Numbers are exact: an integer
// that fits int64 stays one; a number that neither int64 nor double holds (12345678901234567890, more than 17 digits,
// 1e999) keeps its text; everything else is the nearest double. The parser enforces caps while it reads, so hostile
// bytes cannot cost more than the caps say; duplicate keys, NaN and invalid UTF-8 are errors. An escaped surrogate
// without its other half becomes U+FFFD.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"

namespace perigee {

class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;

  Json() = default;  // null
  Json(std::nullptr_t) {}
  Json(bool value) : value_(value) {}
  Json(int value) : value_(static_cast<int64_t>(value)) {}
  Json(int64_t value) : value_(value) {}
  Json(uint64_t value);
  Json(double value) : value_(value) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(std::string_view value) : value_(std::string(value)) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}
  // The number that `text` spells; requires JSON's syntax of numbers.
  static Json number(std::string text);

  bool is_null() const { return value_.index() == 0; }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }
  bool is_double() const { return std::holds_alternative<double>(value_) || digits() != nullptr; }
  bool is_number() const { return is_int() || is_double(); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  const char* type_name() const;  // "null", "boolean", "number", "string", "array", "object"

  // Each requires the matching is_...().
  bool as_bool() const { return std::get<bool>(value_); }
  int64_t as_int() const { return std::get<int64_t>(value_); }
  double as_double() const;  // the nearest one; of a number, too, that keeps its text
  const std::string& as_string() const { return std::get<std::string>(value_); }
  std::string& as_string() { return std::get<std::string>(value_); }
  const Array& as_array() const { return std::get<Array>(value_); }
  Array& as_array() { return std::get<Array>(value_); }
  const Object& as_object() const { return std::get<Object>(value_); }
  Object& as_object() { return std::get<Object>(value_); }

  // The text of a number that neither int64 nor double holds; nullptr for every other value.
  const std::string* digits() const;

  // Member `key` of an object, or nullptr when this is not an object or has no such member. Linear in the members.
  const Json* find(std::string_view key) const;
  Json* find(std::string_view key);
  // Sets or appends a member; requires an object or null (which becomes an object).
  Json& set(std::string_view key, Json value);

  bool operator==(const Json& other) const { return value_ == other.value_; }

 private:
  struct Digits {
    std::string text;
    bool operator==(const Digits&) const = default;
  };
  std::variant<std::monostate, bool, int64_t, double, Digits, std::string, Array, Object> value_;
};

// Checked while the text is read, before memory is spent on what they refuse. The defaults suit files of a model
// folder, whose size is capped where they are read.
struct JsonLimits {
  static constexpr size_t kAny = SIZE_MAX;
  size_t max_bytes = 32u << 20;
  size_t max_depth = 32;
  size_t max_values = kAny;        // of the whole document; integers in arrays count an eighth
  size_t max_members = kAny;       // of one object
  size_t max_elements = kAny;      // of one array
  size_t max_key_bytes = kAny;     // of one key, without escapes
  size_t max_string_bytes = kAny;  // of one string, without escapes
};

// Parses exactly one JSON document. Errors: kTooLarge over max_bytes; kBadInput with the byte offset otherwise. Takes
// time linear in the text, except that keys of objects are sorted to find duplicates.
Result<Json> parse_json(std::string_view text, const JsonLimits& limits = {});

// Where the writer puts blanks. Both print numbers as Python's json.dumps does and leave non-ASCII text as it is.
enum class JsonStyle {
  kCompact,  // {"a":1,"b":[1,2]}: the wire
  kSpaced,   // {"a": 1, "b": [1, 2]}: Python's default separators: prompts
};
std::string dump_json(const Json& value, JsonStyle style = JsonStyle::kCompact);

// The shortest text that reads back as `value`, spelt as Python's repr: 1.0, 1e-05, 1e+16.
std::string format_double(double value);

void append_json_string(std::string& out, std::string_view text);  // with quotes and escapes

}  // namespace perigee
