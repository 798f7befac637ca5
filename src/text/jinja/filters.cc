// The filters of chat templates.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "text/jinja/builtins.h"
#include "text/jinja/strings.h"

namespace perigee {
namespace {

using Arguments = TemplateArguments;
using Machine = TemplateMachine;
using Value = TemplateValue;
using SequenceKind = TemplateSequence::Kind;

Value iterator_of(Machine& machine, TemplateValues items) {
  return machine.make_sequence(SequenceKind::kIterator, std::move(items));
}

// A filter of one text without further arguments.
template <std::string (*kChange)(std::string_view)>
Value change_text(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  if (!given.ok()) return {};
  const std::string text = to_str(machine, *given[0]);
  return machine.charge_text(text.size()) ? machine.make_string(kChange(text)) : Value();
}

std::string same_text(std::string_view text) {
  return std::string(text);
}

Value filter_length(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  if (!given.ok()) return {};
  const Value& value = *given[0];
  size_t length = 0;
  if (value.is_string()) {
    if (!machine.charge(1 + value.string().size() / 32)) return {};
    length = utf8_length(value.string());
  } else if (value.is_dict()) {
    length = value.dict().entries.size();
  } else if (value.is_sequence() && value.sequence().kind != SequenceKind::kIterator) {
    length = value.items().size();
  } else if (value.is<Value::Loop>()) {
    length = value.as<Value::Loop>()->sequence->items.size();
  } else if (!value.is_undefined()) {
    return machine.fail(fmt::format("a {} has no length", value.type_name()));
  }
  return Value(static_cast<int64_t>(length));
}

Value filter_tojson(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "ensure_ascii", "indent", "separators", "sort_keys"}, 1);
  if (!given.ok()) return {};
  TemplateJsonStyle style;
  style.ensure_ascii = given.truthy(1, false);
  style.sort_keys = given.truthy(4, false);
  if (const Value* indent = given[2]; indent && !indent->is_none()) {
    if (!indent->is_string() && !indent->is_integral())
      return machine.fail("tojson: indent is neither an integer nor a string");
    if (indent->is_integral() && indent->integer() > 64) return machine.over("indent of tojson", 64);
    style.indented = true;
    style.item_separator = std::string(1, ',');  // g++ 12 warns of an overlap in an assignment of ","
    style.indent = indent->is_string() ? indent->string()
                                       : std::string(static_cast<size_t>(std::max<int64_t>(0, indent->integer())), ' ');
  }
  if (const Value* pair = given[3]; pair && !pair->is_none()) {
    const bool fits = pair->is_indexable() && pair->items().size() == 2 && pair->items()[0].is_string() &&
                      pair->items()[1].is_string();
    if (!fits) return machine.fail("tojson: separators are not a pair of strings");
    style.item_separator = pair->items()[0].string();
    style.key_separator = pair->items()[1].string();
  }
  return to_json_text(machine, *given[0], style);
}

Value filter_trim(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "chars"}, 1);
  if (!given.ok()) return {};
  Arguments call{{machine.make_string(to_str(machine, *given[0]))}, {}};
  if (given[1]) call.positional.push_back(*given[1]);
  return machine.failed() ? Value() : call_template_method(machine, "strip", call);
}

// The item that a dotted path such as "function.name" leads to.
Value follow(Machine& machine, Value value, const Value& path) {
  if (path.is_integral()) return get_template_item(machine, value, path);
  if (!path.is_string()) return machine.fail("an attribute is neither a string nor an integer");
  for (const std::string_view part : python_split(path.string(), ".", -1)) {
    if (!machine.charge()) return {};
    int64_t index = 0;
    const auto end = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index = end.ec == std::errc() && end.ptr == part.data() + part.size() && part[0] != '-';
    value = is_index ? get_template_item(machine, value, Value(index)) : get_template_attribute(machine, value, part);
  }
  return value;
}

Value filter_join(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "d", "attribute"}, 1);
  if (!given.ok()) return {};
  const std::string separator = given[1] ? to_str(machine, *given[1]) : "";
  const auto items = iterate(machine, *given[0]);
  if (!items) return {};
  std::string out;
  bool first = true;
  for (const Value& item : items->items) {
    if (!machine.charge_bytes(separator.size())) return {};
    if (out.size() > machine.limits().max_value_bytes)
      return machine.over("max_value_bytes", machine.limits().max_value_bytes);
    if (!std::exchange(first, false)) out += separator;
    append_str(machine, out, given[2] && !given[2]->is_none() ? follow(machine, item, *given[2]) : item);
  }
  return machine.make_string(std::move(out));
}

