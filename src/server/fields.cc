#include "server/fields.h"

#include <algorithm>
#include <cmath>

namespace perigee {

namespace {

std::string shown(const Json& value) {
  if (value.is_int()) return str_cat(value.as_int());
  if (value.is_double()) return format_double(value.as_double());
  if (value.is_bool()) return value.as_bool() ? "true" : "false";
  return str_cat("a value of type ", value.type_name());
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
    fail(name, str_cat("must be a number between ", format_double(low), " and ", format_double(high), ", got ",
                       shown(*value), "; leave it out for the default"));
    return std::nullopt;
  }
  return number == 0.0 ? 0.0 : number;  // -0 is 0
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t low, int64_t high) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = as_integer(*value);
  if (!number || *number < low || *number > high) {
    fail(name, str_cat("must be an integer between ", low, " and ", high, ", got ", shown(*value),
                       "; leave it out for the default"));
    return std::nullopt;
  }
  return number;
}

bool Fields::flag(std::string_view name, bool fallback) {
  const Json* value = any(name);
  if (value == nullptr) return fallback;
  if (!value->is_bool()) {
    fail(name, str_cat("must be true or false, got ", shown(*value)));
    return fallback;
  }
  return value->as_bool();
}

std::optional<std::string> Fields::text(std::string_view name, size_t max_bytes) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    fail(name, str_cat("must be a string, got ", shown(*value)));
    return std::nullopt;
  }
  if (value->as_string().size() > max_bytes) {
    fail(name, str_cat("must be at most ", max_bytes, " bytes, got ", value->as_string().size()));
    return std::nullopt;
  }
  return value->as_string();
}

const Json* Fields::array(std::string_view name, size_t max_items) {
  const Json* value = any(name);
  if (value == nullptr) return nullptr;
  if (!value->is_array()) {
    fail(name, str_cat("must be an array, got ", shown(*value)));
    return nullptr;
  }
  if (value->as_array().size() > max_items) {
    fail(name, str_cat("must have at most ", max_items, " entries, got ", value->as_array().size()));
    return nullptr;
  }
  return value;
}

const Json* Fields::object(std::string_view name) {
  const Json* value = any(name);
  if (value == nullptr) return nullptr;
  if (!value->is_object()) {
    fail(name, str_cat("must be an object, got ", shown(*value)));
    return nullptr;
  }
  return value;
}

void Fields::refuse(std::string_view name, std::string_view why, const Json& harmless) {
  const Json* value = any(name);
  if (value != nullptr && !(*value == harmless)) fail(name, str_cat("is not supported: ", why));
}

std::vector<std::string> Fields::unknown() const {
  std::vector<std::string> names;
  if (!object_.is_object()) return names;
  for (const auto& [name, value] : object_.as_object())
    if (std::find(known_.begin(), known_.end(), name) == known_.end()) names.push_back(name);
  return names;
}

}  // namespace perigee
