#include "text/jinja/expression_parser.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <span>

namespace perigee {
namespace {

constexpr int kMaxParseDepth = 64;        // brackets and statements within each other
constexpr int kMaxExpressionDepth = 200;  // of the tree: also counts operators in a row

using Expr = TemplateExpr::Pointer;
using ExprKind = TemplateExpr::Kind;

struct Operator {
  std::string_view text;
  TemplateOp op;
};

constexpr std::array kCompare = {
    Operator{"==", TemplateOp::kEqual},  Operator{"!=", TemplateOp::kNotEqual},
    Operator{"<", TemplateOp::kLess},    Operator{"<=", TemplateOp::kLessEqual},
    Operator{">", TemplateOp::kGreater}, Operator{">=", TemplateOp::kGreaterEqual},
};
// By rising binding: sums (which bind weaker than ~), products, powers.
constexpr std::array kSums = {Operator{"+", TemplateOp::kAdd}, Operator{"-", TemplateOp::kSubtract}};
constexpr std::array kProducts = {Operator{"*", TemplateOp::kMultiply}, Operator{"/", TemplateOp::kDivide},
                                  Operator{"//", TemplateOp::kFloorDivide}, Operator{"%", TemplateOp::kModulo}};
constexpr std::array kPowers = {Operator{"**", TemplateOp::kPower}};
constexpr std::array<std::span<const Operator>, 3> kLevels = {kSums, kProducts, kPowers};

const Operator* find_operator(std::span<const Operator> operators, const TemplateToken& token) {
  if (token.kind != TemplateTokenKind::kOperator) return nullptr;
  const auto at =
      std::find_if(operators.begin(), operators.end(), [&](const Operator& o) { return o.text == token.text; });
  return at == operators.end() ? nullptr : &*at;
}

TemplateValue string_value(std::string text) {
  return TemplateValue(std::make_shared<const std::string>(std::move(text)));
}

}  // namespace

void TemplateExpressionParser::fail(std::string_view message) {
  if (!error_) error_ = bad_input(fmt::format("chat template, line {}: {}", token().line, message));
  at_ = tokens_.size() - 1;
}

void TemplateExpressionParser::fail_depth() {
  if (!error_) {
    error_ = Error(Code::kTooLarge,
                   fmt::format("chat template, line {}: nesting is over the cap of {} levels or {} operators in a row",
                               token().line, kMaxParseDepth, kMaxExpressionDepth));
  }
  at_ = tokens_.size() - 1;
}

void TemplateExpressionParser::enter() {
  if (++depth_ > kMaxParseDepth) fail_depth();
}

bool TemplateExpressionParser::skip_operator(std::string_view text) {
  if (!is_operator(text)) return false;
  next();
  return true;
}

bool TemplateExpressionParser::skip_name(std::string_view text) {
  if (!is_name(text)) return false;
  next();
  return true;
}

void TemplateExpressionParser::expect_operator(std::string_view text) {
  if (!skip_operator(text)) fail(fmt::format("expected '{}', found {}", text, where()));
}

std::string TemplateExpressionParser::expect_name() {
  if (token().kind != Kind::kName) {
    fail(fmt::format("expected a name, found {}", where()));
    return {};
  }
  std::string name = token().text;
  next();
  return name;
}

std::string TemplateExpressionParser::where() const {
  if (token().kind == Kind::kEnd) return "the end of the template";
  if (token().kind == Kind::kBlockEnd || token().kind == Kind::kOutputEnd) return "the end of the tag";
  return fmt::format("'{}'", token().text.substr(0, 32));
}

int TemplateExpressionParser::number_of(const std::string& name) {
  const auto [at, is_new] = numbers_.emplace(name, static_cast<int>(program_.names.size()));
  if (is_new) {
    program_.names.push_back(name);
    program_.is_read.push_back(false);
  }
  return at->second;
}

Expr TemplateExpressionParser::make(ExprKind kind) const {
  auto expr = std::make_unique<TemplateExpr>();
  expr->kind = kind;
  expr->line = token().line;
  return expr;
}

Expr TemplateExpressionParser::make(ExprKind kind, Expr first, Expr second) {
  Expr expr = make(kind);
  add_part(*expr, std::move(first));
  if (second) add_part(*expr, std::move(second));
  return expr;
}

void TemplateExpressionParser::add_part(TemplateExpr& expr, Expr part) {
  if (part) expr.depth = std::max(expr.depth, part->depth + 1);
  if (expr.depth > kMaxExpressionDepth) fail_depth();
  expr.parts.push_back(std::move(part));
}

Expr TemplateExpressionParser::parse_expression() {
  Nested nested(*this);
  if (failed()) return make(ExprKind::kConstant);
  Expr expr = parse_or();
  while (skip_name("if")) {
    Expr condition = parse_or();
    expr = make(ExprKind::kConditional, std::move(condition), std::move(expr));
    add_part(*expr, skip_name("else") ? parse_expression() : nullptr);
  }
  return expr;
}

Expr TemplateExpressionParser::parse_no_conditional() {
  return parse_or();
}

Expr TemplateExpressionParser::parse_or() {
  Expr left = parse_and();
  while (skip_name("or")) left = make(ExprKind::kOr, std::move(left), parse_and());
  return left;
}

Expr TemplateExpressionParser::parse_and() {
  Expr left = parse_not();
  while (skip_name("and")) left = make(ExprKind::kAnd, std::move(left), parse_not());
  return left;
}

Expr TemplateExpressionParser::parse_not() {
  if (!is_name("not")) return parse_compare();
  Nested nested(*this);
  next();
  return make(ExprKind::kNot, parse_not());
}

Expr TemplateExpressionParser::parse_compare() {
  Expr first = parse_binary(0);
  Expr chain;
  while (true) {
    const Operator* found = find_operator(kCompare, token());
    const bool not_in = is_name("not") && ahead().kind == Kind::kName && ahead().text == "in";
    if (!found && !not_in && !is_name("in")) break;
    if (!chain) chain = make(ExprKind::kCompare, std::move(first));
    if (not_in) next();
    next();
    chain->ops.push_back(found ? found->op : not_in ? TemplateOp::kNotIn : TemplateOp::kIn);
    add_part(*chain, parse_binary(0));
  }
  return chain ? std::move(chain) : std::move(first);
}

// Level 0 holds concatenations, which hold level 1, which holds level 2, which holds unary expressions.
Expr TemplateExpressionParser::parse_binary(int level) {
  const auto operand = [&] { return level == 0 ? parse_concat() : level == 1 ? parse_binary(2) : parse_unary(true); };
  Expr left = operand();
  while (const Operator* found = find_operator(kLevels[static_cast<size_t>(level)], token())) {
    next();
    left = make(ExprKind::kBinary, std::move(left), operand());
    left->ops.push_back(found->op);
  }
  return left;
}

Expr TemplateExpressionParser::parse_concat() {
  Expr first = parse_binary(1);
  if (!is_operator("~")) return first;
  Expr all = make(ExprKind::kConcat, std::move(first));
  while (skip_operator("~")) add_part(*all, parse_binary(1));
  return all;
}

Expr TemplateExpressionParser::parse_unary(bool with_filter) {
  Expr expr;
  if (is_operator("-") || is_operator("+")) {
    Nested nested(*this);
    const ExprKind kind = is_operator("-") ? ExprKind::kNegative : ExprKind::kPositive;
    next();
    expr = make(kind, parse_unary(false));
  } else {
    expr = parse_primary();
  }
  expr = parse_postfix(std::move(expr));
  return with_filter ? parse_filter_or_test(std::move(expr)) : std::move(expr);
}

Expr TemplateExpressionParser::parse_primary() {
  if (token().kind == Kind::kName) return parse_name();
  if (token().kind == Kind::kString || token().kind == Kind::kInteger || token().kind == Kind::kFloat)
    return parse_constant();
  if (is_operator("[")) return parse_list();
  if (is_operator("{")) return parse_dict();
  if (skip_operator("(")) {
    Expr expr = parse_tuple(true, true);
    expect_operator(")");
    return expr;
  }
  fail(fmt::format("unexpected {}", where()));
  return make(ExprKind::kConstant);
}

Expr TemplateExpressionParser::parse_name() {
  const std::string name = token().text;
  Expr expr = make(ExprKind::kConstant);
  next();
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    expr->constant = TemplateValue(name == "true" || name == "True");
  } else if (name == "none" || name == "None") {
    expr->constant = TemplateValue::None{};
  } else {
    expr->kind = ExprKind::kName;
    expr->name = number_of(name);
    program_.is_read[static_cast<size_t>(expr->name)] = true;
  }
  return expr;
}

