// The half of the template parser that reads expressions; text/jinja/parser.cc adds the statements.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace perigee {

// Errors are sticky: fail() keeps the first one and moves to the end of the tokens, so every loop ends.
class TemplateExpressionParser {
 public:
  using Expr = TemplateExpr::Pointer;
  using Kind = TemplateTokenKind;

  TemplateExpressionParser(std::vector<TemplateToken> tokens, TemplateProgram& program)
      : program_(program), tokens_(std::move(tokens)) {}

  // A tuple without brackets, or a single expression.
  Expr parse_tuple(bool conditional, bool in_brackets = false);
  Expr parse_expression();
  Expr parse_no_conditional();
  Expr parse_filters(Expr subject);  // "| a | b"

 protected:
  // Deeper nesting than kMaxParseDepth fails.
  class Nested {
   public:
    explicit Nested(TemplateExpressionParser& parser) : parser_(parser) { parser_.enter(); }
    ~Nested() { --parser_.depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    TemplateExpressionParser& parser_;
  };

  void enter();
  void fail(std::string_view message);
  void fail_depth();
  bool failed() const { return error_.has_value(); }
  const TemplateToken& token() const { return tokens_[at_]; }
  const TemplateToken& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  void next() { at_ = std::min(at_ + 1, tokens_.size() - 1); }
  bool is_operator(std::string_view text) const { return token().kind == Kind::kOperator && token().text == text; }
  bool is_name(std::string_view text) const { return token().kind == Kind::kName && token().text == text; }
  bool skip_operator(std::string_view text);
  bool skip_name(std::string_view text);
  void expect_operator(std::string_view text);
  std::string expect_name();
  std::string where() const;  // the current token, for messages
  int number_of(const std::string& name);
  Expr make(TemplateExpr::Kind kind) const;
  Expr make(TemplateExpr::Kind kind, Expr first, Expr second = nullptr);
  void add_part(TemplateExpr& expr, Expr part);

  TemplateProgram& program_;
  std::optional<Error> error_;

 private:
  Expr parse_or();
  Expr parse_and();
  Expr parse_not();
  Expr parse_compare();
  Expr parse_binary(int level);
  Expr parse_concat();
  Expr parse_unary(bool with_filter);
  Expr parse_primary();
  Expr parse_name();
  Expr parse_constant();
  Expr parse_list();
  Expr parse_dict();
  Expr parse_postfix(Expr expr);
  Expr parse_subscript(Expr object);
  Expr parse_brackets(Expr object);
  Expr parse_slice(Expr object, Expr start);
  Expr parse_call(Expr callee);
  void parse_arguments(TemplateExpr& call);
  Expr parse_filter_or_test(Expr expr);
  Expr parse_test(Expr subject);
  bool is_tuple_end() const;

  std::vector<TemplateToken> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  std::unordered_map<std::string, int> numbers_;
};

}  // namespace perigee
