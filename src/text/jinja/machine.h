// TemplateMachine: the meter of one render. It counts steps and bytes against the limits and keeps the first error.
//
// Errors are sticky: fail() remembers the first one and returns undefined, so code may go on with a meaningless value;
// loops stop because charge() answers false from then on. Every value that takes memory is made here.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "text/chat_template.h"
#include "text/jinja/value.h"

namespace perigee {

class TemplateMachine {
 public:
  explicit TemplateMachine(const TemplateLimits& limits) : limits_(limits) {}

  bool failed() const { return error_.has_value(); }
  const Error& error() const { return *error_; }
  void set_line(int line) { line_ = line; }

  // Remembers an error of the template or its data, with the current line.
  TemplateValue fail(std::string_view message);
  // Remembers that a cap was met, e.g. over("max_steps", 1000000).
  TemplateValue over(std::string_view cap, size_t limit);

  // One step, or as many as the work is worth, so that a step is some tens of nanoseconds; false once the render has
  // failed.
  bool charge(size_t steps = 1);
  bool charge_bytes(size_t bytes) { return charge(1 + bytes / 64); }  // copied, searched or compared
  bool charge_text(size_t bytes) { return charge(1 + bytes / 8); }    // looked at character by character
  // Counts memory that the template makes; false, before it is made, when it is too much.
  bool reserve(size_t bytes);

  TemplateValue make_string(std::string text);
  TemplateValue make_list(TemplateValues items) {
    return make_sequence(TemplateSequence::Kind::kList, std::move(items));
  }
  TemplateValue make_sequence(TemplateSequence::Kind kind, TemplateValues items);
  TemplateValue make_dict(std::vector<std::pair<TemplateValue, TemplateValue>> entries);
  TemplateValue make_strings(const std::vector<std::string_view>& parts);  // a list
  TemplateNamespace* make_namespace();
  TemplateValue make_loop(TemplateValue::Sequence sequence);

  // A value of the context; not counted, since the caller holds it already.
  TemplateValue from_json(const Json& json);

  const TemplateLimits& limits() const { return limits_; }

 private:
  bool fits_nesting(int nesting);

  TemplateLimits limits_;
  std::optional<Error> error_;
  size_t steps_ = 0;
  size_t bytes_ = 0;
  int line_ = 0;
  std::deque<TemplateNamespace> namespaces_;
};

// Values as Python handles them.

bool equal_values(TemplateMachine& machine, const TemplateValue& a, const TemplateValue& b);
// a < b is -1, a == b is 0; fails for kinds that Python does not order. NaN compares as unordered: 2.
int compare_values(TemplateMachine& machine, const TemplateValue& a, const TemplateValue& b);
bool contains_value(TemplateMachine& machine, const TemplateValue& container, const TemplateValue& item);
const TemplateValue* find_member(TemplateMachine& machine, const TemplateDict& dict, const TemplateValue& key);
const TemplateValue* find_member(TemplateMachine& machine, const TemplateDict& dict, std::string_view key);
bool is_hashable(const TemplateValue& value);

// What iterating gives: the items, the keys of a dict, the characters of a string; nothing for undefined. Fails, with
// null, for the rest.
TemplateValue::Sequence iterate(TemplateMachine& machine, const TemplateValue& value);

// str(value) appended to `out`, which may not grow over `cap` bytes.
void append_str(TemplateMachine& machine, std::string& out, const TemplateValue& value);
std::string to_str(TemplateMachine& machine, const TemplateValue& value);

// json.dumps(value, ...): separators as given, indent < 0 for none.
struct TemplateJsonStyle {
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  std::string indent;
  bool indented = false;
  bool sort_keys = false;
  bool ensure_ascii = false;
};
TemplateValue to_json_text(TemplateMachine& machine, const TemplateValue& value, const TemplateJsonStyle& style);

}  // namespace perigee