Expr TemplateExpressionParser::parse_constant() {
  Expr expr = make(ExprKind::kConstant);
  const std::string& text = token().text;
  if (token().kind == Kind::kString) {
    std::string joined;
    for (; token().kind == Kind::kString; next()) joined += token().text;
    expr->constant = string_value(std::move(joined));
    return expr;
  }
  if (token().kind == Kind::kFloat) {
    expr->constant = TemplateValue(std::strtod(text.c_str(), nullptr));  // unlike from_chars it gives infinity
  } else {
    const char mark = text.size() > 1 ? static_cast<char>(text[1] | 0x20) : '\0';
    const int base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
    int64_t value = 0;
    const auto end = std::from_chars(text.data() + (base == 10 ? 0 : 2), text.data() + text.size(), value, base);
    if (end.ec != std::errc()) fail("an integer does not fit 64 bits");
    expr->constant = TemplateValue(value);
  }
  next();
  return expr;
}

bool TemplateExpressionParser::is_tuple_end() const {
  return token().kind == Kind::kOutputEnd || token().kind == Kind::kBlockEnd || token().kind == Kind::kEnd ||
         is_operator(")");
}

Expr TemplateExpressionParser::parse_tuple(bool conditional, bool in_brackets) {
  Expr tuple = make(ExprKind::kTuple);
  bool has_comma = false;
  while (!failed() && !is_tuple_end()) {
    add_part(*tuple, conditional ? parse_expression() : parse_no_conditional());
    if (!skip_operator(",")) break;
    has_comma = true;
  }
  if (has_comma || (in_brackets && tuple->parts.empty())) return tuple;
  if (tuple->parts.empty()) {
    fail(fmt::format("expected an expression, found {}", where()));
    return tuple;
  }
  return std::move(tuple->parts[0]);
}

