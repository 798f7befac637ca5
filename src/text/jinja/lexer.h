// The lexer of chat templates: text and tags, with Jinja2's rules for blanks and line ends around tags (trim_blocks and
// lstrip_blocks on).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace perigee {

enum class TemplateTokenKind {
  kText,
  kOutputBegin,  // {{
  kOutputEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct TemplateToken {
  TemplateTokenKind kind = TemplateTokenKind::kEnd;
  std::string text;  // the decoded value of a string, digits of a number without underscores, else as written
  int line = 1;
};

// Errors: kBadInput with the line.
Result<std::vector<TemplateToken>> lex_template(std::string_view source);

}  // namespace perigee