Value filter_default(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "default_value", "boolean"}, 1);
  if (!given.ok()) return {};
  const bool missing = given[0]->is_undefined() || (given.truthy(2, false) && !given[0]->truthy());
  if (!missing) return *given[0];
  return given[1] ? *given[1] : machine.make_string("");
}

Value filter_first(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  const auto items = given.ok() ? iterate(machine, *given[0]) : nullptr;
  return items && !items->items.empty() ? items->items.front() : Value();
}

Value filter_last(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  if (!given.ok()) return {};
  if (given[0]->is_sequence() && given[0]->sequence().kind == SequenceKind::kIterator)
    return machine.fail("last of a generator");
  const auto items = iterate(machine, *given[0]);
  return items && !items->items.empty() ? items->items.back() : Value();
}

Value filter_replace(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"s", "old", "new", "count"}, 3);
  if (!given.ok()) return {};
  Arguments call;
  for (size_t i = 0; i < 3; ++i) call.positional.push_back(machine.make_string(to_str(machine, *given[i])));
  if (machine.failed()) return {};
  if (given[3] && !given[3]->is_none()) call.positional.push_back(*given[3]);
  return call_template_method(machine, "replace", call);
}

Value filter_items(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  if (!given.ok()) return {};
  if (given[0]->is_undefined()) return iterator_of(machine, {});
  if (!given[0]->is_dict()) return machine.fail("items: not a mapping");
  return iterator_of(machine, call_template_method(machine, "items", arguments).items());
}

Value filter_list(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  const auto items = given.ok() ? iterate(machine, *given[0]) : nullptr;
  return items ? machine.make_list(items->items) : Value();
}

bool is_decimal(std::string_view text) {
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) text.remove_prefix(1);
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// float(value): nullopt where Python raises ValueError or TypeError.
std::optional<double> to_float(const Value& value) {
  if (value.is_number()) return value.number();
  if (!value.is_string()) return std::nullopt;
  std::string_view text = python_strip(value.string(), StripSide::kBoth);
  if (text.starts_with('+')) text.remove_prefix(1);
  double number = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), number);
  if (end.ptr != text.data() + text.size() || text.empty() || end.ec == std::errc::invalid_argument)
    return std::nullopt;
  return number;
}

Value filter_int(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "default"}, 1);
  if (!given.ok()) return {};
  const Value& value = *given[0];
  if (value.is_undefined()) return machine.fail("int of an undefined value");
  if (value.is_integral()) return Value(value.integer());
  if (value.is_string()) {
    std::string_view text = python_strip(value.string(), StripSide::kBoth);
    if (is_decimal(text)) {
      if (text[0] == '+') text.remove_prefix(1);
      int64_t number = 0;
      if (std::from_chars(text.data(), text.data() + text.size(), number).ec != std::errc())
        return machine.fail("an integer does not fit 64 bits");
      return Value(number);
    }
  }
  const auto number = to_float(value);
  if (!number || std::isnan(*number)) return given[1] ? *given[1] : Value(int64_t{0});
  if (std::fabs(*number) >= 9.2e18) return machine.fail("an integer does not fit 64 bits");
  return Value(static_cast<int64_t>(*number));
}

Value filter_float(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "default"}, 1);
  if (!given.ok()) return {};
  if (given[0]->is_undefined()) return machine.fail("float of an undefined value");
  const auto number = to_float(*given[0]);
  if (number) return Value(*number);
  return given[1] ? *given[1] : Value(0.0);
}

Value filter_abs(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  if (!given.ok()) return {};
  if (!given[0]->is_number()) return machine.fail("abs: not a number");
  if (!given[0]->is_integral()) return Value(std::fabs(given[0]->number()));
  const int64_t number = given[0]->integer();
  if (number == INT64_MIN) return machine.fail("an integer does not fit 64 bits");
  return Value(number < 0 ? -number : number);
}

// --- filters over the items of a sequence

// The rest of the arguments, from `skip` on, as a call of the named filter or test on `subject`.
Arguments rest_of(const Arguments& arguments, size_t skip, Value subject) {
  Arguments call;
  call.positional.push_back(std::move(subject));
  for (size_t i = skip; i < arguments.positional.size(); ++i) call.positional.push_back(arguments.positional[i]);
  return call;
}