Expr TemplateExpressionParser::parse_list() {
  Expr list = make(ExprKind::kList);
  expect_operator("[");
  while (!failed() && !is_operator("]")) {
    add_part(*list, parse_expression());
    if (!is_operator("]")) expect_operator(",");
  }
  expect_operator("]");
  return list;
}

Expr TemplateExpressionParser::parse_dict() {
  Expr dict = make(ExprKind::kDict);
  expect_operator("{");
  while (!failed() && !is_operator("}")) {
    add_part(*dict, parse_expression());
    expect_operator(":");
    add_part(*dict, parse_expression());
    if (!is_operator("}")) expect_operator(",");
  }
  expect_operator("}");
  return dict;
}

Expr TemplateExpressionParser::parse_postfix(Expr expr) {
  while (!failed()) {
    if (is_operator(".") || is_operator("[")) {
      expr = parse_subscript(std::move(expr));
    } else if (is_operator("(")) {
      expr = parse_call(std::move(expr));
    } else {
      break;
    }
  }
  return expr;
}

Expr TemplateExpressionParser::parse_subscript(Expr object) {
  if (skip_operator("[")) return parse_brackets(std::move(object));
  expect_operator(".");
  if (token().kind == Kind::kInteger) return make(ExprKind::kItem, std::move(object), parse_constant());
  Expr expr = make(ExprKind::kAttribute, std::move(object));
  expr->text = expect_name();
  return expr;
}

