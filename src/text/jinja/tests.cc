// The tests ("is ...") of chat templates.

#include <algorithm>
#include <array>

#include "text/jinja/builtins.h"
#include "text/jinja/strings.h"

namespace perigee {
namespace {

using Value = TemplateValue;

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

}  // namespace perigee
