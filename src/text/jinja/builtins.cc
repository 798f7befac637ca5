#include "text/jinja/builtins.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/utf8.h"
#include "text/jinja/strings.h"

namespace perigee {

// Tests ("is ...")

namespace {

using Arguments = TemplateArguments;
using Machine = TemplateMachine;
using Value = TemplateValue;
using SequenceKind = TemplateSequence::Kind;

// A test of one value without arguments.
template <bool (*kHolds)(const Value&)>
Value check(TemplateMachine& machine, const TemplateArguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  return Value(given.ok() && kHolds(*given[0]));
}

template <bool (*kHolds)(TemplateMachine&, const Value&, const Value&)>
Value compare(TemplateMachine& machine, const TemplateArguments& arguments) {
  const BoundArguments given(machine, arguments, {"a", "b"}, 2);
  return Value(given.ok() && kHolds(machine, *given[0], *given[1]));
}

bool is_defined(const Value& value) {
  return !value.is_undefined();
}
bool is_undefined(const Value& value) {
  return value.is_undefined();
}
bool is_none(const Value& value) {
  return value.is_none();
}
bool is_string(const Value& value) {
  return value.is_string();
}
bool is_mapping(const Value& value) {
  return value.is_dict();
}
bool is_number(const Value& value) {
  return value.is_number();
}
bool is_integer(const Value& value) {
  if (value.is<Value::Number>()) return value.as<Value::Number>()->integral;
  return value.is_integral() && !value.is_bool();
}
bool is_float(const Value& value) {
  return value.is_number() && !value.is_integral() && !is_integer(value);
}
bool is_boolean(const Value& value) {
  return value.is_bool();
}
bool is_true(const Value& value) {
  return value.is_bool() && value.as<bool>();
}
bool is_false(const Value& value) {
  return value.is_bool() && !value.as<bool>();
}
bool is_callable(const Value& value) {
  return value.is<const TemplateMacro*>() || value.is<TemplateFunction>();
}

bool is_iterable(const Value& value) {
  return value.is_undefined() || value.is_string() || value.is_sequence() || value.is_dict() || value.is<Value::Loop>();
}

bool is_sequence(const Value& value) {
  return value.is_undefined() || value.is_string() || value.is_indexable() || value.is_dict();
}

bool has_letters_of(const Value& value, char first, char last) {
  return std::any_of(value.string().begin(), value.string().end(), [=](char c) { return c >= first && c <= last; });
}
bool is_lower(const Value& value) {
  return value.is_string() && has_letters_of(value, 'a', 'z') && !has_letters_of(value, 'A', 'Z');
}
bool is_upper(const Value& value) {
  return value.is_string() && has_letters_of(value, 'A', 'Z') && !has_letters_of(value, 'a', 'z');
}

bool less(TemplateMachine& m, const Value& a, const Value& b) {
  return compare_values(m, a, b) == -1;
}
bool less_equal(TemplateMachine& m, const Value& a, const Value& b) {
  return compare_values(m, a, b) <= 0;
}
bool greater(TemplateMachine& m, const Value& a, const Value& b) {
  return compare_values(m, a, b) == 1;
}
bool greater_equal(TemplateMachine& m, const Value& a, const Value& b) {
  const int order = compare_values(m, a, b);
  return order == 0 || order == 1;
}
bool unequal(TemplateMachine& m, const Value& a, const Value& b) {
  return !equal_values(m, a, b);
}
bool is_in(TemplateMachine& m, const Value& item, const Value& container) {
  return contains_value(m, container, item);
}

// Identity in Python; for the constants that templates compare so, it is equality of the same kind.
bool is_same(TemplateMachine& m, const Value& a, const Value& b) {
  return std::string_view(a.type_name()) == b.type_name() && equal_values(m, a, b);
}

bool divides(TemplateMachine& m, const Value& value, const Value& divisor) {
  if (!value.is_integral() || !divisor.is_integral() || divisor.integer() == 0) {
    m.fail("divisibleby needs integers and a divisor other than 0");
    return false;
  }
  return divisor.integer() == -1 || value.integer() % divisor.integer() == 0;
}

template <int64_t kRemainder>
Value parity(TemplateMachine& machine, const TemplateArguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  if (!given.ok()) return {};
  if (!given[0]->is_integral()) return machine.fail("odd and even need an integer");
  return Value((given[0]->integer() & 1) == kRemainder);
}

struct NamedTest {
  std::string_view name;
  TemplateBuiltin test;
};

constexpr std::array kTests = {
    NamedTest{"!=", compare<unequal>},
    NamedTest{"<", compare<less>},
    NamedTest{"<=", compare<less_equal>},
    NamedTest{"==", compare<equal_values>},
    NamedTest{">", compare<greater>},
    NamedTest{">=", compare<greater_equal>},
    NamedTest{"boolean", check<is_boolean>},
    NamedTest{"callable", check<is_callable>},
    NamedTest{"defined", check<is_defined>},
    NamedTest{"divisibleby", compare<divides>},
    NamedTest{"eq", compare<equal_values>},
    NamedTest{"equalto", compare<equal_values>},
    NamedTest{"even", parity<0>},
    NamedTest{"false", check<is_false>},
    NamedTest{"float", check<is_float>},
    NamedTest{"ge", compare<greater_equal>},
    NamedTest{"greaterthan", compare<greater>},
    NamedTest{"gt", compare<greater>},
    NamedTest{"in", compare<is_in>},
    NamedTest{"integer", check<is_integer>},
    NamedTest{"iterable", check<is_iterable>},
    NamedTest{"le", compare<less_equal>},
    NamedTest{"lessthan", compare<less>},
    NamedTest{"lower", check<is_lower>},
    NamedTest{"lt", compare<less>},
    NamedTest{"mapping", check<is_mapping>},
    NamedTest{"ne", compare<unequal>},
    NamedTest{"none", check<is_none>},
    NamedTest{"number", check<is_number>},
    NamedTest{"odd", parity<1>},
    NamedTest{"sameas", compare<is_same>},
    NamedTest{"sequence", check<is_sequence>},
    NamedTest{"string", check<is_string>},
    NamedTest{"true", check<is_true>},
    NamedTest{"undefined", check<is_undefined>},
    NamedTest{"upper", check<is_upper>},
};

}  // namespace

TemplateBuiltin find_template_test(std::string_view name) {
  const auto at = std::find_if(kTests.begin(), kTests.end(), [&](const NamedTest& test) { return test.name == name; });
  return at == kTests.end() ? nullptr : at->test;
}

// Methods of strings, dicts, lists and loops, and the global functions

namespace {

constexpr size_t kMaxStripChars = 64;
constexpr int64_t kMaxRange = 100'000;  // Jinja2's sandbox has the same

template <StripSide kSide>
Value string_strip(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "chars"}, 1);
  if (!given.ok()) return {};
  const std::string& text = given[0]->string();
  const bool blanks = !given[1] || given[1]->is_none();
  if (!blanks && !given[1]->is_string()) return machine.fail("strip: chars is not a string");
  const std::string_view chars = blanks ? std::string_view() : given[1]->string();
  if (chars.size() > kMaxStripChars) return machine.over("characters to strip", kMaxStripChars);
  const std::string_view kept = python_strip(text, kSide, blanks ? nullptr : &chars);
  machine.charge_text((text.size() - kept.size()) * (1 + chars.size()));
  return machine.charge_bytes(kept.size()) ? machine.make_string(std::string(kept)) : Value();
}