Value filter_map(Machine& machine, const Arguments& arguments) {
  const auto items = arguments.positional.empty() ? nullptr : iterate(machine, arguments.positional[0]);
  if (!items) return {};
  TemplateValues out;
  if (arguments.positional.size() == 1) {
    const BoundArguments given(machine, arguments, {"value", "attribute", "default"}, 1);
    if (!given.ok() || !given[1]) return machine.fail("map needs an attribute or a filter");
    for (const Value& item : items->items) {
      if (!machine.charge()) return {};
      Value found = follow(machine, item, *given[1]);
      out.push_back(found.is_undefined() && given[2] ? *given[2] : found);
    }
    return iterator_of(machine, std::move(out));
  }
  const Value& name = arguments.positional[1];
  const TemplateBuiltin filter = name.is_string() ? find_template_filter(name.string()) : nullptr;
  if (!filter) return machine.fail("map: there is no such filter");
  for (const Value& item : items->items) {
    if (!machine.charge()) return {};
    Arguments call = rest_of(arguments, 2, item);
    call.named = arguments.named;
    out.push_back(filter(machine, call));
  }
  return iterator_of(machine, std::move(out));
}

// select, reject, selectattr, rejectattr: by an attribute or not, keeping what passes or what fails the test.
template <bool kByAttribute, bool kKeep>
Value filter_select(Machine& machine, const Arguments& arguments) {
  constexpr size_t kTestAt = kByAttribute ? 2 : 1;
  const auto items = arguments.positional.empty() ? nullptr : iterate(machine, arguments.positional[0]);
  if (!items) return {};
  if (!arguments.named.empty() || arguments.positional.size() < kTestAt)
    return machine.fail("select needs positional arguments");
  TemplateBuiltin test = nullptr;
  if (arguments.positional.size() > kTestAt) {
    const Value& name = arguments.positional[kTestAt];
    test = name.is_string() ? find_template_test(name.string()) : nullptr;
    if (!test) return machine.fail("select: there is no such test");
  }
  TemplateValues out;
  for (const Value& item : items->items) {
    if (!machine.charge()) return {};
    Value subject = kByAttribute ? follow(machine, item, arguments.positional[1]) : item;
    const bool passes = test ? test(machine, rest_of(arguments, kTestAt + 1, subject)).truthy() : subject.truthy();
    if (passes == kKeep) out.push_back(item);
  }
  return iterator_of(machine, std::move(out));
}

struct SortKey {
  Value key;
  Value item;
};

Value folded(Machine& machine, const Value& key, bool case_sensitive) {
  if (case_sensitive || !key.is_string()) return key;
  return machine.make_string(ascii_lower(key.string()));
}

// Sorts by key, keeping the order of equal keys, also in reverse.
TemplateValues sorted_items(Machine& machine, std::vector<SortKey> keys, bool reverse) {
  const auto before = [&](const SortKey& a, const SortKey& b) {
    const int order = machine.failed() ? 0 : compare_values(machine, a.key, b.key);
    return order == (reverse ? 1 : -1);
  };
  std::stable_sort(keys.begin(), keys.end(), before);
  TemplateValues out;
  for (SortKey& key : keys) out.push_back(std::move(key.item));
  return out;
}

Value filter_sort(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "reverse", "case_sensitive", "attribute"}, 1);
  const auto items = given.ok() ? iterate(machine, *given[0]) : nullptr;
  if (!items) return {};
  std::vector<SortKey> keys;
  for (const Value& item : items->items) {
    if (!machine.charge()) return {};
    const Value key = given[3] && !given[3]->is_none() ? follow(machine, item, *given[3]) : item;
    keys.push_back({folded(machine, key, given.truthy(2, false)), item});
  }
  return machine.make_list(sorted_items(machine, std::move(keys), given.truthy(1, false)));
}

Value filter_dictsort(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "case_sensitive", "by", "reverse"}, 1);
  if (!given.ok()) return {};
  if (!given[0]->is_dict()) return machine.fail("dictsort: not a mapping");
  const std::string by = given[2] ? to_str(machine, *given[2]) : "key";
  if (by != "key" && by != "value") return machine.fail("dictsort: by is neither key nor value");
  std::vector<SortKey> keys;
  for (const auto& [key, value] : given[0]->dict().entries) {
    if (!machine.charge()) return {};
    keys.push_back({folded(machine, by == "key" ? key : value, given.truthy(1, false)),
                    machine.make_sequence(SequenceKind::kTuple, {key, value})});
  }
  return machine.make_list(sorted_items(machine, std::move(keys), given.truthy(3, false)));
}

