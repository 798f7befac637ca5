#include "text/jinja/strings.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/utf8.h"
#include "text/unicode.h"

namespace perigee {
namespace {

bool is_continuation(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}
bool is_alpha(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
char upper(char c) {
  return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c;
}
char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
}

struct Range {
  uint32_t first;
  uint32_t last;
};

// Categories Cc, Cf, Zl, Zp, Zs without the space, Co and Cs: what repr() escapes. Unassigned characters are not here.
constexpr std::array kNotPrintable = {
    Range{0x0, 0x1F},        Range{0x7F, 0xA0},        Range{0xAD, 0xAD},       Range{0x600, 0x605},
    Range{0x61C, 0x61C},     Range{0x6DD, 0x6DD},      Range{0x70F, 0x70F},     Range{0x890, 0x891},
    Range{0x8E2, 0x8E2},     Range{0x1680, 0x1680},    Range{0x180E, 0x180E},   Range{0x2000, 0x200F},
    Range{0x2028, 0x202F},   Range{0x205F, 0x206F},    Range{0x3000, 0x3000},   Range{0xD800, 0xF8FF},
    Range{0xFEFF, 0xFEFF},   Range{0xFFF0, 0xFFFB},    Range{0xFFFE, 0xFFFF},   Range{0x110BD, 0x110BD},
    Range{0x110CD, 0x110CD}, Range{0x1BCA0, 0x1BCA3},  Range{0x1D173, 0x1D17A}, Range{0xE0001, 0xE0001},
    Range{0xE0020, 0xE007F}, Range{0xF0000, 0x10FFFF},
};

bool is_printable(uint32_t code) {
  if (code >= 0x20 && code < 0x7F) return true;
  return std::none_of(kNotPrintable.begin(), kNotPrintable.end(),
                      [code](const Range& range) { return code >= range.first && code <= range.last; });
}

void append_hex(std::string& out, uint32_t code, int digits) {
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out += "0123456789abcdef"[(code >> shift) & 15];
}

void append_escaped(std::string& out, uint32_t code) {
  if (code < 0x100) {
    out += "\\x";
    append_hex(out, code, 2);
  } else if (code < 0x10000) {
    out += "\\u";
    append_hex(out, code, 4);
  } else {
    out += "\\U";
    append_hex(out, code, 8);
  }
}

// Bytes of blanks that `text` ends with.
size_t trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t start = end - 1;
    while (start > 0 && end - start < 4 && is_continuation(text[start])) --start;
    const Utf8Char c = utf8_at(text, start);
    if (start + c.length != end || !is_python_space(c.code_point)) break;
    end = start;
  }
  return text.size() - end;
}

bool contains_char(std::string_view chars, std::string_view one) {
  for (size_t at = 0; at < chars.size(); at += utf8_at(chars, at).length)
    if (chars.substr(at, utf8_at(chars, at).length) == one) return true;
  return false;
}

std::vector<std::string_view> split_blanks(std::string_view text, int64_t max_splits) {
  std::vector<std::string_view> parts;
  text.remove_prefix(leading_space(text));
  while (!text.empty()) {
    if (max_splits >= 0 && static_cast<int64_t>(parts.size()) == max_splits) {
      parts.push_back(text);
      break;
    }
    size_t end = 0;
    while (end < text.size() && !is_python_space(utf8_at(text, end).code_point)) end += utf8_at(text, end).length;
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end);
    text.remove_prefix(leading_space(text));
  }
  return parts;
}

std::vector<std::string_view> rsplit_blanks(std::string_view text, int64_t max_splits) {
  std::vector<std::string_view> parts;
  text.remove_suffix(trailing_space(text));
  while (!text.empty()) {
    if (max_splits >= 0 && static_cast<int64_t>(parts.size()) == max_splits) {
      parts.push_back(text);
      break;
    }
    size_t start = text.size();
    while (start > 0 && trailing_space(text.substr(0, start)) == 0) --start;
    parts.push_back(text.substr(start));
    text = text.substr(0, start);
    text.remove_suffix(trailing_space(text));
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

}  // namespace

size_t utf8_length(std::string_view text) {
  size_t count = 0;
  for (size_t at = 0; at < text.size(); at += utf8_at(text, at).length) ++count;
  return count;
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  static constexpr unsigned char kLead[] = {0, 0xC0, 0xE0, 0xF0};
  out += static_cast<char>(kLead[more] | code >> (6 * more));
  for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | ((code >> (6 * i)) & 0x3F));
}

std::vector<std::string_view> utf8_chars(std::string_view text) {
  std::vector<std::string_view> chars;
  for (size_t at = 0; at < text.size();) {
    const size_t size = utf8_at(text, at).length;
    chars.push_back(text.substr(at, size));
    at += size;
  }
  return chars;
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Char c = utf8_at(text, at);
    if (!is_python_space(c.code_point)) break;
    at += c.length;
  }
  return at;
}