template <auto kSplit>
Value string_split(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "sep", "maxsplit"}, 1);
  if (!given.ok()) return {};
  std::string_view separator;
  if (given[1] && !given[1]->is_none()) {
    if (!given[1]->is_string() || given[1]->string().empty()) return machine.fail("split: empty or wrong separator");
    separator = given[1]->string();
  }
  if (given[2] && !given[2]->is_integral()) return machine.fail("split: maxsplit is not an integer");
  const std::string& text = given[0]->string();
  const size_t parts = separator.empty() ? text.size() / 2 : count_text(text, separator);
  const bool charged = separator.empty() ? machine.charge_text(text.size()) : machine.charge(text.size() / 64 + parts);
  if (!charged || !machine.reserve(text.size() + parts * sizeof(std::string_view))) return {};
  return machine.make_strings(kSplit(text, separator, given[2] ? given[2]->integer() : -1));
}

Value string_splitlines(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self"}, 1);
  if (!given.ok() || !machine.charge(1 + given[0]->string().size() / 4)) return {};
  return machine.make_strings(python_splitlines(given[0]->string()));
}

// startswith and endswith, of one string or a tuple of them.
template <bool kAtEnd>
Value string_has_edge(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "edge"}, 2);
  if (!given.ok()) return {};
  const std::string& text = given[0]->string();
  TemplateValues edges{*given[1]};
  if (given[1]->is_sequence() && given[1]->sequence().kind == SequenceKind::kTuple) edges = given[1]->items();
  bool found = false;
  for (const Value& edge : edges) {
    if (!edge.is_string()) return machine.fail("startswith and endswith need a string or a tuple of strings");
    if (!machine.charge_bytes(edge.string().size())) return {};
    found = found || (kAtEnd ? text.ends_with(edge.string()) : text.starts_with(edge.string()));
  }
  return Value(found);
}

