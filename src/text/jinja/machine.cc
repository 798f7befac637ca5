#include "text/jinja/machine.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "text/jinja/strings.h"

namespace perigee {
namespace {

using Kind = TemplateSequence::Kind;

constexpr int kMaxNesting = 160;        // a request's 128 levels, and what a template puts around them
constexpr size_t kStringOverhead = 64;  // the shared string object itself

std::string python_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return format_double(value);
}

void append_repr(TemplateMachine& machine, std::string& out, const TemplateValue& value);

void append_items(TemplateMachine& machine, std::string& out, const TemplateSequence& sequence) {
  const bool tuple = sequence.kind == Kind::kTuple;
  out += tuple ? '(' : '[';
  bool first = true;
  for (const TemplateValue& item : sequence.items) {
    if (!std::exchange(first, false)) out += ", ";
    append_repr(machine, out, item);
    if (machine.failed()) return;
  }
  if (tuple && sequence.items.size() == 1) out += ',';
  out += tuple ? ')' : ']';
}

void append_dict(TemplateMachine& machine, std::string& out, const TemplateDict& dict) {
  out += '{';
  bool first = true;
  for (const auto& [key, value] : dict.entries) {
    if (!std::exchange(first, false)) out += ", ";
    append_repr(machine, out, key);
    out += ": ";
    append_repr(machine, out, value);
    if (machine.failed()) return;
  }
  out += '}';
}

void append_repr(TemplateMachine& machine, std::string& out, const TemplateValue& value) {
  if (!machine.charge()) return;
  if (out.size() > machine.limits().max_value_bytes) {
    machine.over("max_value_bytes", machine.limits().max_value_bytes);
  } else if (value.is_string()) {
    if (machine.charge_text(value.string().size())) append_python_repr(out, value.string());
  } else if (value.is_undefined()) {
    out += "Undefined";
  } else {
    append_str(machine, out, value);
  }
}

bool same_items(TemplateMachine& machine, const TemplateValues& a, const TemplateValues& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!equal_values(machine, a[i], b[i])) return false;
  return true;
}

bool same_dicts(TemplateMachine& machine, const TemplateDict& a, const TemplateDict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const TemplateValue* other = find_member(machine, b, key);
    if (!other || !equal_values(machine, value, *other)) return false;
  }
  return true;
}

int order(const auto& a, const auto& b) {
  return a < b ? -1 : b < a ? 1 : a == b ? 0 : 2;
}

// Exact for every int64 and double: the 64-bit mantissa of long double holds both.
int order_numbers(const TemplateValue& a, const TemplateValue& b) {
  if (a.is_integral() && b.is_integral()) return order(a.integer(), b.integer());
  const auto wide = [](const TemplateValue& v) -> long double { return v.is_integral() ? v.integer() : v.number(); };
  return order(wide(a), wide(b));
}

}  // namespace

TemplateValue TemplateMachine::fail(std::string_view message) {
  if (!error_) error_ = bad_input(fmt::format("chat template, line {}: {}", line_, message));
  return {};
}

TemplateValue TemplateMachine::over(std::string_view cap, size_t limit) {
  if (!error_) {
    error_ = Error(Code::kTooLarge, fmt::format("chat template, line {}: over the cap {} = {}", line_, cap, limit));
  }
  return {};
}

bool TemplateMachine::charge(size_t steps) {
  if (error_) return false;
  steps_ += steps;
  if (steps_ > limits_.max_steps) over("max_steps", limits_.max_steps);
  return !error_;
}

bool TemplateMachine::reserve(size_t bytes) {
  if (error_) return false;
  if (bytes > limits_.max_value_bytes || bytes_ + bytes > limits_.max_value_bytes) {
    over("max_value_bytes", limits_.max_value_bytes);
    return false;
  }
  bytes_ += bytes;
  return true;
}

bool TemplateMachine::fits_nesting(int nesting) {
  if (nesting > kMaxNesting) over("nesting of values", kMaxNesting);
  return !error_;
}

TemplateValue TemplateMachine::make_string(std::string text) {
  if (!reserve(text.size() + kStringOverhead)) return {};
  return TemplateValue(std::make_shared<const std::string>(std::move(text)));
}

TemplateValue TemplateMachine::make_sequence(Kind kind, TemplateValues items) {
  if (!reserve(items.size() * sizeof(TemplateValue) + kStringOverhead)) return {};
  int nesting = 0;
  for (const TemplateValue& item : items) nesting = std::max(nesting, item.nesting());
  if (!fits_nesting(nesting + 1)) return {};
  auto sequence = std::make_shared<TemplateSequence>();
  sequence->kind = kind;
  sequence->items = std::move(items);
  sequence->nesting = nesting + 1;
  return TemplateValue(TemplateValue::Sequence(std::move(sequence)));
}

