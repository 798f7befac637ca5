// ConfigReader: typed, range-checked access to the keys of one JSON object; the first failure is kept and reported.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace perigee {

// After the first failure every getter returns a harmless value; status() tells. An absent or null key is an error
// unless a default is given.
class ConfigReader {
 public:
  // `where` names the object in messages ("config.json: text_config").
  ConfigReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  int64_t integer(const char* key, int64_t min, int64_t max, std::optional<int64_t> absent = {});
  double number(const char* key, double min, double max, std::optional<double> absent = {});
  bool boolean(const char* key, std::optional<bool> absent = {});
  std::string text(const char* key, std::optional<std::string> absent = {});
  const Json* find(const char* key) const;  // null when absent or JSON null

  void fail(const char* key, const std::string& expected, const std::string& found);
  Status status() const { return status_; }

 private:
  std::string found(const Json* value) const;
  const Json& object_;
  std::string where_;
  Status status_;
};

}  // namespace perigee
