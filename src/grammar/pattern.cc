#include "grammar/pattern.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/utf8.h"
#include "grammar/pattern_parser.h"

namespace perigee {
namespace {

std::string spell_code_point(uint32_t c) {
  const bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == ' ' || c == '_';
  if (plain) return std::string(1, static_cast<char>(c));
  return c <= 0xFFFF ? fmt::format("\\u{:04x}", c) : fmt::format("\\u{{{:x}}}", c);
}

// One class for each number of UTF-8 bytes: a range of xgrammar's over several takes overlong forms, too.
std::string spell_class(const CodePoints& set) {
  std::string out;
  int classes = 0;
  for (const auto& [first, last] :
       {std::pair<uint32_t, uint32_t>{0, 0x7F}, {0x80, 0x7FF}, {0x800, 0xFFFF}, {0x10000, kLastCodePoint}}) {
    std::string ranges;
    for (const auto& [low, high] : within(set, first, last)) {
      ranges += spell_code_point(low);
      if (high > low) ranges += "-" + spell_code_point(high);
    }
    if (ranges.empty()) continue;
    out += (classes++ == 0 ? "[" : "|[") + ranges + "]";
  }
  return classes > 1 ? "(" + out + ")" : out;
}

// Sums of lengths, of which kNoEnd is the largest.
int32_t plus(int32_t a, int32_t b) {
  return static_cast<int32_t>(std::min<int64_t>(int64_t{a} + b, Pattern::kNoEnd));
}
int32_t times(int32_t a, int32_t b) {
  return static_cast<int32_t>(std::min<int64_t>(int64_t{a} * b, Pattern::kNoEnd));
}

}  // namespace

std::string spell_repeat(const std::string& group, int64_t least, int64_t most) {
  if (most == 0) return "()";
  if (least == 0) return "(()|" + spell_repeat(group, 1, most) + ")";
  if (least == 1 && most == 1) return "(" + group + ")";
  if (most == Pattern::kNoEnd) return least == 1 ? "(" + group + ")+" : fmt::format("({}){{{},}}", group, least);
  return fmt::format("({}){{{},{}}}", group, least, most);
}

std::string spell_set(const CodePoints& set, bool json) {
  CodePoints raw = within(set, json ? 0x20 : 0, 0xD7FF);
  for (const auto& range : within(set, 0xE000, kLastCodePoint)) raw.push_back(range);
  if (!json) return raw.empty() ? "[^\\u0000-\\u{10ffff}]" : spell_class(raw);
  std::string escaped;
  const auto escape = [&](std::string_view spelt) { escaped += (escaped.empty() ? "" : "|") + std::string(spelt); };
  std::string letters;
  for (const auto& [c, letter] : std::initializer_list<std::pair<uint32_t, const char*>>{
           {'"', "\\u0022"}, {'\\', "\\u005c"}, {'\b', "b"}, {'\f', "f"}, {'\n', "n"}, {'\r', "r"}, {'\t', "t"}})
    if (contains(set, c)) letters += letter;
  if (!letters.empty()) escape("\\u005c[" + letters + "]");
  for (uint32_t c = 0; c < 0x20; ++c)
    if (contains(set, c) && std::string_view("\b\f\n\r\t").find(static_cast<char>(c)) == std::string_view::npos)
      escape(fmt::format("\\u005cu{:04x}", c));
  CodePoints plain;
  for (const auto& [low, high] : {std::pair<uint32_t, uint32_t>{0x20, 0x21}, {0x23, 0x5B}, {0x5D, kLastCodePoint}})
    for (const auto& range : within(raw, low, high)) plain.push_back(range);
  if (escaped.empty()) return plain.empty() ? "[^\\u0000-\\u{10ffff}]" : spell_class(normal(plain));
  return plain.empty() ? "(" + escaped + ")" : "(" + spell_class(normal(plain)) + "|" + escaped + ")";
}

Status Pattern::bound_repeats(Node& node) {
  if (node.kind == Node::Kind::kRepeat) {
    if (node.least > kMostRepeats)
      return Error(Code::kBadInput, "a repetition of more than 128 times is not supported");
    if (node.most != kNoEnd) node.most = std::min(node.most, kMostRepeats);
  }
  for (Node& part : node.parts) RETURN_IF_ERROR(bound_repeats(part));
  return {};
}

bool Pattern::has_anchor(const Node& node) {
  if (node.kind == Node::Kind::kBegin || node.kind == Node::Kind::kEnd) return true;
  return std::any_of(node.parts.begin(), node.parts.end(), has_anchor);
}

// Takes the anchors off the ends of each alternative, and puts "any text" where a searched one has none.
Status Pattern::anchor(Node& node, Whole whole) {
  if (node.kind == Node::Kind::kChoice) {
    for (Node& part : node.parts)
      if (Status status = anchor(part, whole); !status.ok()) return status;
    return {};
  }
  if (node.kind != Node::Kind::kSequence) {
    Node alone{Node::Kind::kSequence, {}, {}};
    alone.parts.push_back(std::move(node));
    node = std::move(alone);
  }
  if (node.parts.size() == 1 &&
      (node.parts[0].kind == Node::Kind::kChoice || node.parts[0].kind == Node::Kind::kSequence)) {
    Node inner = std::move(node.parts[0]);
    node = std::move(inner);
    return anchor(node, whole);
  }
  bool begins = whole == Whole::kYes, ends = whole == Whole::kYes;
  while (!node.parts.empty() && node.parts.front().kind == Node::Kind::kBegin) {
    begins = true;
    node.parts.erase(node.parts.begin());
  }
  while (!node.parts.empty() && node.parts.back().kind == Node::Kind::kEnd) {
    ends = true;
    node.parts.pop_back();
  }
  if (has_anchor(node))
    return Error(Code::kBadInput, "an anchor that is not at an end of the pattern is not supported");
  Node any{Node::Kind::kRepeat, {}, {}, 0, kNoEnd};
  any.parts.push_back({Node::Kind::kSet, {{0, kLastCodePoint}}, {}});
  if (!begins) node.parts.insert(node.parts.begin(), any);
  if (!ends) node.parts.push_back(any);
  return {};
}

std::pair<int32_t, int32_t> Pattern::lengths(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kSet: return {1, 1};
    case Node::Kind::kBegin:
    case Node::Kind::kEnd:
    case Node::Kind::kWordEdge:
    case Node::Kind::kNoWordEdge:
    case Node::Kind::kAhead:
    case Node::Kind::kNotAhead:
    case Node::Kind::kBehind:
    case Node::Kind::kNotBehind: return {0, 0};
    case Node::Kind::kSequence: {
      std::pair<int32_t, int32_t> sum{0, 0};
      for (const Node& part : node.parts) {
        const auto [least, most] = lengths(part);
        sum = {plus(sum.first, least), plus(sum.second, most)};
      }
      return sum;
    }
    case Node::Kind::kChoice: {
      std::pair<int32_t, int32_t> all{kNoEnd, 0};
      for (const Node& part : node.parts) {
        const auto [least, most] = lengths(part);
        all = {std::min(all.first, least), std::max(all.second, most)};
      }
      return all;
    }
    case Node::Kind::kRepeat: {
      const auto [least, most] = lengths(node.parts[0]);
      return {times(least, node.least), most == 0 ? 0 : times(most, node.most)};
    }
  }
  return {0, kNoEnd};
}

