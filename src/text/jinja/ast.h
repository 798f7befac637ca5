// The parsed form of a chat template. Names are numbered, filters and tests are looked up once, when parsing.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/builtins.h"
#include "text/jinja/value.h"

namespace perigee {

enum class TemplateOp {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,
};

struct TemplateExpr {
  enum class Kind {
    kConstant,
    kName,
    kTuple,
    kList,
    kDict,         // parts: key, value, key, value, …
    kConditional,  // parts: condition, then, else or null
    kOr,
    kAnd,
    kNot,
    kCompare,  // parts: n + 1 operands, ops: n
    kBinary,   // ops: 1
    kConcat,
    kNegative,
    kPositive,
    kAttribute,  // parts: object; text: name
    kItem,       // parts: object, key
    kSlice,      // parts: object, start, stop, step; the last three may be null
    kCall,       // parts: callee, positional arguments; named
    kFilter,     // parts: subject, positional arguments; named
    kTest,       // the same
  };
  using Pointer = std::unique_ptr<TemplateExpr>;

  Kind kind = Kind::kConstant;
  int line = 0;
  int depth = 1;  // of this tree
  int name = -1;
  std::string text;
  TemplateValue constant;
  std::vector<Pointer> parts;
  std::vector<std::pair<std::string, Pointer>> named;
  std::vector<TemplateOp> ops;
  TemplateBuiltin builtin = nullptr;  // of a filter or a test
};

// What is assigned to: a name, an attribute of a namespace, or a tuple of targets.
struct TemplateTarget {
  int name = -1;
  std::string attribute;
  std::vector<TemplateTarget> parts;
  bool is_tuple = false;
};

struct TemplateStatement;
using TemplateBody = std::vector<TemplateStatement>;

struct TemplateBranch {
  TemplateExpr::Pointer condition;  // null for else
  TemplateBody body;
};

struct TemplateStatement {
  enum class Kind { kText, kOutput, kIf, kFor, kSet, kSetBlock, kWith, kMacro, kBreak, kContinue };

  Kind kind = Kind::kText;
  int line = 0;
  std::string text;
  TemplateExpr::Pointer expr;    // output, value of a set, what a for runs over, filters of a block set
  TemplateExpr::Pointer filter;  // the `if` of a for
  TemplateTarget target;
  std::vector<std::pair<TemplateTarget, TemplateExpr::Pointer>> assignments;  // of a with
  std::vector<TemplateBranch> branches;                                       // of an if
  TemplateBody body;
  TemplateBody otherwise;  // the else of a for
  const TemplateMacro* macro = nullptr;
};

struct TemplateParameter {
  std::string text;
  int name = -1;
  TemplateExpr::Pointer initial;  // null: undefined when not given
};

struct TemplateMacro {
  std::string text;
  int name = -1;
  std::vector<TemplateParameter> parameters;
  TemplateBody body;
};

struct TemplateProgram {
  std::vector<std::string> names;
  std::vector<bool> is_read;  // by number of name: whether an expression reads it
  TemplateBody body;
  std::vector<std::unique_ptr<TemplateMacro>> macros;
  int loop_name = -1;      // "loop"
  int captured_name = -1;  // stands for the text of a block set in its filters
};

}  // namespace perigee
