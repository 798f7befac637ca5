#include "text/jinja/lexer.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <optional>

#include "text/jinja/strings.h"

namespace perigee {
namespace {

using Kind = TemplateTokenKind;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool is_name_char(char c) {
  return is_name_start(c) || is_digit(c);
}

// "\r\n" and "\r" become "\n"; one line end at the end of the template goes away.
std::string normalise_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : text_(normalise_lines(source)), source_(text_) {}
  Result<std::vector<TemplateToken>> run();

 private:
  void fail(std::string_view message) {
    if (!error_) error_ = bad_input(fmt::format("chat template, line {}: {}", line_, message));
  }
  bool at(std::string_view text) const { return source_.substr(position_).starts_with(text); }
  char peek(size_t ahead = 0) const { return position_ + ahead < source_.size() ? source_[position_ + ahead] : '\0'; }
  void advance(size_t bytes);
  void add(Kind kind, std::string_view text) { tokens_.push_back({kind, std::string(text), line_}); }
  void lex_text();
  std::string_view strip_before(std::string_view text, char sign, bool is_output) const;
  void skip_comment();
  bool raw_begin();
  void lex_raw();
  void lex_tag(bool is_output);
  bool tag_end(bool is_output);
  void lex_token();
  void lex_name();
  void lex_number();
  bool lex_radix();
  void lex_string();
  void lex_operator();
  size_t digits(size_t from) const;
  void skip_blanks() { advance(leading_space(source_.substr(position_))); }

