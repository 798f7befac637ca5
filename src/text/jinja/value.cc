#include "text/jinja/value.h"

namespace perigee {
namespace {

using Kind = TemplateSequence::Kind;

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;  // clang 14 does not deduce it by itself

}  // namespace

bool TemplateValue::is_indexable() const {
  return is_sequence() && sequence().kind != Kind::kIterator && sequence().kind != Kind::kView;
}

const char* TemplateValue::type_name() const {
  static constexpr const char* kNames[] = {"Undefined", "NoneType", "bool",        "int",       "float", "str",
                                           "list",      "dict",     "LoopContext", "Namespace", "Macro", "function"};
  static constexpr const char* kSequences[] = {"list", "tuple", "range", "generator", "view"};
  if (is<Number>()) return as<Number>()->integral ? "int" : "float";
  return is_sequence() ? kSequences[static_cast<int>(sequence().kind)] : kNames[value_.index()];
}

bool TemplateValue::truthy() const {
  return std::visit(Overloaded{
                        [](Undefined) { return false; },
                        [](None) { return false; },
                        [](bool value) { return value; },
                        [](int64_t value) { return value != 0; },
                        [](double value) { return value != 0; },
                        [](const Number& value) { return value->nearest != 0; },
                        [](const String& value) { return !value->empty(); },
                        [](const Sequence& value) { return value->kind == Kind::kIterator || !value->items.empty(); },
                        [](const Dict& value) { return !value->entries.empty(); },
                        [](const auto&) { return true; },
                    },
                    value_);
}

int TemplateValue::nesting() const {
  if (is_sequence()) return sequence().nesting;
  if (is_dict()) return dict().nesting;
  if (is<Loop>()) return as<Loop>()->sequence->nesting + 1;
  return 0;
}

}  // namespace perigee
