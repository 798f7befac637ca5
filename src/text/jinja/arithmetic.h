// Python's binary operators on template values.
#pragma once

#include "text/jinja/ast.h"
#include "text/jinja/machine.h"

namespace perigee {

// a op b for the arithmetic operators. Integers are 64 bits wide; what needs more fails.
TemplateValue apply_arithmetic(TemplateMachine& machine, TemplateOp op, const TemplateValue& a, const TemplateValue& b);

// a op b for the comparisons, `in` and `not in`.
bool apply_comparison(TemplateMachine& machine, TemplateOp op, const TemplateValue& a, const TemplateValue& b);

// -value
TemplateValue negate(TemplateMachine& machine, const TemplateValue& value);

}  // namespace perigee