Value string_replace(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "old", "new", "count"}, 3);
  if (!given.ok()) return {};
  if (!given[1]->is_string() || !given[2]->is_string() || (given[3] && !given[3]->is_integral()))
    return machine.fail("replace needs two strings and an integer");
  const std::string& text = given[0]->string();
  const std::string& old = given[1]->string();
  const std::string& fresh = given[2]->string();
  if (!machine.charge_bytes(text.size())) return {};
  // An empty `old` stands before every character and at the end.
  size_t count = old.empty() ? utf8_length(text) + 1 : count_text(text, old);
  if (given[3] && given[3]->integer() >= 0) count = std::min(count, static_cast<size_t>(given[3]->integer()));
  if (!machine.charge(count)) return {};
  const size_t added = fresh.empty() ? 0 : fresh.size() * count;
  if (added / std::max<size_t>(1, fresh.size()) != (fresh.empty() ? 0 : count) || !machine.reserve(added))
    return machine.over("max_value_bytes", machine.limits().max_value_bytes);
  std::string out;
  size_t at = 0;
  for (; count > 0; --count) {
    const size_t hit = old.empty() ? at : find_text(text, old, at);
    out.append(text, at, hit - at).append(fresh);
    at = hit + old.size();
    if (!old.empty() || at >= text.size()) continue;
    const size_t size = utf8_at(text, at).length;
    out.append(text, at, size);
    at += size;
  }
  return machine.make_string(out.append(text, std::min(at, text.size())));
}

template <std::string (*kChange)(std::string_view)>
Value string_change(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self"}, 1);
  if (!given.ok() || !machine.charge_text(given[0]->string().size())) return {};
  return machine.make_string(kChange(given[0]->string()));
}

Value string_join(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "items"}, 2);
  const auto items = given.ok() ? iterate(machine, *given[1]) : nullptr;
  if (!items) return {};
  std::string out;
  bool first = true;
  for (const Value& item : items->items) {
    if (!item.is_string()) return machine.fail("join: an item is not a string");
    const bool separated = !std::exchange(first, false);
    const size_t added = item.string().size() + (separated ? given[0]->string().size() : 0);
    if (!machine.charge_bytes(added) || !machine.reserve(added)) return {};
    if (separated) out += given[0]->string();
    out += item.string();
  }
  return machine.make_string(std::move(out));
}

Value string_find(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "sub"}, 2);
  if (!given.ok() || !machine.charge_text(given[0]->string().size())) return {};
  if (!given[1]->is_string()) return machine.fail("find needs a string");
  const std::string_view text = given[0]->string();
  const size_t at = find_text(text, given[1]->string());
  return Value(at == std::string::npos ? int64_t{-1} : static_cast<int64_t>(utf8_length(text.substr(0, at))));
}

Value string_count(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "sub"}, 2);
  if (!given.ok() || !machine.charge_text(given[0]->string().size())) return {};
  if (!given[1]->is_string()) return machine.fail("count needs a string");
  const std::string& text = given[0]->string();
  const std::string& part = given[1]->string();
  return Value(static_cast<int64_t>(part.empty() ? utf8_length(text) + 1 : count_text(text, part)));
}

Value string_isdigit(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self"}, 1);
  if (!given.ok()) return {};
  const std::string& text = given[0]->string();
  return Value(!text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; }));
}

Value dict_get(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "key", "default"}, 2);
  if (!given.ok()) return {};
  if (const Value* found = find_member(machine, given[0]->dict(), *given[1])) return *found;
  return given[2] ? *given[2] : Value(Value::None{});
}

template <bool kKeys, bool kValues>
Value dict_view(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self"}, 1);
  if (!given.ok()) return {};
  TemplateValues out;
  for (const auto& [key, value] : given[0]->dict().entries) {
    if (!machine.charge()) return {};
    out.push_back(!kValues ? key : !kKeys ? value : machine.make_sequence(SequenceKind::kTuple, {key, value}));
  }
  return machine.make_sequence(SequenceKind::kView, std::move(out));
}