  const std::string text_;
  std::string_view source_;
  size_t position_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // whether the last thing consumed ended with a line end
  std::string brackets_;       // the closing brackets still expected
  std::vector<TemplateToken> tokens_;
  std::optional<Error> error_;
};

void Lexer::advance(size_t bytes) {
  const std::string_view consumed = source_.substr(position_, bytes);
  line_ += static_cast<int>(std::count(consumed.begin(), consumed.end(), '\n'));
  if (!consumed.empty()) line_starting_ = consumed.back() == '\n';
  position_ += consumed.size();
}

// The text before a tag without what the tag's sign, or lstrip_blocks, takes from it.
std::string_view Lexer::strip_before(std::string_view text, char sign, bool is_output) const {
  if (sign == '-') return python_strip(text, StripSide::kRight);
  if (sign == '+' || is_output) return text;
  const size_t line_start = text.rfind('\n') + 1;  // npos + 1 is 0
  if (line_start == 0 && !line_starting_) return text;
  const std::string_view indent = text.substr(line_start);
  return leading_space(indent) == indent.size() ? text.substr(0, line_start) : text;
}

// Text up to the next tag, and the tag.
void Lexer::lex_text() {
  size_t tag = position_;
  while (true) {
    tag = source_.find('{', tag);
    if (tag == std::string_view::npos || tag + 1 >= source_.size()) {
      add(Kind::kText, source_.substr(position_));
      position_ = source_.size();
      return;
    }
    const char next = source_[tag + 1];
    if (next == '%' || next == '{' || next == '#') break;
    ++tag;
  }
  const std::string_view before = source_.substr(position_, tag - position_);
  const char kind = source_[tag + 1];
  const char after = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
  const char sign = after == '-' || after == '+' ? after : '\0';
  const std::string_view text = strip_before(before, sign, kind == '{');
  if (!text.empty()) add(Kind::kText, text);
  advance(before.size());
  if (kind == '%' && raw_begin()) return lex_raw();
  advance(sign ? 3 : 2);
  if (kind == '#') return skip_comment();
  lex_tag(kind == '{');
}

void Lexer::skip_comment() {
  const size_t end = source_.find("#}", position_);
  if (end == std::string_view::npos) return fail("missing end of comment tag");
  const char sign = end > position_ ? source_[end - 1] : '\0';
  advance(end + 2 - position_);
  if (sign == '-') return skip_blanks();
  if (sign != '+' && peek() == '\n') advance(1);
}

// Consumes "{% raw %}" with its signs, if that is what comes.
bool Lexer::raw_begin() {
  size_t end = position_ + 2;
  const auto skip = [&] { end += leading_space(source_.substr(end)); };
  if (end < source_.size() && (source_[end] == '-' || source_[end] == '+')) ++end;
  skip();
  if (!source_.substr(end).starts_with("raw")) return false;
  end += 3;
  skip();
  const std::string_view rest = source_.substr(end);
  if (!rest.starts_with("%}") && !rest.starts_with("-%}")) return false;
  const bool strips = rest.front() == '-';
  advance(end - position_ + (strips ? 3 : 2));
  if (strips) skip_blanks();
  return true;
}

void Lexer::lex_raw() {
  for (size_t tag = source_.find("{%", position_); tag != std::string_view::npos; tag = source_.find("{%", tag + 1)) {
    size_t end = tag + 2;
    const auto skip = [&] { end += leading_space(source_.substr(end)); };
    const char sign = end < source_.size() ? source_[end] : '\0';
    if (sign == '-' || sign == '+') ++end;
    skip();
    if (!source_.substr(end).starts_with("endraw")) continue;
    end += 6;
    skip();
    const std::string_view rest = source_.substr(end);
    const bool strips = rest.starts_with("-%}");
    const bool keeps = rest.starts_with("+%}");
    if (!strips && !keeps && !rest.starts_with("%}")) continue;
    const std::string_view text = strip_before(source_.substr(position_, tag - position_), sign, false);
    if (!text.empty()) add(Kind::kText, text);
    advance(end - position_ + (strips || keeps ? 3 : 2));
    if (strips) skip_blanks();
    if (!strips && !keeps && peek() == '\n') advance(1);
    return;
  }
  fail("missing end of raw directive");
}

void Lexer::lex_tag(bool is_output) {
  add(is_output ? Kind::kOutputBegin : Kind::kBlockBegin, "");
  brackets_.clear();
  while (!error_) {
    if (brackets_.empty() && tag_end(is_output)) return;
    if (position_ >= source_.size()) return fail("the template ends inside a tag");
    const size_t blanks = leading_space(source_.substr(position_));
    blanks ? advance(blanks) : lex_token();
  }
}

bool Lexer::tag_end(bool is_output) {
  const std::string_view end = is_output ? "}}" : "%}";
  const char sign = peek();
  const bool strips = sign == '-' && source_.substr(position_ + 1).starts_with(end);
  const bool keeps = !is_output && sign == '+' && source_.substr(position_ + 1).starts_with(end);
  if (!strips && !keeps && !at(end)) return false;
  add(is_output ? Kind::kOutputEnd : Kind::kBlockEnd, "");
  advance(strips || keeps ? 3 : 2);
  if (strips) skip_blanks();
  if (!is_output && !strips && !keeps && peek() == '\n') advance(1);
  return true;
}

void Lexer::lex_token() {
  const char c = peek();
  if (is_digit(c)) return lex_number();
  if (is_name_start(c)) return lex_name();
  if (c == '\'' || c == '"') return lex_string();
  lex_operator();
}

void Lexer::lex_name() {
  size_t size = 0;
  while (is_name_char(peek(size))) ++size;
  if (static_cast<unsigned char>(peek(size)) >= 0x80) return fail("names are ASCII letters, digits and underscores");
  add(Kind::kName, source_.substr(position_, size));
  advance(size);
}

// Length of digits, single underscores between them allowed, at `from` bytes ahead.
size_t Lexer::digits(size_t from) const {
  size_t size = 0;
  while (is_digit(peek(from + size)) || (size > 0 && peek(from + size) == '_' && is_digit(peek(from + size + 1))))
    ++size;
  return size;
}

bool Lexer::lex_radix() {
  const char mark = static_cast<char>(peek(1) | 0x20);
  if (peek() != '0' || (mark != 'x' && mark != 'o' && mark != 'b')) return false;
  const auto is_radix_digit = [mark](char c) {
    if (mark == 'b') return c == '0' || c == '1';
    if (mark == 'o') return c >= '0' && c <= '7';
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  };
  size_t size = 2;
  while (is_radix_digit(peek(size)) || (peek(size) == '_' && is_radix_digit(peek(size + 1)))) ++size;
  if (size == 2) return false;
  std::string text(source_.substr(position_, size));
  std::erase(text, '_');
  add(Kind::kInteger, text);
  advance(size);
  return true;
}

void Lexer::lex_number() {
  if (lex_radix()) return;
  size_t size = digits(0);
  const bool after_dot = !tokens_.empty() && tokens_.back().kind == Kind::kOperator && tokens_.back().text == ".";
  bool is_float = false;
  if (!after_dot && peek(size) == '.' && is_digit(peek(size + 1))) {
    size += 1 + digits(size + 1);
    is_float = true;
  }
  if (!after_dot && (peek(size) == 'e' || peek(size) == 'E')) {
    const size_t sign = peek(size + 1) == '+' || peek(size + 1) == '-' ? 1 : 0;
    if (const size_t exponent = digits(size + 1 + sign)) {
      size += 1 + sign + exponent;
      is_float = true;
    }
  }
  std::string text(source_.substr(position_, size));
  std::erase(text, '_');
  if (!is_float && text.size() > 1 && text.find_first_not_of('0') != std::string::npos && text[0] == '0')
    return fail("an integer may not start with 0");
  add(is_float ? Kind::kFloat : Kind::kInteger, text);
  advance(size);
}

// Decodes the escapes of a Python string; nullopt when one is malformed.
std::optional<std::string> unescape(std::string_view text) {
  std::string out;
  const auto number = [&](size_t at, size_t count, int base) -> std::optional<uint32_t> {
    uint32_t code = 0;
    for (size_t i = at; i < at + count; ++i) {
      const char c = i < text.size() ? text[i] : '?';
      const char folded = static_cast<char>(c | 0x20);
      const int digit = is_digit(c) ? c - '0' : folded >= 'a' && folded <= 'f' ? folded - 'a' + 10 : 99;
      if (digit >= base) return std::nullopt;
      code = code * static_cast<uint32_t>(base) + static_cast<uint32_t>(digit);
    }
    return code;
  };
  for (size_t at = 0; at < text.size();) {
    if (text[at] != '\\') {
      out += text[at++];
      continue;
    }
    if (at + 1 >= text.size()) return std::nullopt;
    const char kind = text[at + 1];
    static constexpr std::string_view kNames = "abfnrtv\\'\"";
    static constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
    at += 2;
    if (kind == '\n') continue;
    if (const size_t simple = kNames.find(kind); simple != std::string_view::npos) {
      out += kValues[simple];
    } else if (kind == 'x' || kind == 'u' || kind == 'U') {
      const size_t count = kind == 'x' ? 2 : kind == 'u' ? 4 : 8;
      const auto code = number(at, count, 16);
      if (!code || *code > 0x10FFFF || (*code >= 0xD800 && *code < 0xE000)) return std::nullopt;
      append_utf8(out, *code);
      at += count;
    } else if (kind >= '0' && kind <= '7') {
      size_t count = 1;
      while (count < 3 && at - 1 + count < text.size() && text[at - 1 + count] >= '0' && text[at - 1 + count] <= '7')
        ++count;
      append_utf8(out, *number(at - 1, count, 8));
      at += count - 1;
    } else if (kind == 'N') {
      return std::nullopt;
    } else {
      out += '\\';
      out += kind;
    }
  }
  return out;
}

void Lexer::lex_string() {
  const char quote = peek();
  size_t end = position_ + 1;
  while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
  if (end >= source_.size()) return fail("a string does not end");
  auto value = unescape(source_.substr(position_ + 1, end - position_ - 1));
  if (!value) return fail("a string has an escape that is malformed or not supported");
  add(Kind::kString, *value);
  advance(end + 1 - position_);
}

void Lexer::lex_operator() {
  static constexpr std::array<std::string_view, 6> kLong = {"//", "**", "==", "!=", ">=", "<="};
  static constexpr std::string_view kShort = "+-/*%~[](){}><=.:|,;";
  const auto wide = std::find_if(kLong.begin(), kLong.end(), [this](std::string_view text) { return at(text); });
  const std::string_view text = wide != kLong.end() ? *wide : source_.substr(position_, 1);
  const char c = text.front();
  if (wide == kLong.end() && kShort.find(c) == std::string_view::npos) return fail("unexpected character");
  if (c == '(') brackets_ += ')';
  if (c == '[') brackets_ += ']';
  if (c == '{') brackets_ += '}';
  if (c == ')' || c == ']' || c == '}') {
    if (brackets_.empty() || brackets_.back() != c) return fail(fmt::format("unexpected '{}'", text));
    brackets_.pop_back();
  }
  add(Kind::kOperator, text);
  advance(text.size());
}

Result<std::vector<TemplateToken>> Lexer::run() {
  while (!error_ && position_ < source_.size()) lex_text();
  if (error_) return *error_;
  add(Kind::kEnd, "");
  return std::move(tokens_);
}

}  // namespace

Result<std::vector<TemplateToken>> lex_template(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace perigee