Result<Pattern> Pattern::parse(std::string_view text, Whole whole) {
  if (text.size() > 4096) return Error(Code::kBadInput, "a pattern has at most 4096 bytes");
  auto node = parse_pattern(text, Reading::kNarrow);
  if (!node.ok()) return node.error();
  Pattern made;
  made.root_ = *std::move(node);
  if (looks_around(made.root_)) return Error(Code::kBadInput, "look-ahead, look-behind and \\b are not supported here");
  if (Status status = bound_repeats(made.root_); !status.ok()) return status.error();
  if (Status status = anchor(made.root_, whole); !status.ok()) return status.error();
  // Written out, what is finite of its repetitions.
  const auto size = [](const auto& self, const Node& of) -> int64_t {
    int64_t sum = 1;
    for (const Node& part : of.parts) sum += self(self, part);
    if (of.kind == Node::Kind::kRepeat) sum *= std::max(1, of.most == kNoEnd ? of.least : of.most);
    return std::min<int64_t>(sum, 1 << 30);
  };
  if (const int64_t written = size(size, made.root_); written > 20'000)
    return Error(Code::kBadInput, "the repetitions of the pattern, written out, are over 20,000 characters");
  return made;
}

std::optional<Pattern::RepeatedSet> Pattern::repeated_set(std::string_view text, Whole whole) {
  auto node = parse_pattern(text, Reading::kNarrow);
  if (!node.ok() || looks_around(*node) || !anchor(*node, whole).ok()) return std::nullopt;
  if (node->parts.size() != 1) return std::nullopt;
  const Node& only = node->parts[0];
  if (only.kind != Node::Kind::kRepeat || only.parts[0].kind != Node::Kind::kSet) return std::nullopt;
  return RepeatedSet{only.parts[0].set, only.least, only.most};
}

void Pattern::spell(const Node& node, bool json, std::string& out) {
  switch (node.kind) {
    case Node::Kind::kSet: out += spell_set(node.set, json); return;
    case Node::Kind::kSequence:
      for (const Node& part : node.parts) {
        const bool grouped = part.kind == Node::Kind::kChoice;
        if (grouped) out += '(';
        spell(part, json, out);
        if (grouped) out += ')';
      }
      return;
    case Node::Kind::kChoice:
      for (size_t i = 0; i < node.parts.size(); ++i) {
        if (i > 0) out += '|';
        spell(node.parts[i], json, out);
      }
      return;
    case Node::Kind::kRepeat: {
      std::string part;
      spell(node.parts[0], json, part);
      out += spell_repeat(part, node.least, node.most);
      return;
    }
    default: return;
  }
}

std::string Pattern::spelt() const {
  std::string out;
  spell(root_, false, out);
  return out;
}

std::string Pattern::spelt_in_json() const {
  std::string out;
  spell(root_, true, out);
  return out;
}

// The ends, ascending, of what the node matches from any of `begins`.
std::vector<size_t> Pattern::ends(const Node& node, std::string_view text, std::vector<size_t> begins) {
  std::vector<size_t> out;
  switch (node.kind) {
    case Node::Kind::kSet:
      for (const size_t at : begins) {
        if (at >= text.size()) continue;
        const Utf8Char c = utf8_at(text, at);
        if (contains(node.set, c.code_point)) out.push_back(at + c.length);
      }
      return out;
    case Node::Kind::kSequence:
      for (const Node& part : node.parts) begins = ends(part, text, std::move(begins));
      return begins;
    case Node::Kind::kChoice:
      for (const Node& part : node.parts)
        for (const size_t end : ends(part, text, begins)) out.push_back(end);
      break;
    case Node::Kind::kRepeat:
      for (int32_t i = 0; !begins.empty() && i <= node.most; ++i) {
        if (i >= node.least) {
          const size_t before = out.size();
          out.insert(out.end(), begins.begin(), begins.end());
          std::sort(out.begin(), out.end());
          out.erase(std::unique(out.begin(), out.end()), out.end());
          if (out.size() == before) break;  // another round would find nothing
        }
        if (i < node.most) begins = ends(node.parts[0], text, std::move(begins));
      }
      return out;
    default: return begins;
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

bool Pattern::matches(std::string_view text) const {
  const std::vector<size_t> found = ends(root_, text, {0});
  return !found.empty() && found.back() == text.size();
}

bool Pattern::restrict_length(int32_t least, int32_t most) {
  const auto [shortest, longest] = lengths(root_);
  if (shortest >= least && longest <= most) return true;
  if (root_.kind != Node::Kind::kSequence) return false;
  Node changed = root_;
  Node* open = nullptr;  // the one part that may have several lengths
  for (Node& part : changed.parts) {
    const auto [low, high] = lengths(part);
    if (low == high) continue;
    const bool of_characters = part.kind == Node::Kind::kRepeat && part.parts[0].kind == Node::Kind::kSet;
    if (!of_characters) return false;
    if (open != nullptr) {
      // Of two, "any text" before the searched pattern may be left out.
      if (open->least != 0) return false;
      open->most = 0;
    }
    open = &part;
  }
  if (open == nullptr) return false;
  int64_t fixed = 0;
  for (const Node& part : changed.parts)
    if (&part != open) fixed += lengths(part).first;
  const int64_t low = std::max<int64_t>(open->least, least - fixed);
  int64_t high = most == kNoEnd ? open->most : std::min<int64_t>(open->most, most - fixed);
  if (high != kNoEnd) high = std::min<int64_t>(high, kMostRepeats);
  if (low > kMostRepeats) return false;
  if (low > high) return false;
  open->least = static_cast<int32_t>(low);
  open->most = static_cast<int32_t>(high);
  root_ = std::move(changed);
  return true;
}

}  // namespace perigee
