#include "text/jinja/parser.h"

#include <fmt/core.h>

#include <algorithm>

#include "text/jinja/expression_parser.h"

namespace perigee {
namespace {

using StatementKind = TemplateStatement::Kind;

class Parser : public TemplateExpressionParser {
 public:
  using TemplateExpressionParser::TemplateExpressionParser;
  std::optional<Error> run();

 private:
  using Ends = std::initializer_list<std::string_view>;

  TemplateBody parse_body(Ends ends);
  TemplateBody parse_block(Ends ends);
  bool at_end_tag(Ends ends) const;
  void expect_block_end();
  void parse_output(TemplateBody& body);
  void parse_statement(TemplateBody& body);
  TemplateStatement statement(StatementKind kind) const;
  TemplateStatement parse_if();
  TemplateStatement parse_for();
  TemplateStatement parse_set();
  TemplateStatement parse_with();
  TemplateStatement parse_macro();
  TemplateStatement parse_loop_control();
  TemplateTarget parse_target();
  TemplateTarget parse_one_target();

  int loops_ = 0;   // for statements around the current one
  int scopes_ = 0;  // for, with, block set and macro statements around the current one
};

std::optional<Error> Parser::run() {
  program_.loop_name = number_of("loop");
  program_.captured_name = number_of("(captured)");
  program_.body = parse_body({});
  if (!failed() && token().kind != Kind::kEnd) fail(fmt::format("unexpected {}", where()));
  return error_;
}

TemplateStatement Parser::statement(StatementKind kind) const {
  TemplateStatement made;
  made.kind = kind;
  made.line = token().line;
  return made;
}

bool Parser::at_end_tag(Ends ends) const {
  return token().kind == Kind::kName && std::find(ends.begin(), ends.end(), token().text) != ends.end();
}

void Parser::expect_block_end() {
  if (token().kind != Kind::kBlockEnd) return fail(fmt::format("expected the end of the tag, found {}", where()));
  next();
}

// Statements up to a tag of `ends`, whose name is then the current token, or up to the end of the template.
TemplateBody Parser::parse_body(Ends ends) {
  Nested nested(*this);
  TemplateBody body;
  while (!failed() && token().kind != Kind::kEnd) {
    if (token().kind == Kind::kText) {
      body.push_back(statement(StatementKind::kText));
      body.back().text = token().text;
      next();
    } else if (token().kind == Kind::kOutputBegin) {
      parse_output(body);
    } else {
      next();
      if (at_end_tag(ends)) return body;
      parse_statement(body);
      expect_block_end();
    }
  }
  if (ends.size() > 0) fail(fmt::format("the template ends before '{}'", *(ends.end() - 1)));
  return body;
}

// The body of a statement, from the end of its tag on.
TemplateBody Parser::parse_block(Ends ends) {
  skip_operator(":");
  expect_block_end();
  return parse_body(ends);
}

void Parser::parse_output(TemplateBody& body) {
  TemplateStatement output = statement(StatementKind::kOutput);
  next();
  output.expr = parse_tuple(true);
  if (token().kind != Kind::kOutputEnd) return fail(fmt::format("expected '}}}}', found {}", where()));
  next();
  body.push_back(std::move(output));
}

void Parser::parse_statement(TemplateBody& body) {
  if (is_name("if")) {
    body.push_back(parse_if());
  } else if (is_name("for")) {
    body.push_back(parse_for());
  } else if (is_name("set")) {
    body.push_back(parse_set());
  } else if (is_name("with")) {
    body.push_back(parse_with());
  } else if (is_name("macro")) {
    body.push_back(parse_macro());
  } else if (is_name("break") || is_name("continue")) {
    body.push_back(parse_loop_control());
  } else {
    fail(fmt::format("unknown or unsupported statement {}", where()));
  }
}

TemplateStatement Parser::parse_if() {
  TemplateStatement made = statement(StatementKind::kIf);
  bool is_else = false;
  while (!failed()) {
    next();
    TemplateBranch branch;
    if (!is_else) branch.condition = parse_tuple(false);
    branch.body = is_else ? parse_block({"endif"}) : parse_block({"elif", "else", "endif"});
    made.branches.push_back(std::move(branch));
    if (skip_name("endif")) break;
    is_else = is_name("else");
  }
  return made;
}

TemplateStatement Parser::parse_for() {
  TemplateStatement made = statement(StatementKind::kFor);
  next();
  made.target = parse_target();
  if (!skip_name("in")) fail(fmt::format("expected 'in', found {}", where()));
  made.expr = parse_tuple(false);
  if (skip_name("if")) made.filter = parse_expression();
  if (is_name("recursive")) fail("recursive loops are not supported");
  ++loops_;
  ++scopes_;
  made.body = parse_block({"else", "endfor"});
  --loops_;
  if (skip_name("else")) made.otherwise = parse_block({"endfor"});
  --scopes_;
  skip_name("endfor");
  return made;
}

TemplateTarget Parser::parse_one_target() {
  TemplateTarget target;
  if (skip_operator("(")) {
    Nested nested(*this);
    if (!failed()) target = parse_target();
    expect_operator(")");
    return target;
  }
  const std::string name = expect_name();
  static constexpr std::string_view kConstants[] = {"true", "false", "none", "True", "False", "None"};
  if (std::find(std::begin(kConstants), std::end(kConstants), name) != std::end(kConstants))
    fail(fmt::format("cannot assign to {}", name));
  target.name = number_of(name);
  return target;
}

TemplateTarget Parser::parse_target() {
  TemplateTarget first = parse_one_target();
  if (!is_operator(",")) return first;
  TemplateTarget tuple;
  tuple.is_tuple = true;
  tuple.parts.push_back(std::move(first));
  while (skip_operator(",")) {
    if (token().kind != Kind::kName && !is_operator("(")) break;
    if (is_name("in")) break;
    tuple.parts.push_back(parse_one_target());
  }
  return tuple;
}

TemplateStatement Parser::parse_set() {
  TemplateStatement made = statement(StatementKind::kSet);
  next();
  made.target = parse_target();
  if (!made.target.is_tuple && skip_operator(".")) made.target.attribute = expect_name();
  if (skip_operator("=")) {
    made.expr = parse_tuple(true);
    return made;
  }
  made.kind = StatementKind::kSetBlock;
  if (is_operator("|")) {
    Expr captured = make(TemplateExpr::Kind::kName);
    captured->name = program_.captured_name;
    made.expr = parse_filters(std::move(captured));
  }
  ++scopes_;
  made.body = parse_block({"endset"});
  --scopes_;
  skip_name("endset");
  return made;
}

TemplateStatement Parser::parse_with() {
  TemplateStatement made = statement(StatementKind::kWith);
  next();
  while (!failed() && token().kind != Kind::kBlockEnd) {
    if (!made.assignments.empty()) expect_operator(",");
    TemplateTarget target = parse_one_target();
    expect_operator("=");
    made.assignments.emplace_back(std::move(target), parse_expression());
  }
  ++scopes_;
  made.body = parse_block({"endwith"});
  --scopes_;
  skip_name("endwith");
  return made;
}

TemplateStatement Parser::parse_macro() {
  TemplateStatement made = statement(StatementKind::kMacro);
  next();
  if (scopes_ > 0) fail("a macro inside a loop, a macro or a block is not supported");
  auto macro = std::make_unique<TemplateMacro>();
  macro->text = expect_name();
  macro->name = number_of(macro->text);
  expect_operator("(");
  while (!failed() && !is_operator(")")) {
    TemplateParameter parameter;
    parameter.text = expect_name();
    parameter.name = number_of(parameter.text);
    if (skip_operator("=")) {
      parameter.initial = parse_expression();
    } else if (!macro->parameters.empty() && macro->parameters.back().initial) {
      fail("a parameter without a default follows one with a default");
    }
    macro->parameters.push_back(std::move(parameter));
    if (!is_operator(")")) expect_operator(",");
  }
  expect_operator(")");
  ++scopes_;
  macro->body = parse_block({"endmacro"});
  --scopes_;
  skip_name("endmacro");
  made.macro = macro.get();
  program_.macros.push_back(std::move(macro));
  return made;
}

TemplateStatement Parser::parse_loop_control() {
  TemplateStatement made = statement(is_name("break") ? StatementKind::kBreak : StatementKind::kContinue);
  if (loops_ == 0) fail(fmt::format("{} outside a loop", where()));
  next();
  return made;
}

}  // namespace

Result<TemplateProgram> parse_template(std::string_view source) {
  ASSIGN_OR_RETURN(auto tokens, lex_template(source));
  TemplateProgram program;
  Parser parser(std::move(tokens), program);
  if (auto error = parser.run()) return *error;
  return program;
}

}  // namespace perigee
