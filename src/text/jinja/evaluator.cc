// The expressions of a template.

#include "text/jinja/arithmetic.h"
#include "text/jinja/renderer.h"

namespace perigee {
namespace {

using Kind = TemplateExpr::Kind;
using Value = TemplateValue;

}  // namespace

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
      if (!first.is_number()) return machine_.fail(str_cat("no number after +: ", first.type_name()));
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
    return machine_.fail(str_cat("'", name, "' is undefined and has no attribute '", expr.text, "'"));
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
    if (object.is_undefined()) return machine_.fail(str_cat("an undefined value has no method '", callee.text, "'"));
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
  if (!function.is<TemplateFunction>()) return machine_.fail(str_cat("a ", function.type_name(), " cannot be called"));
  if (function.as<TemplateFunction>() != TemplateFunction::kStrftimeNow)
    return call_template_function(machine_, function.as<TemplateFunction>(), arguments);
  return date_.is_string() ? date_ : machine_.fail("strftime_now: the context gives no date");
}

}  // namespace perigee
