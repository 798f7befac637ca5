#include "grammar/pattern_parser.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

#include "base/utf8.h"

namespace perigee {
namespace {

using Node = PatternNode;

const CodePoints kDigits = {{'0', '9'}};
const CodePoints kSpace = {{'\t', '\r'}, {' ', ' '}};
const CodePoints kBlanks = {{'\t', '\r'}, {0x1C, ' '}};  // Python's, the ASCII ones

// Other than ^ and $.
bool is_around(const Node& node) {
  using Kind = Node::Kind;
  return node.kind == Kind::kWordEdge || node.kind == Kind::kNoWordEdge || node.kind == Kind::kAhead ||
         node.kind == Kind::kNotAhead || node.kind == Kind::kBehind || node.kind == Kind::kNotBehind;
}

class Parser {
 public:
  Parser(std::string_view text, Reading reading) : text_(text), wide_(reading == Reading::kWide) {}

  Result<Node> parse() {
    take_flags();
    Node node = choice(0);
    if (error_.empty() && at_ < text_.size()) fail("an unmatched )");
    if (!error_.empty()) return Error(Code::kBadInput, error_);
    return node;
  }

 private:
  void fail(std::string_view what) {
    if (error_.empty()) error_ = fmt::format("byte {} of the pattern: {}", at_, what);
    at_ = text_.size();
  }
  bool next_is(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool take(std::string_view what) {
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }

  void take_flags() {
    const std::string_view flags = text_.substr(0, flags_length(text_));
    ignores_case_ = flags.find('i') != std::string_view::npos;
    dot_is_all_ = flags.find('s') != std::string_view::npos;
    at_ = flags.size();
  }

  Node choice(int depth) {
    if (depth > 64) fail("more than 64 nested groups");
    Node out{Node::Kind::kChoice, {}, {}};
    do out.parts.push_back(sequence(depth));
    while (take("|"));
    return out.parts.size() == 1 ? std::move(out.parts[0]) : out;
  }

  Node sequence(int depth) {
    Node out{Node::Kind::kSequence, {}, {}};
    while (at_ < text_.size() && text_[at_] != '|' && text_[at_] != ')') {
      out.parts.push_back(repeated(atom(depth)));
      if (++num_nodes_ > 20'000) fail("too long");
    }
    return out;
  }

  Node repeated(Node node) {
    while (at_ < text_.size()) {
      int32_t least = 0, most = Node::kNoEnd;
      const size_t before = at_;
      if (take("*")) {
      } else if (take("+")) {
        least = 1;
      } else if (take("?")) {
        most = 1;
      } else if (!(next_is('{') && bounds(least, most))) {
        at_ = std::max(at_, before);
        return node;
      }
      if (take("+")) fail("a possessive quantifier is not supported");
      take("?");  // lazy: the same texts
      if (is_assertion(node)) fail("a repeated anchor, look-ahead or look-behind");
      if (most < least) fail("a repetition whose bounds are the wrong way round");
      Node out{Node::Kind::kRepeat, {}, {}, least, most};
      out.parts.push_back(std::move(node));
      node = std::move(out);
      if (next_is('*') || next_is('+') || next_is('?')) fail("a repeated repetition");
    }
    return node;
  }

  // {n}, {n,}, {n,m}; a { that begins nothing of the kind is a character.
  bool bounds(int32_t& least, int32_t& most) {
    size_t at = at_ + 1;
    const auto number = [&](int32_t& value) {
      const size_t begin = at;
      int64_t sum = 0;
      for (; at < text_.size() && text_[at] >= '0' && text_[at] <= '9'; ++at)
        sum = std::min<int64_t>(sum * 10 + (text_[at] - '0'), 1'000'000);
      value = static_cast<int32_t>(sum);
      return at > begin;
    };
    if (!number(least)) {
      // Python repeats up to n times, others match the characters.
      size_t end = at + 1;
      while (end < text_.size() && text_[end] >= '0' && text_[end] <= '9') ++end;
      if (text_.substr(at).starts_with(",") && end < text_.size() && text_[end] == '}')
        fail("a repetition without its least number is not supported: write {0,n}");
      return false;
    }
    most = least;
    if (at < text_.size() && text_[at] == ',') {
      ++at;
      if (!number(most)) most = Node::kNoEnd;
    }
    if (at >= text_.size() || text_[at] != '}') return false;
    at_ = at + 1;
    return true;
  }

  Node of_set(CodePoints set) { return {Node::Kind::kSet, normal(std::move(set)), {}}; }

  static bool is_assertion(const Node& node) {
    return node.kind == Node::Kind::kBegin || node.kind == Node::Kind::kEnd || is_around(node);
  }
  static bool has_assertion(const Node& node) {
    return is_assertion(node) || std::any_of(node.parts.begin(), node.parts.end(), has_assertion);
  }

  Node group(int depth) {
    using Kind = Node::Kind;
    for (const auto& [begin, kind] :
         {std::pair{"?=", Kind::kAhead}, {"?!", Kind::kNotAhead}, {"?<=", Kind::kBehind}, {"?<!", Kind::kNotBehind}})
      if (take(begin)) return look(kind, depth);
    if (next_is('?') && !take("?:") && !skip_name())
      fail("flags other than i, s, a and u at the beginning are not supported");
    Node inner = choice(depth + 1);
    if (!take(")")) fail("a group without its )");
    return inner;
  }

  Node look(Node::Kind kind, int depth) {
    const bool negated = kind == Node::Kind::kNotAhead || kind == Node::Kind::kNotBehind;
    const bool behind = kind == Node::Kind::kBehind || kind == Node::Kind::kNotBehind;
    if (behind && num_aheads_ > 0) fail("look-behind inside look-ahead is not supported");
    num_aheads_ += behind ? 0 : 1;
    wide_ = wide_ != negated;
    Node out{kind, {}, {}};
    out.parts.push_back(choice(depth + 1));
    wide_ = wide_ != negated;
    num_aheads_ -= behind ? 0 : 1;
    if (!take(")")) fail("a group without its )");
    if (behind && has_assertion(out.parts[0])) fail("anchors and the like inside look-behind are not supported");
    return out;
  }

  // (?<name> and (?P<name>: a group like any other.
  bool skip_name() {
    const std::string_view rest = text_.substr(at_);
    const size_t begin = rest.starts_with("?P<") ? 3 : rest.starts_with("?<") ? 2 : std::string_view::npos;
    if (begin == std::string_view::npos) return false;
    const size_t end = rest.find('>');
    if (end == std::string_view::npos || end == begin) return false;
    const auto is_name = [](unsigned char c) { return std::isalnum(c) || c == '_'; };
    if (!std::all_of(rest.begin() + static_cast<int64_t>(begin), rest.begin() + static_cast<int64_t>(end), is_name))
      return false;
    at_ += end + 1;
    return true;
  }

  Node end_of_text() const {
    Node end{Node::Kind::kEnd, {}, {}};
    if (!wide_) return end;
    const Node newline{Node::Kind::kSet, {{'\n', '\n'}}, {}};
    return {Node::Kind::kChoice, {}, {end, {Node::Kind::kSequence, {}, {newline, end}}}};
  }

  Node atom(int depth) {
    if (take("(")) return group(depth);
    if (take("^") || take("\\A")) return {Node::Kind::kBegin, {}, {}};
    if (take("$") || take("\\Z") || take("\\z")) return end_of_text();
    for (const bool edge : {true, false})
      if (take(edge ? "\\b" : "\\B"))
        return {edge ? Node::Kind::kWordEdge : Node::Kind::kNoWordEdge, also_others(kWordLetters, wide_), {}};
    if (dot_is_all_ && take(".")) return of_set({{0, kLastCodePoint}});
    if (take("."))
      return of_set(
          complement(wide_ ? CodePoints{{'\n', '\n'}} : CodePoints{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}));
    if (take("[")) return of_set(bracket());
    if (take("\\")) return of_set(of_any_case(escape(false, wide_), wide_));
    if (next_is('*') || next_is('+') || next_is('?')) fail("a repetition of nothing");
    return of_set(of_any_case(one_character(), wide_));
  }

  // With what the flag i adds. Engines agree on ASCII letters, and differ in what else is one of these.
  CodePoints of_any_case(CodePoints set, bool wide) const {
    if (!ignores_case_) return set;
    CodePoints out = set;
    const CodePoints upper = within(set, 'A', 'Z'), lower = within(set, 'a', 'z');
    for (const auto& [low, high] : upper) out.emplace_back(low + 32, high + 32);
    for (const auto& [low, high] : lower) out.emplace_back(low - 32, high - 32);
    if (wide && (out.size() > set.size() || !within(set, 0x80, kLastCodePoint).empty()))
      out.emplace_back(0x80, kLastCodePoint);
    return normal(std::move(out));
  }

  CodePoints one_character() {
    if (at_ >= text_.size()) {
      fail("it ends too early");
      return {};
    }
    const Utf8Char c = utf8_at(text_, at_);
    at_ += c.length;
    return {{c.code_point, c.code_point}};
  }

  CodePoints bracket() {
    const bool negated = take("^");
    if (next_is(']')) fail("a ] at the beginning of a class is not supported: write \\]");
    CodePoints set;
    bool has_complement = false, has_class = false;
    const bool wide = wide_ && !negated;
    for (bool first = true; !next_is(']'); first = false) {
      if (at_ >= text_.size()) {
        fail("a class without its ]");
        return {};
      }
      if (next_is('[') && !first) {
        if (text_.substr(at_).starts_with("[:")) fail("POSIX classes are not supported");
      }
      CodePoints low = class_part(wide, has_class, has_complement);
      const bool single = low.size() == 1 && low[0].first == low[0].second;
      if (single && next_is('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        const CodePoints high = class_part(wide, has_class, has_complement);
        if (high.size() != 1 || high[0].first != high[0].second || high[0].first < low[0].first) {
          fail("a range of a class that is not one");
          return {};
        }
        low[0].second = high[0].first;
      }
      set.insert(set.end(), low.begin(), low.end());
    }
    take("]");
    // The complement of an ASCII complement would gain what that one left out.
    if (negated && has_complement) fail("\\D, \\W and \\S in a negated class are not supported");
    // Engines that know Unicode exclude its digits, letters and blanks with \d, \w and \s, Python U+001C to U+001F.
    if (negated && has_class && !wide_) set.emplace_back(0x1C, 0x1F);
    set = of_any_case(normal(std::move(set)), wide);
    if (!negated) return set;
    return complement(set, (has_class || ignores_case_) && !wide_ ? 0x7F : kLastCodePoint);
  }

  CodePoints class_part(bool wide, bool& has_class, bool& has_complement) {
    if (!take("\\")) return one_character();
    const char c = at_ < text_.size() ? text_[at_] : ' ';
    has_complement |= c == 'D' || c == 'W' || c == 'S';
    has_class |= c == 'd' || c == 'w' || c == 's';
    return escape(true, wide);
  }

  CodePoints escape(bool in_class, bool wide) {
    if (at_ >= text_.size()) {
      fail("it ends in a \\");
      return {};
    }
    const char c = text_[at_];
    const auto hex = [&](size_t digits) -> CodePoints {
      uint32_t value = 0;
      for (size_t i = 1; i <= digits; ++i) {
        const char d = at_ + i < text_.size() ? text_[at_ + i] : 'x';
        const int digit = d >= '0' && d <= '9'   ? d - '0'
                          : d >= 'a' && d <= 'f' ? d - 'a' + 10
                          : d >= 'A' && d <= 'F' ? d - 'A' + 10
                                                 : -1;
        if (digit < 0) {
          fail("an escape without its hexadecimal digits");
          return {};
        }
        value = value * 16 + static_cast<uint32_t>(digit);
      }
      if (value >= 0xD800 && value <= 0xDFFF) {
        fail("a surrogate");
        return {};
      }
      at_ += 1 + digits;
      return {{value, value}};
    };
    const auto is = [&](uint32_t code_point) -> CodePoints {
      ++at_;
      return {{code_point, code_point}};
    };
    const auto set = [&](const CodePoints& of) {
      ++at_;
      return of;
    };
    switch (c) {
      case 'd': return set(also_others(kDigits, wide));
      case 'w': return set(also_others(kWordLetters, wide));
      case 's': return set(also_others(wide ? kBlanks : kSpace, wide));
      case 'D': return set(complement(kDigits, wide ? kLastCodePoint : 0x7F));
      case 'W': return set(complement(kWordLetters, wide ? kLastCodePoint : 0x7F));
      case 'S': return set(wide ? complement(kSpace) : complement(kBlanks, 0x7F));
      case 'n': return is('\n');
      case 'r': return is('\r');
      case 't': return is('\t');
      case 'f': return is('\f');
      case 'v': return is('\v');
      case '0':
        if (at_ + 1 >= text_.size() || text_[at_ + 1] < '0' || text_[at_ + 1] > '9') return is(0);
        fail("octal is not supported");
        return {};
      case 'x': return hex(2);
      case 'u': return hex(4);
      default: break;
    }
    if (in_class && c == 'b') return is('\b');
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter) {
      fail(fmt::format("\\{} is not supported", c));
      return {};
    }
    return one_character();
  }

  static CodePoints also_others(CodePoints set, bool wide) {
    if (wide) set.emplace_back(0x80, kLastCodePoint);
    return set;
  }

  std::string_view text_;
  bool wide_;
  bool ignores_case_ = false, dot_is_all_ = false;  // flags
  int num_aheads_ = 0;                              // that are open
  size_t at_ = 0;
  size_t num_nodes_ = 0;
  std::string error_;
};

}  // namespace

// The other letters of flags change what ^, $ and blanks are.
size_t flags_length(std::string_view text) {
  if (!text.starts_with("(?")) return 0;
  const size_t end = text.find_first_not_of("isau", 2);
  return end > 2 && end != std::string_view::npos && text[end] == ')' ? end + 1 : 0;
}

const CodePoints kWordLetters = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};

Result<PatternNode> parse_pattern(std::string_view text, Reading reading) {
  return Parser(text, reading).parse();
}

bool looks_around(const PatternNode& node) {
  return is_around(node) || std::any_of(node.parts.begin(), node.parts.end(), looks_around);
}

bool has_word_edge(const PatternNode& node) {
  if (node.kind == PatternNode::Kind::kWordEdge || node.kind == PatternNode::Kind::kNoWordEdge) return true;
  return std::any_of(node.parts.begin(), node.parts.end(), has_word_edge);
}

}  // namespace perigee