Expr TemplateExpressionParser::parse_brackets(Expr object) {
  Expr key = is_operator(":") ? nullptr : parse_expression();
  Expr expr;
  if (skip_operator(":")) {
    expr = parse_slice(std::move(object), std::move(key));
  } else {
    expr = make(ExprKind::kItem, std::move(object), std::move(key));
  }
  expect_operator("]");
  return expr;
}

Expr TemplateExpressionParser::parse_slice(Expr object, Expr start) {
  Expr slice = make(ExprKind::kSlice, std::move(object));
  add_part(*slice, std::move(start));
  const auto bound = [&] { return is_operator(":") || is_operator("]") ? nullptr : parse_expression(); };
  add_part(*slice, bound());
  add_part(*slice, skip_operator(":") ? bound() : nullptr);
  return slice;
}

Expr TemplateExpressionParser::parse_call(Expr callee) {
  Expr call = make(ExprKind::kCall, std::move(callee));
  parse_arguments(*call);
  return call;
}

void TemplateExpressionParser::parse_arguments(TemplateExpr& call) {
  expect_operator("(");
  while (!failed() && !is_operator(")")) {
    if (is_operator("*") || is_operator("**")) return fail("* and ** arguments are not supported");
    if (token().kind == Kind::kName && ahead().kind == Kind::kOperator && ahead().text == "=") {
      std::string name = expect_name();
      next();
      Expr value = parse_expression();
      call.depth = std::max(call.depth, value->depth + 1);
      call.named.emplace_back(std::move(name), std::move(value));
    } else if (!call.named.empty()) {
      return fail("a positional argument follows a named one");
    } else {
      add_part(call, parse_expression());
    }
    if (!is_operator(")")) expect_operator(",");
  }
  expect_operator(")");
}

Expr TemplateExpressionParser::parse_filter_or_test(Expr expr) {
  while (!failed()) {
    if (is_operator("|")) {
      expr = parse_filters(std::move(expr));
    } else if (is_name("is")) {
      expr = parse_test(std::move(expr));
    } else if (is_operator("(")) {
      expr = parse_call(std::move(expr));
    } else {
      break;
    }
  }
  return expr;
}

Expr TemplateExpressionParser::parse_filters(Expr subject) {
  while (skip_operator("|")) {
    Expr filter = make(ExprKind::kFilter, std::move(subject));
    filter->text = expect_name();
    filter->builtin = find_template_filter(filter->text);
    if (!filter->builtin) fail(fmt::format("there is no filter named '{}'", filter->text.substr(0, 64)));
    if (is_operator("(")) parse_arguments(*filter);
    subject = std::move(filter);
  }
  return subject;
}

Expr TemplateExpressionParser::parse_test(Expr subject) {
  next();
  const bool negated = skip_name("not");
  Expr test = make(ExprKind::kTest, std::move(subject));
  test->text = expect_name();
  test->builtin = find_template_test(test->text);
  if (!test->builtin) fail(fmt::format("there is no test named '{}'", test->text.substr(0, 64)));
  const bool is_value = token().kind == Kind::kName || token().kind == Kind::kString ||
                        token().kind == Kind::kInteger || token().kind == Kind::kFloat || is_operator("[") ||
                        is_operator("{");
  if (is_operator("(")) {
    parse_arguments(*test);
  } else if (is_value && !is_name("else") && !is_name("or") && !is_name("and")) {
    if (is_name("is")) fail("tests cannot be chained with is");
    add_part(*test, parse_postfix(parse_primary()));
  }
  return negated ? make(ExprKind::kNot, std::move(test)) : std::move(test);
}

}  // namespace perigee