TemplateValue TemplateMachine::make_dict(std::vector<std::pair<TemplateValue, TemplateValue>> entries) {
  if (!reserve(entries.size() * 2 * sizeof(TemplateValue) + kStringOverhead)) return {};
  int nesting = 0;
  for (const auto& [key, value] : entries) nesting = std::max({nesting, key.nesting(), value.nesting()});
  if (!fits_nesting(nesting + 1)) return {};
  auto dict = std::make_shared<TemplateDict>();
  dict->entries = std::move(entries);
  dict->nesting = nesting + 1;
  return TemplateValue(TemplateValue::Dict(std::move(dict)));
}

TemplateValue TemplateMachine::make_strings(const std::vector<std::string_view>& parts) {
  TemplateValues items;
  items.reserve(parts.size());
  for (const std::string_view part : parts) {
    if (!charge(3)) return {};  // the string takes as long as three nodes
    items.push_back(make_string(std::string(part)));
  }
  return make_list(std::move(items));
}

TemplateNamespace* TemplateMachine::make_namespace() {
  reserve(kStringOverhead);
  return &namespaces_.emplace_back();
}

TemplateValue TemplateMachine::make_loop(TemplateValue::Sequence sequence) {
  reserve(kStringOverhead);
  auto loop = std::make_shared<TemplateLoop>();
  loop->sequence = std::move(sequence);
  return TemplateValue(std::move(loop));
}

TemplateValue TemplateMachine::from_json(const Json& json) {
  if (json.is_null()) return TemplateValue::None{};
  if (json.is_bool()) return TemplateValue(json.as_bool());
  if (json.is_int()) return TemplateValue(json.as_int());
  if (const std::string* digits = json.digits()) {
    const bool integral = digits->find_first_of(".eE") == std::string::npos;
    return TemplateValue(std::make_shared<const TemplateNumber>(*digits, json.as_double(), integral));
  }
  if (json.is_double()) return TemplateValue(json.as_double());
  if (json.is_string()) return TemplateValue(std::make_shared<const std::string>(json.as_string()));
  int nesting = 0;
  if (json.is_array()) {
    auto sequence = std::make_shared<TemplateSequence>();
    sequence->items.reserve(json.as_array().size());
    for (const Json& item : json.as_array()) {
      sequence->items.push_back(from_json(item));
      nesting = std::max(nesting, sequence->items.back().nesting());
    }
    sequence->nesting = nesting + 1;
    return fits_nesting(nesting + 1) ? TemplateValue(TemplateValue::Sequence(std::move(sequence))) : TemplateValue();
  }
  auto dict = std::make_shared<TemplateDict>();
  dict->entries.reserve(json.as_object().size());
  for (const auto& [key, value] : json.as_object()) {
    dict->entries.emplace_back(TemplateValue(std::make_shared<const std::string>(key)), from_json(value));
    nesting = std::max(nesting, dict->entries.back().second.nesting());
  }
  dict->nesting = nesting + 1;
  return fits_nesting(nesting + 1) ? TemplateValue(TemplateValue::Dict(std::move(dict))) : TemplateValue();
}

bool equal_values(TemplateMachine& machine, const TemplateValue& a, const TemplateValue& b) {
  if (!machine.charge()) return false;
  if (a.is_number() && b.is_number()) return order_numbers(a, b) == 0;
  if (a.is_string() && b.is_string()) {
    return a.string().size() == b.string().size() && machine.charge_bytes(a.string().size()) &&
           a.string() == b.string();
  }
  if (a.is_undefined() || a.is_none()) return (a.is_undefined() && b.is_undefined()) || (a.is_none() && b.is_none());
  if (a.is_dict() && b.is_dict()) return same_dicts(machine, a.dict(), b.dict());
  if (a.is_sequence() && b.is_sequence()) {
    const bool comparable = a.sequence().kind == b.sequence().kind && a.sequence().kind != Kind::kIterator;
    return comparable ? same_items(machine, a.items(), b.items()) : &a.sequence() == &b.sequence();
  }
  if (a.is<TemplateNamespace*>() && b.is<TemplateNamespace*>())
    return a.as<TemplateNamespace*>() == b.as<TemplateNamespace*>();
  return false;
}

