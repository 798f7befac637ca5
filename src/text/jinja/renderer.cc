#include "text/jinja/renderer.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

namespace perigee {
namespace {

using StatementKind = TemplateStatement::Kind;
using Value = TemplateValue;

constexpr size_t kMaxEvaluationDepth = 1000;  // bounds the stack that one render can use

struct NamedFunction {
  std::string_view name;
  TemplateFunction function;
};

constexpr std::array kFunctions = {
    NamedFunction{"range", TemplateFunction::kRange},
    NamedFunction{"namespace", TemplateFunction::kNamespace},
    NamedFunction{"dict", TemplateFunction::kDict},
    NamedFunction{"raise_exception", TemplateFunction::kRaiseException},
    NamedFunction{"strftime_now", TemplateFunction::kStrftimeNow},
};

}  // namespace

// Collects what is written while it lives.
class TemplateRenderer::Capture {
 public:
  explicit Capture(TemplateRenderer& renderer) : renderer_(renderer), outer_(renderer.out_) { renderer.out_ = &text_; }
  ~Capture() { renderer_.out_ = outer_; }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  std::string take() { return std::move(text_); }

 private:
  TemplateRenderer& renderer_;
  std::string* outer_;
  std::string text_;
};

// Makes a new scope, inside the current one or inside `parent`, the current one while it lives.
class TemplateRenderer::Scoped {
 public:
  Scoped(TemplateRenderer& renderer, Scope* parent) : renderer_(renderer), outer_(renderer.scope_) {
    scope_.parent = parent;
    renderer.scope_ = &scope_;
  }
  ~Scoped() { renderer_.scope_ = outer_; }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;
  void clear() { scope_.variables.clear(); }