Value filter_unique(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value", "case_sensitive", "attribute"}, 1);
  const auto items = given.ok() ? iterate(machine, *given[0]) : nullptr;
  if (!items) return {};
  TemplateValues seen, out;
  for (const Value& item : items->items) {
    const Value found = given[2] && !given[2]->is_none() ? follow(machine, item, *given[2]) : item;
    const Value key = folded(machine, found, given.truthy(1, false));
    const auto same = [&](const Value& other) { return equal_values(machine, other, key); };
    if (!machine.charge()) return {};
    if (std::any_of(seen.begin(), seen.end(), same)) continue;
    seen.push_back(key);
    out.push_back(item);
  }
  return iterator_of(machine, std::move(out));
}

Value filter_reverse(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"value"}, 1);
  const auto items = given.ok() ? iterate(machine, *given[0]) : nullptr;
  if (!items) return {};
  TemplateValues reversed(items->items.rbegin(), items->items.rend());
  if (!given[0]->is_string()) return iterator_of(machine, std::move(reversed));
  std::string out;
  for (const Value& item : reversed) out += item.string();
  return machine.make_string(std::move(out));
}

Value filter_indent(Machine& machine, const Arguments& arguments) {
  const BoundArguments given(machine, arguments, {"s", "width", "first", "blank"}, 1);
  if (!given.ok()) return {};
  std::string step(4, ' ');
  if (given[1] && given[1]->is_string()) step = given[1]->string();
  if (given[1] && given[1]->is_integral()) {
    if (given[1]->integer() > 64) return machine.over("width of indent", 64);
    step = std::string(static_cast<size_t>(std::max<int64_t>(0, given[1]->integer())), ' ');
  }
  const std::string text = to_str(machine, *given[0]) + "\n";
  const auto lines = python_splitlines(text);
  if (!machine.reserve(lines.size() * step.size())) return {};
  std::string out = given.truthy(2, false) ? step : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i > 0 && (!lines[i].empty() || given.truthy(3, false))) out += step;
    out += lines[i];
  }
  return machine.make_string(std::move(out));
}

struct NamedFilter {
  std::string_view name;
  TemplateBuiltin filter;
};

constexpr std::array kFilters = {
    NamedFilter{"abs", filter_abs},
    NamedFilter{"capitalize", change_text<python_capitalize>},
    NamedFilter{"count", filter_length},
    NamedFilter{"d", filter_default},
    NamedFilter{"default", filter_default},
    NamedFilter{"dictsort", filter_dictsort},
    NamedFilter{"first", filter_first},
    NamedFilter{"float", filter_float},
    NamedFilter{"indent", filter_indent},
    NamedFilter{"int", filter_int},
    NamedFilter{"items", filter_items},
    NamedFilter{"join", filter_join},
    NamedFilter{"last", filter_last},
    NamedFilter{"length", filter_length},
    NamedFilter{"list", filter_list},
    NamedFilter{"lower", change_text<ascii_lower>},
    NamedFilter{"map", filter_map},
    NamedFilter{"reject", filter_select<false, false>},
    NamedFilter{"rejectattr", filter_select<true, false>},
    NamedFilter{"replace", filter_replace},
    NamedFilter{"reverse", filter_reverse},
    NamedFilter{"safe", change_text<same_text>},  // nothing is escaped, so nothing needs marking
    NamedFilter{"select", filter_select<false, true>},
    NamedFilter{"selectattr", filter_select<true, true>},
    NamedFilter{"sort", filter_sort},
    NamedFilter{"string", change_text<same_text>},
    NamedFilter{"title", change_text<jinja_title>},
    NamedFilter{"tojson", filter_tojson},
    NamedFilter{"trim", filter_trim},
    NamedFilter{"unique", filter_unique},
    NamedFilter{"upper", change_text<ascii_upper>},
};

}  // namespace

TemplateBuiltin find_template_filter(std::string_view name) {
  const auto at = std::find_if(kFilters.begin(), kFilters.end(), [&](const NamedFilter& f) { return f.name == name; });
  return at == kFilters.end() ? nullptr : at->filter;
}

}  // namespace perigee