int compare_values(TemplateMachine& machine, const TemplateValue& a, const TemplateValue& b) {
  if (!machine.charge()) return 2;
  if (a.is_number() && b.is_number()) return order_numbers(a, b);
  if (a.is_string() && b.is_string()) {
    machine.charge_bytes(std::min(a.string().size(), b.string().size()));
    return order(a.string(), b.string());
  }
  const bool lists = a.is_list() && b.is_list();
  const bool tuples =
      a.is_sequence() && b.is_sequence() && a.sequence().kind == Kind::kTuple && b.sequence().kind == Kind::kTuple;
  if (!lists && !tuples) {
    machine.fail(fmt::format("cannot order {} and {}", a.type_name(), b.type_name()));
    return 2;
  }
  const size_t common = std::min(a.items().size(), b.items().size());
  for (size_t i = 0; i < common; ++i)
    if (!equal_values(machine, a.items()[i], b.items()[i])) return compare_values(machine, a.items()[i], b.items()[i]);
  return order(a.items().size(), b.items().size());
}

bool is_hashable(const TemplateValue& value) {
  if (value.is_dict()) return false;
  if (!value.is_sequence()) return true;
  if (value.is_list()) return false;
  return std::all_of(value.items().begin(), value.items().end(), is_hashable);
}

const TemplateValue* find_member(TemplateMachine& machine, const TemplateDict& dict, std::string_view key) {
  if (!machine.charge(1 + dict.entries.size() / 16)) return nullptr;
  for (const auto& [name, value] : dict.entries)
    if (name.is_string() && name.string() == key) return &value;
  return nullptr;
}

const TemplateValue* find_member(TemplateMachine& machine, const TemplateDict& dict, const TemplateValue& key) {
  if (key.is_string()) return find_member(machine, dict, std::string_view(key.string()));
  if (!is_hashable(key)) {
    machine.fail(fmt::format("unhashable type: {}", key.type_name()));
    return nullptr;
  }
  for (const auto& [name, value] : dict.entries)
    if (equal_values(machine, name, key)) return &value;
  return nullptr;
}

bool contains_value(TemplateMachine& machine, const TemplateValue& container, const TemplateValue& item) {
  if (container.is_undefined()) return false;
  if (container.is_dict()) return find_member(machine, container.dict(), item) != nullptr;
  if (container.is_string()) {
    if (!item.is_string()) {
      machine.fail(fmt::format("'in <str>' requires a string on its left, not {}", item.type_name()));
      return false;
    }
    if (!machine.charge_bytes(container.string().size())) return false;
    return find_text(container.string(), item.string()) != std::string::npos;
  }
  if (!container.is_sequence()) {
    machine.fail(fmt::format("{} is not iterable", container.type_name()));
    return false;
  }
  for (const TemplateValue& candidate : container.items())
    if (equal_values(machine, candidate, item)) return true;
  return false;
}

TemplateValue::Sequence iterate(TemplateMachine& machine, const TemplateValue& value) {
  if (value.is_sequence()) return value.as<TemplateValue::Sequence>();
  TemplateValue made;
  if (value.is_undefined()) {
    made = machine.make_list({});
  } else if (value.is_string()) {
    if (!machine.charge_bytes(value.string().size()) || !machine.reserve(value.string().size())) return nullptr;
    made = machine.make_strings(utf8_chars(value.string()));
  } else if (value.is_dict()) {
    if (!machine.charge(1 + value.dict().entries.size() / 16)) return nullptr;
    TemplateValues keys;
    for (const auto& entry : value.dict().entries) keys.push_back(entry.first);
    made = machine.make_list(std::move(keys));
  } else {
    machine.fail(fmt::format("{} is not iterable", value.type_name()));
  }
  return made.is_sequence() ? made.as<TemplateValue::Sequence>() : nullptr;
}

void append_str(TemplateMachine& machine, std::string& out, const TemplateValue& value) {
  if (value.is_string()) {
    if (machine.charge_bytes(value.string().size())) out += value.string();
  } else if (value.is_undefined()) {
    return;
  } else if (value.is_none()) {
    out += "None";
  } else if (value.is_bool()) {
    out += value.as<bool>() ? "True" : "False";
  } else if (value.is_integral()) {
    out += std::to_string(value.integer());
  } else if (value.is<TemplateValue::Number>()) {
    out += value.as<TemplateValue::Number>()->text;
  } else if (value.is_number()) {
    out += python_float(value.number());
  } else if (value.is_dict()) {
    append_dict(machine, out, value.dict());
  } else if (value.is_list() || (value.is_sequence() && value.sequence().kind == Kind::kTuple)) {
    append_items(machine, out, value.sequence());
  } else {
    machine.fail(fmt::format("a {} cannot be printed", value.type_name()));
  }
}

std::string to_str(TemplateMachine& machine, const TemplateValue& value) {
  std::string out;
  append_str(machine, out, value);
  return out;
}

}  // namespace perigee
