// Stop strings: watches text that arrives in pieces and ends it at the first of several strings.
//
// Only text that could still become a stop string is held back. One Knuth-Morris-Pratt automaton a string (SIAM J.
// Comput. 6(2), 1977), so the cost is linear in text times strings, whatever the strings look like.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace perigee {

class StopStrings {
 public:
  struct Found {
    size_t stop_index;  // in the constructor's list
  };

  // Empty strings never match. With `include`, the stop string itself is emitted too (and nothing is ever held back).
  StopStrings(std::vector<std::string> stops, bool include);

  // Takes the next piece and appends to `emit` what is sure to be output. The string that ends first wins; of several
  // that end at one byte, the longest. After a find everything further is ignored, and the same find is returned.
  std::optional<Found> push(std::string_view text, std::string& emit);

  // The text is over: appends what was held back.
  void finish(std::string& emit);

 private:
  struct Matcher {
    std::string stop;
    std::vector<uint32_t> fallback;  // [matched]: the next shorter prefix that is a suffix of the first `matched` bytes
    uint32_t matched = 0;            // bytes of `stop` that the text ends with
    bool step(char c);               // true when the stop string ends at this byte
  };
  // Feeds one byte to all; the index of the longest stop string that ends here.
  std::optional<size_t> step(char c);

  std::vector<Matcher> matchers_;
  bool include_;
  std::optional<Found> found_;
  std::string held_;
};

}  // namespace perigee