std::string_view python_strip(std::string_view text, StripSide side, const std::string_view* chars) {
  if (!chars) {
    if (side != StripSide::kRight) text.remove_prefix(leading_space(text));
    if (side != StripSide::kLeft) text.remove_suffix(trailing_space(text));
    return text;
  }
  while (side != StripSide::kRight && !text.empty()) {
    const size_t size = utf8_at(text, 0).length;
    if (!contains_char(*chars, text.substr(0, size))) break;
    text.remove_prefix(size);
  }
  while (side != StripSide::kLeft && !text.empty()) {
    size_t size = 1;
    while (size < 4 && size < text.size() && is_continuation(text[text.size() - size])) ++size;
    if (!contains_char(*chars, text.substr(text.size() - size))) break;
    text.remove_suffix(size);
  }
  return text;
}

std::vector<std::string_view> python_split(std::string_view text, std::string_view separator, int64_t max_splits) {
  if (separator.empty()) return split_blanks(text, max_splits);
  std::vector<std::string_view> parts;
  while (max_splits < 0 || static_cast<int64_t>(parts.size()) < max_splits) {
    const size_t at = find_text(text, separator);
    if (at == std::string_view::npos) break;
    parts.push_back(text.substr(0, at));
    text.remove_prefix(at + separator.size());
  }
  parts.push_back(text);
  return parts;
}

std::vector<std::string_view> python_rsplit(std::string_view text, std::string_view separator, int64_t max_splits) {
  if (separator.empty()) return rsplit_blanks(text, max_splits);
  std::vector<std::string_view> parts;
  while (max_splits < 0 || static_cast<int64_t>(parts.size()) < max_splits) {
    const size_t at = text.rfind(separator);
    if (at == std::string_view::npos) break;
    parts.push_back(text.substr(at + separator.size()));
    text = text.substr(0, at);
  }
  parts.push_back(text);
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> python_splitlines(std::string_view text) {
  const auto breaks = [](uint32_t c) {
    return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
  };
  std::vector<std::string_view> lines;
  for (size_t at = 0, start = 0; at < text.size();) {
    const Utf8Char c = utf8_at(text, at);
    if (breaks(c.code_point)) {
      lines.push_back(text.substr(start, at - start));
      start = at + c.length + (text.substr(at, 2) == "\r\n" ? 1 : 0);
      at = start;
    } else {
      at += c.length;
      if (at >= text.size()) lines.push_back(text.substr(start));
    }
  }
  return lines;
}

size_t find_text(std::string_view text, std::string_view needle, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  const char* start = text.data() + from;
  const void* hit = memmem(start, text.size() - from, needle.data(), needle.size());
  if (!hit) return std::string_view::npos;
  return from + static_cast<size_t>(static_cast<const char*>(hit) - start);
}

size_t count_text(std::string_view text, std::string_view needle) {
  size_t count = 0;
  for (size_t at = 0; (at = find_text(text, needle, at)) != std::string_view::npos; at += needle.size()) ++count;
  return count;
}

std::string ascii_upper(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), upper);
  return out;
}

std::string ascii_lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), lower);
  return out;
}

std::string python_capitalize(std::string_view text) {
  std::string out = ascii_lower(text);
  if (!out.empty()) out[0] = upper(out[0]);
  return out;
}

std::string python_title(std::string_view text) {
  std::string out(text);
  bool in_word = false;
  for (char& c : out) {
    c = in_word ? lower(c) : upper(c);
    in_word = is_alpha(c) || static_cast<unsigned char>(c) >= 0x80;
  }
  return out;
}

std::string jinja_title(std::string_view text) {
  std::string out(text);
  bool in_word = false;
  for (size_t at = 0; at < out.size();) {
    const Utf8Char c = utf8_at(text, at);
    const bool separates =
        is_python_space(c.code_point) || std::string_view("-({[<").find(out[at]) != std::string::npos;
    if (c.length == 1) out[at] = in_word ? lower(out[at]) : upper(out[at]);
    in_word = !separates;
    at += c.length;
  }
  return out;
}

void append_python_repr(std::string& out, std::string_view text) {
  const bool only_single = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = only_single ? '"' : '\'';
  out += quote;
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = utf8_at(text, at);
    if (c.code_point == '\\' || c.code_point == static_cast<uint32_t>(quote)) {
      out += '\\';
      out += static_cast<char>(c.code_point);
    } else if (c.code_point == '\n' || c.code_point == '\r' || c.code_point == '\t') {
      out += c.code_point == '\n' ? "\\n" : c.code_point == '\r' ? "\\r" : "\\t";
    } else if (!is_printable(c.code_point)) {
      append_escaped(out, c.code_point);
    } else {
      out.append(text.substr(at, c.length));
    }
    at += c.length;
  }
  out += quote;
}

}  // namespace perigee
