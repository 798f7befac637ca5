#include "server/fields.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "server/spelling.h"

namespace perigee {

namespace {

std::string shown(const Json& value) {
  if (value.is_int()) return std::to_string(value.as_int());
  if (value.is_double()) return format_double(value.as_double());
  if (value.is_bool()) return value.as_bool() ? "true" : "false";
  return fmt::format("a value of type {}", value.type_name());
}

}  // namespace

std::optional<int64_t> as_integer(const Json& value) {
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (value.is_int()) return value.as_int();
  if (!value.is_double()) return std::nullopt;
  const double number = value.as_double();
  if (!(std::abs(number) <= kExact) || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

const Json* Fields::any(std::string_view name) {
  known_.push_back(name);
  const Json* value = object_.find(name);
  return value == nullptr || value->is_null() ? nullptr : value;
}

void Fields::fail(std::string_view name, const std::string& message) {
  if (!error_) error_ = bad_input(where_ + std::string(name) + " " + message, where_ + std::string(name));
}

std::optional<double> Fields::real(std::string_view name, double low, double high) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  const double number = value->is_number() ? value->as_double() : NAN;
  if (!std::isfinite(number) || number < low || number > high) {
    fail(name, fmt::format("must be a number between {} and {}, got {}; leave it out for the default",
                           format_double(low), format_double(high), shown(*value)));
    return std::nullopt;
  }
  return number == 0.0 ? 0.0 : number;  // -0 is 0
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t low, int64_t high) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = as_integer(*value);
  if (!number || *number < low || *number > high) {
    fail(name, fmt::format("must be an integer between {} and {}, got {}; leave it out for the default", low, high,
                           shown(*value)));
    return std::nullopt;
  }
  return number;
}

bool Fields::flag(std::string_view name, bool fallback) {
  const Json* value = any(name);
  if (value == nullptr) return fallback;
  if (!value->is_bool()) {
    fail(name, fmt::format("must be true or false, got {}", shown(*value)));
    return fallback;
  }
  return value->as_bool();
}

std::optional<std::string> Fields::text(std::string_view name, size_t max_bytes) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    fail(name, fmt::format("must be a string, got {}", shown(*value)));
    return std::nullopt;
  }
  if (value->as_string().size() > max_bytes) {
    fail(name, fmt::format("must be at most {} bytes, got {}", max_bytes, value->as_string().size()));
    return std::nullopt;
  }
  return value->as_string();
}

const Json* Fields::array(std::string_view name, size_t max_items) {
  const Json* value = any(name);
  if (value == nullptr) return nullptr;
  if (!value->is_array()) {
    fail(name, fmt::format("must be an array, got {}", shown(*value)));
    return nullptr;
  }
  if (value->as_array().size() > max_items) {
    fail(name, fmt::format("must have at most {} entries, got {}", max_items, value->as_array().size()));
    return nullptr;
  }
  return value;
}

const Json* Fields::object(std::string_view name) {
  const Json* value = any(name);
  if (value == nullptr) return nullptr;
  if (!value->is_object()) {
    fail(name, fmt::format("must be an object, got {}", shown(*value)));
    return nullptr;
  }
  return value;
}

std::optional<std::string> Fields::choice(std::string_view name, std::initializer_list<std::string_view> allowed) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  std::string names;
  for (const std::string_view each : allowed) {
    if (*value == Json(each)) return std::string(each);
    names += fmt::format("{}{}\"", names.empty() ? "\"" : ", \"", each);
  }
  fail(name,
       fmt::format("must be one of {}{}", names, value->is_string() ? "" : fmt::format(", got {}", shown(*value))));
  return std::nullopt;
}

void Fields::refuse(std::string_view name, std::string_view why, const Json& harmless) {
  const Json* value = any(name);
  if (value == nullptr || *value == harmless) return;
  if (value->is_number() && harmless.is_number() && value->as_double() == harmless.as_double()) return;
  fail(name, fmt::format("is not supported: {}", why));
}

void Fields::adopt(const Fields& members) {
  if (!error_) error_ = members.error_;
}

bool Fields::is_known(std::string_view name) const {
  return std::find(known_.begin(), known_.end(), name) != known_.end();
}

std::vector<std::string> Fields::unknown() {
  constexpr size_t kMaxNames = 64;  // more are not looked at
  std::vector<std::string> names;
  if (!object_.is_object()) return names;
  for (const auto& [name, value] : object_.as_object()) {
    if (is_known(name)) continue;
    if (names.size() == kMaxNames) break;
    const Status spelling = check_spelling(name, known_, where_);
    if (!spelling.ok() && !error_) error_ = spelling.error();
    names.push_back(name);
  }
  return names;
}

void Fields::refuse_unknown() {
  unknown();
  if (!object_.is_object()) return;
  for (const auto& [name, value] : object_.as_object())
    if (!is_known(name)) return fail(excerpt(name, 64), "is not known; leave it out");
}

Status check_spelling(std::string_view name, std::span<const std::string_view> known, const std::string& where) {
  const auto meant = nearest_name(name, known);
  if (!meant) return {};
  const std::string field = where + excerpt(name, 64);
  return bad_input(fmt::format("{} is not known; did you mean {}{}?", field, where, *meant), field);
}

}  // namespace perigee
