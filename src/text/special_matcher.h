// SpecialMatcher: finds any of a few hundred fixed strings in text.
//
// Only positions whose byte begins one of the strings are looked at, and there a sorted list is narrowed byte by byte,
// so plain text costs one table look-up a byte.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace perigee {

class SpecialMatcher {
 public:
  struct Match {
    size_t begin;   // byte offset in the text
    size_t length;  // bytes
    int32_t index;  // of the string, in the order given to the constructor
  };

  SpecialMatcher() = default;
  explicit SpecialMatcher(const std::vector<std::string_view>& strings);  // none empty, all different

  // The leftmost match at or after `from`; of several that begin there, the longest.
  std::optional<Match> find(std::string_view text, size_t from) const;

  // The string at exactly `pos`, if any.
  std::optional<Match> match_at(std::string_view text, size_t pos) const;

  // Whether the rest of the text from `pos` (not empty) is the beginning of one of the strings, or all of it.
  bool could_complete(std::string_view text, size_t pos) const;

  bool can_begin(char byte) const { return first_bytes_[static_cast<uint8_t>(byte)]; }

 private:
  struct Entry {
    std::string text;
    int32_t index;
  };
  struct Range {
    size_t low;
    size_t high;
  };
  // Of the entries in `range`, which agree in their first `depth` bytes, those whose next byte is `byte`.
  Range narrow(Range range, size_t depth, char byte) const;

  std::vector<Entry> sorted_;
  std::array<bool, 256> first_bytes_{};
};

}  // namespace perigee
