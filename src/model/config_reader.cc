#include "model/config_reader.h"

#include <fmt/core.h>

#include <cmath>

namespace perigee {

const Json* ConfigReader::find(const char* key) const {
  const Json* value = object_.find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::string ConfigReader::found(const Json* value) const {
  if (value == nullptr) return "nothing";
  if (value->is_array() || value->is_object()) return fmt::format("an {}", value->type_name());
  return dump_json(*value).substr(0, 100);
}

void ConfigReader::fail(const char* key, const std::string& expected, const std::string& found) {
  if (!status_.ok()) return;
  status_ = bad_input(fmt::format("{}: {}: expected {}, found {}", where_, key, expected, found), key);
}

int64_t ConfigReader::integer(const char* key, int64_t min, int64_t max, std::optional<int64_t> absent) {
  const Json* value = find(key);
  if (value == nullptr && absent) return *absent;
  if (value != nullptr && value->is_number()) {
    const double wide = value->as_double();
    const bool whole = value->is_int() || wide == std::floor(wide);
    if (whole && wide >= static_cast<double>(min) && wide <= static_cast<double>(max))
      return value->is_int() ? value->as_int() : static_cast<int64_t>(wide);
  }
  fail(key, fmt::format("an integer in [{}, {}]", min, max), found(value));
  return min;
}

double ConfigReader::number(const char* key, double min, double max, std::optional<double> absent) {
  const Json* value = find(key);
  if (value == nullptr && absent) return *absent;
  if (value != nullptr && value->is_number() && value->as_double() >= min && value->as_double() <= max)
    return value->as_double();
  fail(key, fmt::format("a number in [{}, {}]", format_double(min), format_double(max)), found(value));
  return min;
}

bool ConfigReader::boolean(const char* key, std::optional<bool> absent) {
  const Json* value = find(key);
  if (value == nullptr && absent) return *absent;
  if (value != nullptr && value->is_bool()) return value->as_bool();
  fail(key, "true or false", found(value));
  return false;
}

std::string ConfigReader::text(const char* key, std::optional<std::string> absent) {
  const Json* value = find(key);
  if (value == nullptr && absent) return *absent;
  if (value != nullptr && value->is_string()) return value->as_string();
  fail(key, "a string", found(value));
  return "";
}

}  // namespace perigee
