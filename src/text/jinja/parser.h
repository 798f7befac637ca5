// The parser of chat templates: the statements and expressions of Jinja2, less those that text/chat_template.h leaves
// out.
#pragma once

#include <string_view>

#include "base/result.h"
#include "text/jinja/ast.h"

namespace perigee {

// Errors: kBadInput with the line; kTooLarge for nesting over the cap.
Result<TemplateProgram> parse_template(std::string_view source);

}  // namespace perigee
