// Kimi's pre-tokeniser: cuts text into the pieces that byte-pair merging never crosses.
//
// A hand-written matcher of the pattern of the official tokenization_kimi.py (MIT), which needs set intersection and a
// look-ahead that common regular-expression engines lack. Linear in the text. Invalid UTF-8 counts as symbols.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace perigee {

// The end (byte offset) of the piece that starts at `begin`; requires begin < text.size(). Every byte belongs to
// exactly one piece, so walking from end to end visits the whole text.
size_t next_piece_end(std::string_view text, size_t begin);

// Where the reference cuts a long raw text before anything else: after every 400,000 characters, and inside such a
// slice after every 25,000 consecutive white-space or consecutive other characters. Characters equal to `ignored` (a
// UTF-8 sequence, or empty for none) do not count. Looks at the text no further than the cut it was asked for.
class ReferenceCuts {
 public:
  ReferenceCuts(std::string_view text, std::string_view ignored) : text_(text), ignored_(ignored) {}
  // The next cut, a byte offset strictly inside the text; nothing when there is none.
  std::optional<size_t> next();

 private:
  std::string_view text_, ignored_;
  size_t pos_ = 0;
  size_t slice_ = 0, run_ = 0;  // characters since the last cut of either kind
  bool run_is_space_ = false;
};

}  // namespace perigee
