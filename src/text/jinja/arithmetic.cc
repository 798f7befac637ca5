#include "text/jinja/arithmetic.h"

#include <cmath>

namespace perigee {
namespace {

using Value = TemplateValue;

const char* symbol(TemplateOp op) {
  static constexpr const char* kSymbols[] = {"+", "-", "*", "/", "//", "%", "**"};
  return kSymbols[static_cast<int>(op)];
}

Value fail_kinds(TemplateMachine& machine, TemplateOp op, const Value& a, const Value& b) {
  return machine.fail(str_cat("unsupported operands for ", symbol(op), ": ", a.type_name(), " and ", b.type_name()));
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

}  // namespace

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
  if (!value.is_number()) return machine.fail(str_cat("cannot negate a ", value.type_name()));
  if (!value.is_integral()) return Value(-value.number());
  if (value.integer() == INT64_MIN) return fail_wide(machine);
  return Value(-value.integer());
}

}  // namespace perigee