Value list_index(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "value"}, 2);
  if (!given.ok()) return {};
  for (size_t i = 0; i < given[0]->items().size(); ++i)
    if (equal_values(machine, given[0]->items()[i], *given[1])) return Value(static_cast<int64_t>(i));
  return machine.fail("index: the value is not in the list");
}

Value list_count(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"self", "value"}, 2);
  if (!given.ok()) return {};
  const auto& items = given[0]->items();
  const auto same = [&](const Value& item) { return equal_values(machine, item, *given[1]); };
  return Value(static_cast<int64_t>(std::count_if(items.begin(), items.end(), same)));
}

Value loop_cycle(Machine& machine, const Arguments& arguments) {
  if (arguments.positional.size() < 2) return machine.fail("cycle needs values");
  const size_t at = arguments.positional[0].as<Value::Loop>()->index0 % (arguments.positional.size() - 1);
  return arguments.positional[1 + at];
}

// A loop that remembers a value holding itself would never be freed.
bool holds_loop(Machine& machine, const Value& value) {
  if (value.is<Value::Loop>() || !machine.charge()) return true;
  const auto holds = [&](const Value& part) { return holds_loop(machine, part); };
  if (value.is_sequence()) return std::any_of(value.items().begin(), value.items().end(), holds);
  if (!value.is_dict()) return false;
  const auto& entries = value.dict().entries;
  return std::any_of(entries.begin(), entries.end(), [&](const auto& e) { return holds(e.first) || holds(e.second); });
}

Value loop_changed(Machine& machine, const Arguments& arguments) {
  TemplateLoop& loop = *arguments.positional[0].as<Value::Loop>();
  TemplateValues now(arguments.positional.begin() + 1, arguments.positional.end());
  bool same = loop.last_changed && loop.last_changed->size() == now.size();
  for (size_t i = 0; same && i < now.size(); ++i) same = equal_values(machine, (*loop.last_changed)[i], now[i]);
  for (const Value& value : now)
    if (holds_loop(machine, value)) return machine.fail("changed of a loop is not supported");
  loop.last_changed = std::make_unique<TemplateValues>(std::move(now));
  return Value(!same);
}

struct NamedMethod {
  std::string_view name;
  TemplateBuiltin method;
};

constexpr std::array kStringMethods = {
    NamedMethod{"capitalize", string_change<python_capitalize>},
    NamedMethod{"count", string_count},
    NamedMethod{"endswith", string_has_edge<true>},
    NamedMethod{"find", string_find},
    NamedMethod{"isdigit", string_isdigit},
    NamedMethod{"join", string_join},
    NamedMethod{"lower", string_change<ascii_lower>},
    NamedMethod{"lstrip", string_strip<StripSide::kLeft>},
    NamedMethod{"replace", string_replace},
    NamedMethod{"rsplit", string_split<python_rsplit>},
    NamedMethod{"rstrip", string_strip<StripSide::kRight>},
    NamedMethod{"split", string_split<python_split>},
    NamedMethod{"splitlines", string_splitlines},
    NamedMethod{"startswith", string_has_edge<false>},
    NamedMethod{"strip", string_strip<StripSide::kBoth>},
    NamedMethod{"title", string_change<python_title>},
    NamedMethod{"upper", string_change<ascii_upper>},
};
constexpr std::array kDictMethods = {
    NamedMethod{"get", dict_get},
    NamedMethod{"items", dict_view<true, true>},
    NamedMethod{"keys", dict_view<true, false>},
    NamedMethod{"values", dict_view<false, true>},
};
constexpr std::array kListMethods = {NamedMethod{"count", list_count}, NamedMethod{"index", list_index}};
constexpr std::array kLoopMethods = {NamedMethod{"changed", loop_changed}, NamedMethod{"cycle", loop_cycle}};

