// Kinds of values that flags take: read() says whether a text is one, expected() which texts are, and shown() writes
// the default.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"

namespace perigee {

template <typename T>
bool read_number(const std::string& text, T& to) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), to);
  return error == std::errc() && end == text.data() + text.size();
}

struct Whole {
  int64_t low, high;
  template <std::integral T>
  bool read(const std::string& text, T& field) const {
    int64_t value = 0;
    if (!read_number(text, value) || value < low || value > high) return false;
    field = static_cast<T>(value);
    return true;
  }
  std::string expected() const { return fmt::format("a whole number from {} to {}", low, high); }
  std::string shown(int64_t value) const { return fmt::to_string(value); }
};

struct Number {
  double low, high;
  template <std::floating_point T>
  bool read(const std::string& text, T& field) const {
    double value = 0;
    if (!read_number(text, value) || !(value >= low && value <= high)) return false;  // NaN is in no range
    field = static_cast<T>(value);
    return true;
  }
  std::string expected() const { return fmt::format("a number from {} to {}", low, high); }
  std::string shown(double value) const { return fmt::format("{}", value); }
};

struct Bytes {
  bool read(const std::string& text, int64_t& field) const;
  std::string expected() const { return "a size such as 4096, 512M or 4G"; }
  std::string shown(int64_t value) const { return fmt::to_string(value); }
};

// "auto" is 0: whoever uses the field chooses.
template <typename Values>
struct OrAuto {
  Values values;
  template <typename T>
  bool read(const std::string& text, T& field) const {
    if (text != "auto") return values.read(text, field);
    field = 0;
    return true;
  }
  std::string expected() const { return "auto or " + values.expected(); }
  template <typename T>
  std::string shown(const T& value) const {
    return value == 0 ? "auto" : values.shown(value);
  }
};
template <typename Values>
OrAuto(Values) -> OrAuto<Values>;

// Names for values; several may name the same one.
template <typename T>
struct OneOf {
  std::vector<std::pair<std::string, T>> choices;
  bool read(const std::string& text, T& field) const {
    for (const auto& [name, value] : choices)
      if (name == text) return field = value, true;
    return false;
  }
  std::string expected() const {
    std::string text;
    for (size_t i = 0; i < choices.size(); ++i)
      text += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i].first;
    return text;
  }
  std::string shown(const T& value) const {
    for (const auto& [name, each] : choices)
      if (each == value) return name;
    return "";
  }
};

inline OneOf<LogLevel> log_levels() {
  return {{{"debug", LogLevel::kDebug},
           {"info", LogLevel::kInfo},
           {"warning", LogLevel::kWarning},
           {"error", LogLevel::kError}}};
}

struct AnyText {
  bool read(const std::string& text, std::string& field) const { return field = text, true; }
  std::string expected() const { return "a text"; }
  std::string shown(const std::string& value) const { return value; }
};

// "1,4,16".
struct Counts {
  bool read(const std::string& text, std::vector<int64_t>& field) const;
  std::string expected() const { return "numbers from 1 on with commas between"; }
  std::string shown(const std::vector<int64_t>& value) const { return fmt::format("{}", fmt::join(value, ",")); }
};

}  // namespace perigee
