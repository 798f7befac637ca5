// Members, items and slices.

#include <algorithm>

#include "base/utf8.h"
#include "text/jinja/builtins.h"
#include "text/jinja/strings.h"

namespace perigee {
namespace {

using Value = TemplateValue;

Value loop_attribute(const TemplateLoop& loop, std::string_view name) {
  const auto& items = loop.sequence->items;
  const auto index = static_cast<int64_t>(loop.index0);
  const auto length = static_cast<int64_t>(items.size());
  if (name == "index") return Value(index + 1);
  if (name == "index0") return Value(index);
  if (name == "revindex") return Value(length - index);
  if (name == "revindex0") return Value(length - index - 1);
  if (name == "first") return Value(index == 0);
  if (name == "last") return Value(index == length - 1);
  if (name == "length") return Value(length);
  if (name == "depth") return Value(int64_t{1});  // only recursive loops are deeper
  if (name == "depth0") return Value(int64_t{0});
  if (name == "previtem" && index > 0) return items[loop.index0 - 1];
  if (name == "nextitem" && index + 1 < length) return items[loop.index0 + 1];
  return {};
}

Value item_at(const TemplateValues& items, int64_t index) {
  const auto size = static_cast<int64_t>(items.size());
  if (index < 0) index += size;
  return index >= 0 && index < size ? items[static_cast<size_t>(index)] : Value();
}

Value char_at(TemplateMachine& machine, std::string_view text, int64_t index) {
  if (!machine.charge_text(text.size())) return {};
  const auto length = static_cast<int64_t>(utf8_length(text));
  if (index < 0) index += length;
  if (index < 0 || index >= length) return {};
  size_t at = 0;
  for (; index > 0; --index) at += utf8_at(text, at).length;
  return machine.make_string(std::string(text.substr(at, utf8_at(text, at).length)));
}

struct Bounds {
  int64_t start = 0;
  int64_t stop = 0;
  int64_t step = 1;
  size_t count = 0;
};

// Python's slice.indices().
Bounds resolve(const TemplateSlice& slice, int64_t length) {
  Bounds bounds;
  const auto given = [](const Value& value) { return value.is_integral(); };
  if (given(slice.step)) bounds.step = slice.step.integer();
  const bool back = bounds.step < 0;
  const int64_t lowest = back ? -1 : 0;
  const int64_t highest = back ? length - 1 : length;
  const auto clamp = [&](const Value& value, int64_t otherwise) {
    if (!given(value)) return otherwise;
    const int64_t at = value.integer() < 0 ? value.integer() + length : value.integer();
    return std::clamp(at, lowest, highest);
  };
  bounds.start = clamp(slice.start, back ? highest : lowest);
  bounds.stop = clamp(slice.stop, back ? lowest : highest);
  const __int128 span = back ? static_cast<__int128>(bounds.start) - bounds.stop : bounds.stop - bounds.start;
  const __int128 width = back ? -static_cast<__int128>(bounds.step) : bounds.step;
  bounds.count = span > 0 ? static_cast<size_t>((span + width - 1) / width) : 0;
  return bounds;
}

template <typename Visit>
void visit_slice(const Bounds& bounds, Visit visit) {
  __int128 at = bounds.start;
  for (size_t i = 0; i < bounds.count; ++i, at += bounds.step) visit(static_cast<size_t>(at));
}

}  // namespace

TemplateValue get_template_attribute(TemplateMachine& machine, const TemplateValue& object, std::string_view name) {
  if (object.is_dict()) {
    const Value* found = find_member(machine, object.dict(), name);
    return found ? *found : Value();
  }
  if (object.is<Value::Loop>()) return loop_attribute(*object.as<Value::Loop>(), name);
  if (object.is<TemplateNamespace*>()) {
    for (const auto& [attribute, value] : object.as<TemplateNamespace*>()->attributes)
      if (machine.charge() && attribute == name) return value;
    return {};
  }
  if (object.is_undefined()) return machine.fail(str_cat("an undefined value has no attribute '", name, "'"));
  return {};
}

TemplateValue get_template_item(TemplateMachine& machine, const TemplateValue& object, const TemplateValue& key) {
  if (object.is_undefined()) return machine.fail("an undefined value has no items");
  if (key.is_string()) return get_template_attribute(machine, object, key.string());
  if (object.is_dict()) {
    const Value* found = is_hashable(key) ? find_member(machine, object.dict(), key) : nullptr;
    return found ? *found : Value();
  }
  if (!key.is_integral()) return {};
  if (object.is_indexable()) return item_at(object.items(), key.integer());
  if (object.is_string()) return char_at(machine, object.string(), key.integer());
  return {};
}

TemplateValue slice_template_value(TemplateMachine& machine, const TemplateValue& object, const TemplateSlice& slice) {
  if (object.is_undefined()) return machine.fail("an undefined value has no slices");
  if (!object.is_indexable() && !object.is_string())
    return machine.fail(str_cat("a ", object.type_name(), " has no slices"));
  for (const Value* bound : {&slice.start, &slice.stop, &slice.step})
    if (!bound->is_integral() && !bound->is_none()) return machine.fail("a bound of a slice is not an integer");
  if (slice.step.is_integral() && slice.step.integer() == 0) return machine.fail("a slice with a step of 0");
  if (object.is_string()) {
    const std::string& text = object.string();
    if (!machine.charge(1 + text.size() / 4) || !machine.reserve(text.size())) return {};
    const auto chars = utf8_chars(text);
    std::string out;
    visit_slice(resolve(slice, static_cast<int64_t>(chars.size())), [&](size_t at) { out += chars[at]; });
    return machine.make_string(std::move(out));
  }
  const Bounds bounds = resolve(slice, static_cast<int64_t>(object.items().size()));
  if (!machine.charge(1 + bounds.count / 4)) return {};
  TemplateValues out;
  visit_slice(bounds, [&](size_t at) { out.push_back(object.items()[at]); });
  return machine.make_sequence(object.sequence().kind, std::move(out));
}

}  // namespace perigee
