// The expressions of a template: operators, members, items and slices.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "text/jinja/builtins.h"
#include "text/jinja/renderer.h"
#include "text/jinja/strings.h"

namespace perigee {
namespace {

using Kind = TemplateExpr::Kind;
using Value = TemplateValue;

const char* symbol(TemplateOp op) {
  static constexpr const char* kSymbols[] = {"+", "-", "*", "/", "//", "%", "**"};
  return kSymbols[static_cast<int>(op)];
}

Value fail_kinds(TemplateMachine& machine, TemplateOp op, const Value& a, const Value& b) {
  return machine.fail(fmt::format("unsupported operands for {}: {} and {}", symbol(op), a.type_name(), b.type_name()));
}

Value fail_wide(TemplateMachine& machine) {
  return machine.fail("an integer does not fit 64 bits");
}

Value integer_power(TemplateMachine& machine, int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (true) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) return fail_wide(machine);
    exponent >>= 1;
    if (exponent == 0) return Value(result);
    if (__builtin_mul_overflow(base, base, &base)) return fail_wide(machine);
  }
}

// Python rounds the quotient down and gives the rest the sign of the divisor.
Value integer_division(TemplateMachine& machine, TemplateOp op, int64_t a, int64_t b) {
  if (b == 0) return machine.fail("division by zero");
  if (b == -1) {
    if (op == TemplateOp::kModulo) return Value(int64_t{0});
    return a == INT64_MIN ? fail_wide(machine) : Value(-a);
  }
  const bool down = a % b != 0 && (a % b < 0) != (b < 0);
  if (op == TemplateOp::kFloorDivide) return Value(a / b - (down ? 1 : 0));
  return Value(a % b + (down ? b : 0));
}

Value integer_arithmetic(TemplateMachine& machine, TemplateOp op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case TemplateOp::kAdd: overflow = __builtin_add_overflow(a, b, &result); break;
    case TemplateOp::kSubtract: overflow = __builtin_sub_overflow(a, b, &result); break;
    case TemplateOp::kMultiply: overflow = __builtin_mul_overflow(a, b, &result); break;
    case TemplateOp::kDivide:
      if (b == 0) return machine.fail("division by zero");
      return Value(static_cast<double>(static_cast<long double>(a) / static_cast<long double>(b)));
    case TemplateOp::kPower:
      if (b >= 0) return integer_power(machine, a, b);
      if (a == 0) return machine.fail("0 to a negative power");
      return Value(std::pow(static_cast<double>(a), static_cast<double>(b)));
    default: return integer_division(machine, op, a, b);
  }
  return overflow ? fail_wide(machine) : Value(result);
}

Value float_power(TemplateMachine& machine, double a, double b) {
  if (a == 0 && b < 0) return machine.fail("0 to a negative power");
  if (a < 0 && b != std::floor(b)) return machine.fail("a root of a negative number");
  const double result = std::pow(a, b);
  if (std::isinf(result) && !std::isinf(a) && !std::isinf(b)) return machine.fail("a float is too large");
  return Value(result);
}

Value float_arithmetic(TemplateMachine& machine, TemplateOp op, double a, double b) {
  switch (op) {
    case TemplateOp::kAdd: return Value(a + b);
    case TemplateOp::kSubtract: return Value(a - b);
    case TemplateOp::kMultiply: return Value(a * b);
    case TemplateOp::kPower: return float_power(machine, a, b);
    default: break;
  }
  if (b == 0) return machine.fail("division by zero");
  if (op == TemplateOp::kDivide) return Value(a / b);
  double rest = std::fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  if (op == TemplateOp::kModulo) return Value(rest == 0 ? std::copysign(0.0, b) : rest);
  const double quotient = (a - rest) / b;
  const double floored = std::floor(quotient);
  return Value(quotient - floored > 0.5 ? floored + 1 : floored);
}

