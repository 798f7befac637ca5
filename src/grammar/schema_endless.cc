// Which rules of a schema's grammar derive no text: what refers to itself in every way.
#include <cctype>

#include "grammar/schema_rules.h"

namespace perigee {
namespace {

// Reads a body as SchemaRules spells it: literals, classes, Regex(…), names of rules, groups, | and ? * + {n,m}.
class Body {
 public:
  Body(std::string_view text, const std::vector<bool>& ends) : text_(text), ends_(ends) {}

  bool can_end() {
    bool any = false, all = true;  // of the alternatives; of the parts of this one
    while (at_ < text_.size() && text_[at_] != ')') {
      if (text_[at_] == '|') {
        any = any || all;
        all = true;
        ++at_;
      } else if (text_[at_] == ' ') {
        ++at_;
      } else {
        all = part() && all;
      }
    }
    return any || all;
  }

 private:
  bool part() {
    bool can = true;
    if (text_[at_] == '(') {
      ++at_;
      can = can_end();
      ++at_;
    } else if (text_[at_] == '"') {
      skip_quoted('"');
    } else if (text_[at_] == '[') {
      skip_quoted(']');
    } else {
      const size_t begin = at_;
      while (at_ < text_.size() && std::isalnum(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
      if (at_ == begin) ++at_;  // none of these
      const std::string_view name = text_.substr(begin, at_ - begin);
      if (name.size() > 1 && name[0] == 'r') can = ends_[std::stoul(std::string(name.substr(1)))];
    }
    if (at_ < text_.size() && (text_[at_] == '?' || text_[at_] == '*')) return ++at_, true;
    if (at_ < text_.size() && text_[at_] == '{') {
      const bool from_none = text_.substr(at_).starts_with("{0");
      at_ = std::min(text_.find('}', at_), text_.size() - 1) + 1;
      return can || from_none;
    }
    return can;
  }
  void skip_quoted(char end) {
    for (++at_; at_ < text_.size() && text_[at_] != end; ++at_)
      if (text_[at_] == '\\') ++at_;
    at_ = std::min(at_ + 1, text_.size());
  }

  std::string_view text_;
  const std::vector<bool>& ends_;
  size_t at_ = 0;
};

}  // namespace

std::unordered_set<std::string> SchemaRules::endless() const {
  std::vector<bool> ends(rules_.size(), false);
  for (bool changed = true; changed;) {
    check_time("");
    changed = false;
    for (size_t i = rules_.size(); i-- > 0;) {
      std::string_view body = rules_[i];
      if (body.starts_with("[max_tokens=")) body.remove_prefix(body.find(']') + 1);
      if (ends[i] || body.empty() || !Body(body, ends).can_end()) continue;
      ends[i] = true;
      changed = true;
    }
  }
  std::unordered_set<std::string> out;
  for (const auto& [schema, rule] : by_schema_)
    if (!rule.empty() && !ends[std::stoul(rule.substr(1))]) out.insert(schema);
  return out;
}

}  // namespace perigee