 private:
  TemplateRenderer& renderer_;
  Scope* outer_;
  Scope scope_;
};

TemplateRenderer::TemplateRenderer(const TemplateProgram& program, const TemplateLimits& limits)
    : program_(program), machine_(limits), globals_(program.names.size()) {}

Result<std::string> TemplateRenderer::run(const Json& context) {
  if (!context.is_object()) return bad_input("the context of a chat template must be an object");
  if (const Json* date = context.find("strftime_now")) date_ = machine_.from_json(*date);
  for (size_t i = 0; i < program_.names.size(); ++i) {
    const std::string& name = program_.names[i];
    const auto is_named = [&](const NamedFunction& known) { return known.name == name; };
    const auto function = std::find_if(kFunctions.begin(), kFunctions.end(), is_named);
    if (function != kFunctions.end()) {
      globals_[i] = Value(function->function);
    } else if (const Json* value = context.find(name)) {
      globals_[i] = machine_.from_json(*value);
    }
  }
  std::string out;
  out_ = &out;
  render(program_.body);
  if (machine_.failed()) return machine_.error();
  return out;
}

bool TemplateRenderer::enter() {
  if (depth_ >= kMaxEvaluationDepth) {
    machine_.over("depth of evaluation", kMaxEvaluationDepth);
    return false;
  }
  ++depth_;
  return true;
}

TemplateRenderer::Flow TemplateRenderer::render(const TemplateBody& body) {
  for (const TemplateStatement& statement : body) {
    const Flow flow = render(statement);
    if (machine_.failed() || flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

TemplateRenderer::Flow TemplateRenderer::render(const TemplateStatement& statement) {
  machine_.set_line(statement.line);
  if (!machine_.charge() || !enter()) return Flow::kNormal;
  const Flow flow = render_checked(statement);
  --depth_;
  return flow;
}

TemplateRenderer::Flow TemplateRenderer::render_checked(const TemplateStatement& statement) {
  switch (statement.kind) {
    case StatementKind::kText: write(statement.text); break;
    case StatementKind::kOutput: {
      const Value value = evaluate(*statement.expr);
      write(value.is_string() ? std::string_view(value.string()) : to_str(machine_, value));
      break;
    }
    case StatementKind::kIf: return render_if(statement);
    case StatementKind::kFor: return render_for(statement);
    case StatementKind::kSet: assign(statement.target, evaluate(*statement.expr)); break;
    case StatementKind::kSetBlock: return render_set_block(statement);
    case StatementKind::kWith: return render_with(statement);
    case StatementKind::kMacro: set_variable(statement.macro->name, Value(statement.macro)); break;
    case StatementKind::kBreak: return Flow::kBreak;
    case StatementKind::kContinue: return Flow::kContinue;
  }
  return Flow::kNormal;
}

TemplateRenderer::Flow TemplateRenderer::render_if(const TemplateStatement& statement) {
  for (const TemplateBranch& branch : statement.branches) {
    if (branch.condition && !evaluate(*branch.condition).truthy()) continue;
    if (machine_.failed()) break;
    return render(branch.body);
  }
  return Flow::kNormal;
}

// What the loop runs over: a sequence, or undefined after an error.
TemplateValue TemplateRenderer::filtered_items(const TemplateStatement& statement) {
  const auto all = iterate(machine_, evaluate(*statement.expr));
  if (!all || machine_.failed()) return {};
  if (!statement.filter) return Value(all);
  TemplateValues kept;
  Scoped scope(*this, scope_);
  for (const Value& item : all->items) {
    scope.clear();
    assign(statement.target, item);
    if (evaluate(*statement.filter).truthy()) kept.push_back(item);
    if (machine_.failed()) return {};
  }
  return machine_.make_list(std::move(kept));
}

TemplateRenderer::Flow TemplateRenderer::render_for(const TemplateStatement& statement) {
  const Value items = filtered_items(statement);
  if (!items.is_sequence()) return Flow::kNormal;
  Scoped scope(*this, scope_);
  bool completed = false;
  const Value loop = machine_.make_loop(items.as<Value::Sequence>());
  for (size_t i = 0; i < items.items().size() && machine_.charge(); ++i) {
    scope.clear();
    loop.as<Value::Loop>()->index0 = i;
    set_variable(program_.loop_name, loop);
    assign(statement.target, items.items()[i]);
    const Flow flow = render(statement.body);
    if (flow == Flow::kNormal) completed = true;
    if (flow == Flow::kBreak) break;
  }
  // As in Jinja2, which marks the loop as run at the end of a body that neither broke nor continued.
  if (!completed) {
    scope.clear();
    return render(statement.otherwise);
  }
  return Flow::kNormal;
}

TemplateRenderer::Flow TemplateRenderer::render_set_block(const TemplateStatement& statement) {
  Value text;
  {
    Scoped scope(*this, scope_);
    Capture capture(*this);
    const Flow flow = render(statement.body);
    if (flow != Flow::kNormal || machine_.failed()) return flow;
    text = machine_.make_string(capture.take());
    if (statement.expr) {
      set_variable(program_.captured_name, text);
      text = evaluate(*statement.expr);
    }
  }
  assign(statement.target, text);
  return Flow::kNormal;
}

TemplateRenderer::Flow TemplateRenderer::render_with(const TemplateStatement& statement) {
  TemplateValues values;
  for (const auto& [target, expr] : statement.assignments) values.push_back(evaluate(*expr));
  Scoped scope(*this, scope_);
  for (size_t i = 0; i < values.size(); ++i) assign(statement.assignments[i].first, values[i]);
  return render(statement.body);
}

void TemplateRenderer::write(std::string_view text) {
  if (!machine_.charge_bytes(text.size())) return;
  if (text.size() > machine_.limits().max_output_bytes - std::min(out_->size(), machine_.limits().max_output_bytes)) {
    machine_.over("max_output_bytes", machine_.limits().max_output_bytes);
  } else if (machine_.reserve(text.size() / 2)) {  // half, as growing strings double
    out_->append(text);
  }
}

void TemplateRenderer::assign(const TemplateTarget& target, const TemplateValue& value) {
  if (machine_.failed()) return;
  if (!target.attribute.empty()) return assign_attribute(target, value);
  if (!target.is_tuple) return set_variable(target.name, value);
  const auto items = iterate(machine_, value);
  if (!items) return;
  if (items->items.size() != target.parts.size()) {
    machine_.fail(fmt::format("cannot unpack {} values into {} names", items->items.size(), target.parts.size()));
    return;
  }
  for (size_t i = 0; i < target.parts.size(); ++i) assign(target.parts[i], items->items[i]);
}

void TemplateRenderer::assign_attribute(const TemplateTarget& target, const TemplateValue& value) {
  const Value& object = variable(target.name);
  if (!object.is<TemplateNamespace*>()) {
    machine_.fail("only a namespace's attributes can be assigned");
    return;
  }
  auto& attributes = object.as<TemplateNamespace*>()->attributes;
  if (!machine_.charge(1 + attributes.size() / 16)) return;
  const auto same = [&](const auto& known) { return known.first == target.attribute; };
  const auto old = std::find_if(attributes.begin(), attributes.end(), same);
  if (old != attributes.end()) {
    old->second = value;
  } else if (machine_.reserve(sizeof(Value) + target.attribute.size())) {
    attributes.emplace_back(target.attribute, value);
  }
}

void TemplateRenderer::set_variable(int name, TemplateValue value) {
  if (!scope_) {
    globals_[static_cast<size_t>(name)] = std::move(value);
    return;
  }
  machine_.charge(scope_->variables.size() / 16);
  for (auto& [known, old] : scope_->variables) {
    if (known != name) continue;
    old = std::move(value);
    return;
  }
  scope_->variables.emplace_back(name, std::move(value));
}

const TemplateValue& TemplateRenderer::variable(int name) {
  for (const Scope* scope = scope_; scope; scope = scope->parent) {
    machine_.charge(scope->variables.size() / 16);
    for (const auto& [known, value] : scope->variables)
      if (known == name) return value;
  }
  return globals_[static_cast<size_t>(name)];
}

// Gives each parameter its argument, in the current scope; defaults may use the parameters before them.
bool TemplateRenderer::bind_parameters(const TemplateMacro& macro, const TemplateArguments& arguments) {
  const auto& parameters = macro.parameters;
  for (const auto& [name, value] : arguments.named) {
    const auto same = [&name = name](const TemplateParameter& parameter) { return parameter.text == name; };
    const auto at = std::find_if(parameters.begin(), parameters.end(), same);
    const bool taken = static_cast<size_t>(at - parameters.begin()) < arguments.positional.size();
    if (at == parameters.end() || taken) {
      machine_.fail(fmt::format("macro '{}' takes no argument '{}' here", macro.text, name));
      return false;
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto same = [&](const auto& argument) { return argument.first == parameters[i].text; };
    const auto named = std::find_if(arguments.named.begin(), arguments.named.end(), same);
    if (i < arguments.positional.size()) {
      set_variable(parameters[i].name, arguments.positional[i]);
    } else if (named != arguments.named.end()) {
      set_variable(parameters[i].name, named->second);
    } else {
      set_variable(parameters[i].name, parameters[i].initial ? evaluate(*parameters[i].initial) : Value());
    }
  }
  return true;
}

TemplateValue TemplateRenderer::call_macro(const TemplateMacro& macro, const TemplateArguments& arguments) {
  if (call_depth_ >= machine_.limits().max_call_depth)
    return machine_.over("max_call_depth", machine_.limits().max_call_depth);
  if (arguments.positional.size() > macro.parameters.size())
    return machine_.fail(fmt::format("macro '{}' takes at most {} arguments", macro.text, macro.parameters.size()));
  Scoped scope(*this, nullptr);
  if (!bind_parameters(macro, arguments)) return {};
  Capture capture(*this);
  ++call_depth_;
  render(macro.body);
  --call_depth_;
  return machine_.failed() ? Value() : machine_.make_string(capture.take());
}

}  // namespace perigee