Value repeat(TemplateMachine& machine, const Value& value, int64_t times) {
  const auto count = static_cast<size_t>(times > 0 ? times : 0);
  const size_t size = value.is_string() ? value.string().size() : value.items().size() * sizeof(Value);
  if (size > 0 && count > machine.limits().max_value_bytes / size)
    return machine.over("max_value_bytes", machine.limits().max_value_bytes);
  if (value.is_string()) {
    std::string out;
    out.reserve(size * count);
    if (!machine.charge_bytes(size * count)) return {};
    for (size_t i = 0; size > 0 && i < count; ++i) out += value.string();
    return machine.make_string(std::move(out));
  }
  TemplateValues out;
  if (!machine.charge(1 + value.items().size() * count / 2)) return {};
  for (size_t i = 0; size > 0 && i < count; ++i) out.insert(out.end(), value.items().begin(), value.items().end());
  return machine.make_sequence(value.sequence().kind, std::move(out));
}

// list + list, tuple + tuple; anything else that is not a number fails.
Value concatenate(TemplateMachine& machine, const Value& a, const Value& b) {
  using Kind = TemplateSequence::Kind;
  if (a.is_string() && b.is_string()) {
    const size_t size = a.string().size() + b.string().size();
    if (!machine.charge_bytes(size) || size > machine.limits().max_value_bytes)
      return machine.over("max_value_bytes", machine.limits().max_value_bytes);
    return machine.make_string(a.string() + b.string());
  }
  const bool same = a.is_sequence() && b.is_sequence() && a.sequence().kind == b.sequence().kind;
  if (!same || (a.sequence().kind != Kind::kList && a.sequence().kind != Kind::kTuple))
    return fail_kinds(machine, TemplateOp::kAdd, a, b);
  TemplateValues out = a.items();
  if (!machine.charge(1 + (a.items().size() + b.items().size()) / 2)) return {};
  out.insert(out.end(), b.items().begin(), b.items().end());
  return machine.make_sequence(a.sequence().kind, std::move(out));
}

bool repeats(const Value& value, const Value& times) {
  using Kind = TemplateSequence::Kind;
  const bool list =
      value.is_sequence() && (value.sequence().kind == Kind::kList || value.sequence().kind == Kind::kTuple);
  return (value.is_string() || list) && times.is_integral();
}

// a op b for the arithmetic operators, as Python has them. Integers are 64 bits wide; what needs more fails.
TemplateValue apply_arithmetic(TemplateMachine& machine, TemplateOp op, const TemplateValue& a,
                               const TemplateValue& b) {
  if (machine.failed()) return {};
  if (a.is_integral() && b.is_integral()) return integer_arithmetic(machine, op, a.integer(), b.integer());
  if (a.is_number() && b.is_number()) return float_arithmetic(machine, op, a.number(), b.number());
  if (op == TemplateOp::kAdd) return concatenate(machine, a, b);
  if (op == TemplateOp::kMultiply && repeats(a, b)) return repeat(machine, a, b.integer());
  if (op == TemplateOp::kMultiply && repeats(b, a)) return repeat(machine, b, a.integer());
  return fail_kinds(machine, op, a, b);
}

// a op b for the comparisons, `in` and `not in`.
bool apply_comparison(TemplateMachine& machine, TemplateOp op, const TemplateValue& a, const TemplateValue& b) {
  switch (op) {
    case TemplateOp::kEqual: return equal_values(machine, a, b);
    case TemplateOp::kNotEqual: return !equal_values(machine, a, b);
    case TemplateOp::kIn: return contains_value(machine, b, a);
    case TemplateOp::kNotIn: return !contains_value(machine, b, a);
    default: break;
  }
  const int order = compare_values(machine, a, b);
  if (op == TemplateOp::kLess) return order == -1;
  if (op == TemplateOp::kLessEqual) return order == -1 || order == 0;
  if (op == TemplateOp::kGreater) return order == 1;
  return order == 0 || order == 1;
}

