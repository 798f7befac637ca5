// TemplateRenderer: one render of one parsed template. Walks the tree; everything it does is metered by the machine.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/machine.h"

namespace perigee {

class TemplateRenderer {
 public:
  TemplateRenderer(const TemplateProgram& program, const TemplateLimits& limits);
  Result<std::string> run(const Json& context);

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  // The variables of a loop body, a macro or a block; those of the template itself are in globals_.
  struct Scope {
    Scope* parent = nullptr;
    std::vector<std::pair<int, TemplateValue>> variables;
  };

  // Text that a macro or a block set collects instead of the output.
  class Capture;
  class Scoped;

  // Statements: renderer.cc
  Flow render(const TemplateBody& body);
  Flow render(const TemplateStatement& statement);
  Flow render_checked(const TemplateStatement& statement);
  Flow render_if(const TemplateStatement& statement);
  Flow render_for(const TemplateStatement& statement);
  Flow render_set_block(const TemplateStatement& statement);
  Flow render_with(const TemplateStatement& statement);
  TemplateValue filtered_items(const TemplateStatement& statement);
  void write(std::string_view text);
  void assign(const TemplateTarget& target, const TemplateValue& value);
  void assign_attribute(const TemplateTarget& target, const TemplateValue& value);
  void set_variable(int name, TemplateValue value);
  const TemplateValue& variable(int name);
  TemplateValue call_macro(const TemplateMacro& macro, const TemplateArguments& arguments);
  // Goes one expression or statement deeper, if that is allowed; the caller takes it back.
  bool enter();
  bool bind_parameters(const TemplateMacro& macro, const TemplateArguments& arguments);

  // Expressions: evaluator.cc
  TemplateValue evaluate(const TemplateExpr& expr);
  TemplateValue evaluate_checked(const TemplateExpr& expr);
  TemplateValue evaluate_operator(const TemplateExpr& expr);
  TemplateValue evaluate_collection(const TemplateExpr& expr);
  TemplateValue evaluate_dict(const TemplateExpr& expr);
  TemplateValue evaluate_conditional(const TemplateExpr& expr);
  TemplateValue evaluate_compare(const TemplateExpr& expr);
  TemplateValue evaluate_concat(const TemplateExpr& expr);
  TemplateValue evaluate_slice(const TemplateExpr& expr);
  TemplateValue evaluate_call(const TemplateExpr& expr);
  TemplateValue evaluate_attribute(const TemplateExpr& expr);
  TemplateArguments evaluate_arguments(const TemplateExpr& expr, TemplateArguments arguments);

  const TemplateProgram& program_;
  TemplateMachine machine_;
  std::vector<TemplateValue> globals_;  // by number of name
  TemplateValue date_;                  // what strftime_now gives
  Scope* scope_ = nullptr;              // null: the template itself
  std::string* out_ = nullptr;
  size_t call_depth_ = 0;
  size_t depth_ = 0;  // of expressions and statements on the stack
};

}  // namespace perigee
