// Python's string operations on UTF-8 text, as far as chat templates use them.
//
// Positions and lengths are in code points, as in Python. Invalid UTF-8 is split as in base/utf8.h.
// Upper and lower case are mapped for ASCII letters only; other characters stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace perigee {

size_t utf8_length(std::string_view text);
void append_utf8(std::string& out, uint32_t code);  // a code point below 0x110000, not a surrogate
std::vector<std::string_view> utf8_chars(std::string_view text);

// Bytes of blanks that `text` starts with.
size_t leading_space(std::string_view text);

enum class StripSide { kBoth, kLeft, kRight };
// str.strip/lstrip/rstrip; `chars` null means blanks.
std::string_view python_strip(std::string_view text, StripSide side, const std::string_view* chars = nullptr);

// str.split / str.rsplit; an empty separator means runs of blanks; max_splits < 0 means no limit.
std::vector<std::string_view> python_split(std::string_view text, std::string_view separator, int64_t max_splits);
std::vector<std::string_view> python_rsplit(std::string_view text, std::string_view separator, int64_t max_splits);
std::vector<std::string_view> python_splitlines(std::string_view text);

// Byte offset of `needle` at or after `from`, or npos; linear time.
size_t find_text(std::string_view text, std::string_view needle, size_t from = 0);
size_t count_text(std::string_view text, std::string_view needle);  // not overlapping; `needle` not empty

std::string ascii_upper(std::string_view text);
std::string ascii_lower(std::string_view text);
std::string python_capitalize(std::string_view text);
std::string python_title(std::string_view text);  // str.title(): each run of letters
std::string jinja_title(std::string_view text);   // the title filter: each word after a blank, hyphen or bracket

// repr() of a string: quotes, escapes.
void append_python_repr(std::string& out, std::string_view text);

}  // namespace perigee