TemplateValue negate(TemplateMachine& machine, const TemplateValue& value) {
  if (!value.is_number()) return machine.fail(fmt::format("cannot negate a {}", value.type_name()));
  if (!value.is_integral()) return Value(-value.number());
  if (value.integer() == INT64_MIN) return fail_wide(machine);
  return Value(-value.integer());
}

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
  if (object.is_undefined()) return machine.fail(fmt::format("an undefined value has no attribute '{}'", name));
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
    return machine.fail(fmt::format("a {} has no slices", object.type_name()));
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

TemplateValue TemplateRenderer::evaluate(const TemplateExpr& expr) {
  if (!machine_.charge()) return {};
  if (expr.kind == Kind::kConstant) return expr.constant;
  if (expr.kind == Kind::kName) return variable(expr.name);
  machine_.set_line(expr.line);
  if (!enter()) return {};
  Value value = evaluate_checked(expr);
  --depth_;
  return value;
}

TemplateValue TemplateRenderer::evaluate_checked(const TemplateExpr& expr) {
  switch (expr.kind) {
    case Kind::kTuple:
    case Kind::kList: return evaluate_collection(expr);
    case Kind::kDict: return evaluate_dict(expr);
    case Kind::kConditional: return evaluate_conditional(expr);
    case Kind::kCompare: return evaluate_compare(expr);
    case Kind::kConcat: return evaluate_concat(expr);
    case Kind::kAttribute: return evaluate_attribute(expr);
    case Kind::kSlice: return evaluate_slice(expr);
    case Kind::kCall: return evaluate_call(expr);
    case Kind::kFilter:
    case Kind::kTest: {
      TemplateArguments arguments = evaluate_arguments(expr, {{evaluate(*expr.parts[0])}, {}});
      machine_.set_line(expr.line);
      return machine_.failed() ? Value() : expr.builtin(machine_, arguments);
    }
    default: return evaluate_operator(expr);
  }
}

TemplateValue TemplateRenderer::evaluate_operator(const TemplateExpr& expr) {
  Value first = evaluate(*expr.parts[0]);
  switch (expr.kind) {
    case Kind::kOr: return first.truthy() ? first : evaluate(*expr.parts[1]);
    case Kind::kAnd: return first.truthy() ? evaluate(*expr.parts[1]) : first;
    case Kind::kNot: return Value(!first.truthy());
    case Kind::kNegative: return negate(machine_, first);
    case Kind::kPositive:
      if (!first.is_number()) return machine_.fail(fmt::format("no number after +: {}", first.type_name()));
      return first.is_bool() ? Value(first.integer()) : first;
    case Kind::kItem: return get_template_item(machine_, first, evaluate(*expr.parts[1]));
    default: break;
  }
  const Value second = evaluate(*expr.parts[1]);
  machine_.set_line(expr.line);
  return apply_arithmetic(machine_, expr.ops[0], first, second);
}

TemplateValue TemplateRenderer::evaluate_collection(const TemplateExpr& expr) {
  TemplateValues items;
  items.reserve(expr.parts.size());
  for (const auto& part : expr.parts) {
    items.push_back(evaluate(*part));
    if (machine_.failed()) return {};
  }
  using Sequence = TemplateSequence::Kind;
  return machine_.make_sequence(expr.kind == Kind::kTuple ? Sequence::kTuple : Sequence::kList, std::move(items));
}

TemplateValue TemplateRenderer::evaluate_dict(const TemplateExpr& expr) {
  TemplateDict dict;
  for (size_t i = 0; i < expr.parts.size(); i += 2) {
    Value key = evaluate(*expr.parts[i]);
    Value value = evaluate(*expr.parts[i + 1]);
    const Value* old = find_member(machine_, dict, key);
    if (machine_.failed()) return {};
    if (!old) {
      dict.entries.emplace_back(std::move(key), std::move(value));
      continue;
    }
    for (auto& entry : dict.entries)
      if (&entry.second == old) entry.second = value;
  }
  return machine_.make_dict(std::move(dict.entries));
}