Value call_range(Machine& machine, const Arguments& arguments) {
  const auto& given = arguments.positional;
  const bool integers = std::all_of(given.begin(), given.end(), [](const Value& v) { return v.is_integral(); });
  if (given.empty() || given.size() > 3 || !integers || !arguments.named.empty())
    return machine.fail("range needs one to three integers");
  const int64_t start = given.size() > 1 ? given[0].integer() : 0;
  const int64_t stop = given.size() > 1 ? given[1].integer() : given[0].integer();
  const int64_t step = given.size() > 2 ? given[2].integer() : 1;
  if (step == 0) return machine.fail("range with a step of 0");
  TemplateValues out;
  // In 128 bits no position can overflow.
  for (__int128 at = start; step > 0 ? at < stop : at > stop; at += step) {
    if (static_cast<int64_t>(out.size()) >= kMaxRange) return machine.over("length of range", kMaxRange);
    out.emplace_back(static_cast<int64_t>(at));
  }
  if (!machine.charge(1 + out.size() / 16)) return {};
  return machine.make_sequence(SequenceKind::kRange, std::move(out));
}

Value call_namespace(Machine& machine, const Arguments& arguments) {
  if (arguments.positional.size() > 1 || (!arguments.positional.empty() && !arguments.positional[0].is_dict()))
    return machine.fail("namespace needs named arguments or one mapping");
  TemplateNamespace* made = machine.make_namespace();
  if (!arguments.positional.empty()) {
    for (const auto& [key, value] : arguments.positional[0].dict().entries)
      if (key.is_string() && machine.charge()) made->attributes.emplace_back(key.string(), value);
  }
  for (const auto& [name, value] : arguments.named) {
    const auto same = [&name = name](const auto& attribute) { return attribute.first == name; };
    std::erase_if(made->attributes, same);
    made->attributes.emplace_back(name, value);
  }
  return Value(made);
}

Value call_dict(Machine& machine, const Arguments& arguments) {
  std::vector<std::pair<Value, Value>> entries;
  if (arguments.positional.size() > 1 || (!arguments.positional.empty() && !arguments.positional[0].is_dict()))
    return machine.fail("dict needs named arguments or one mapping");
  if (!arguments.positional.empty()) entries = arguments.positional[0].dict().entries;
  for (const auto& [name, value] : arguments.named) {
    const auto same = [&name = name](const auto& e) { return e.first.is_string() && e.first.string() == name; };
    const auto old = std::find_if(entries.begin(), entries.end(), same);
    if (!machine.charge(1 + entries.size() / 16)) return {};
    if (old != entries.end()) {
      old->second = value;
    } else {
      entries.emplace_back(machine.make_string(name), value);
    }
  }
  return machine.make_dict(std::move(entries));
}

}  // namespace

BoundArguments::BoundArguments(TemplateMachine& machine, const TemplateArguments& arguments,
                               std::initializer_list<std::string_view> parameters, size_t required)
    : values_(parameters.size(), nullptr) {
  ok_ = arguments.positional.size() <= parameters.size();
  if (!ok_) {
    machine.fail("too many arguments");
    return;
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const auto at = std::find(parameters.begin(), parameters.end(), name);
    const auto index = static_cast<size_t>(at - parameters.begin());
    ok_ = ok_ && at != parameters.end() && !values_[index];
    if (ok_) values_[index] = &value;
  }
  for (size_t i = 0; i < required; ++i) ok_ = ok_ && values_[i];
  if (!ok_) machine.fail("an argument is missing, unknown or given twice");
}

TemplateValue call_template_method(TemplateMachine& machine, std::string_view method,
                                   const TemplateArguments& arguments) {
  const Value& object = arguments.positional[0];
  const auto call = [&](const auto& methods) -> Value {
    const auto at =
        std::find_if(methods.begin(), methods.end(), [&](const NamedMethod& m) { return m.name == method; });
    if (at != methods.end()) return at->method(machine, arguments);
    return machine.fail(fmt::format("a {} has no method '{}' that a template may call", object.type_name(), method));
  };
  if (object.is_string()) return call(kStringMethods);
  if (object.is_dict()) return call(kDictMethods);
  if (object.is_indexable()) return call(kListMethods);
  if (object.is<Value::Loop>()) return call(kLoopMethods);
  return machine.fail(fmt::format("a {} has no method '{}'", object.type_name(), method));
}

TemplateValue call_template_function(TemplateMachine& machine, TemplateFunction function,
                                     const TemplateArguments& arguments) {
  if (function == TemplateFunction::kRange) return call_range(machine, arguments);
  if (function == TemplateFunction::kNamespace) return call_namespace(machine, arguments);
  if (function == TemplateFunction::kDict) return call_dict(machine, arguments);
  const BoundArguments given(machine, arguments, {"message"}, 1);
  if (!given.ok()) return {};
  return machine.fail(to_str(machine, *given[0]));
}

}  // namespace perigee