TemplateValue TemplateRenderer::evaluate_conditional(const TemplateExpr& expr) {
  if (evaluate(*expr.parts[0]).truthy()) return evaluate(*expr.parts[1]);
  return expr.parts[2] ? evaluate(*expr.parts[2]) : Value();
}

TemplateValue TemplateRenderer::evaluate_compare(const TemplateExpr& expr) {
  Value left = evaluate(*expr.parts[0]);
  for (size_t i = 0; i < expr.ops.size(); ++i) {
    Value right = evaluate(*expr.parts[i + 1]);
    machine_.set_line(expr.line);
    if (machine_.failed() || !apply_comparison(machine_, expr.ops[i], left, right)) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

TemplateValue TemplateRenderer::evaluate_concat(const TemplateExpr& expr) {
  std::string out;
  for (const auto& part : expr.parts) {
    append_str(machine_, out, evaluate(*part));
    if (out.size() > machine_.limits().max_value_bytes)
      return machine_.over("max_value_bytes", machine_.limits().max_value_bytes);
    if (machine_.failed()) return {};
  }
  return machine_.make_string(std::move(out));
}

TemplateValue TemplateRenderer::evaluate_attribute(const TemplateExpr& expr) {
  const TemplateExpr& object = *expr.parts[0];
  Value value = evaluate(object);
  if (value.is_undefined() && object.kind == Kind::kName) {
    const std::string& name = program_.names[static_cast<size_t>(object.name)];
    return machine_.fail(fmt::format("'{}' is undefined and has no attribute '{}'", name, expr.text));
  }
  return get_template_attribute(machine_, value, expr.text);
}

TemplateValue TemplateRenderer::evaluate_slice(const TemplateExpr& expr) {
  const Value object = evaluate(*expr.parts[0]);
  const auto bound = [&](size_t at) { return expr.parts[at] ? evaluate(*expr.parts[at]) : Value(Value::None{}); };
  const TemplateSlice slice{bound(1), bound(2), bound(3)};
  return machine_.failed() ? Value() : slice_template_value(machine_, object, slice);
}

TemplateArguments TemplateRenderer::evaluate_arguments(const TemplateExpr& expr, TemplateArguments arguments) {
  for (size_t i = 1; i < expr.parts.size(); ++i) arguments.positional.push_back(evaluate(*expr.parts[i]));
  for (const auto& [name, value] : expr.named) arguments.named.emplace_back(name, evaluate(*value));
  return arguments;
}

TemplateValue TemplateRenderer::evaluate_call(const TemplateExpr& expr) {
  const TemplateExpr& callee = *expr.parts[0];
  if (callee.kind == Kind::kAttribute) {
    Value object = evaluate(*callee.parts[0]);
    if (object.is_undefined()) return machine_.fail(fmt::format("an undefined value has no method '{}'", callee.text));
    if (!object.is<TemplateNamespace*>()) {
      TemplateArguments arguments = evaluate_arguments(expr, {{std::move(object)}, {}});
      machine_.set_line(expr.line);
      return machine_.failed() ? Value() : call_template_method(machine_, callee.text, arguments);
    }
  }
  const Value function = evaluate(callee);
  const TemplateArguments arguments = evaluate_arguments(expr, {});
  machine_.set_line(expr.line);
  if (machine_.failed()) return {};
  if (function.is<const TemplateMacro*>()) return call_macro(*function.as<const TemplateMacro*>(), arguments);
  if (!function.is<TemplateFunction>())
    return machine_.fail(fmt::format("a {} cannot be called", function.type_name()));
  if (function.as<TemplateFunction>() != TemplateFunction::kStrftimeNow)
    return call_template_function(machine_, function.as<TemplateFunction>(), arguments);
  return date_.is_string() ? date_ : machine_.fail("strftime_now: the context gives no date");
}

}  // namespace perigee
