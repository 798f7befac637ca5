// Tool declarations: the TypeScript text in which Kimi K2.5 and K2.6 were taught to read their tools.
//
// Their template prints a ready-made string, so the writer of that string is part of the prompt format and must match
// what the model was trained on byte for byte. It knows nothing of chat templates or tokens.
#pragma once

#include <string>

#include "base/json.h"

namespace perigee {

// `value` with the members of every object in code-point order of their keys; arrays keep their order.
Json deep_sorted(const Json& value);

// The declaration of `tools`, an OpenAI list [{"type": "function", "function": {...}}, ...]. The list is deep-sorted
// first. If one tool has a schema that the TypeScript form cannot express (oneOf, allOf, const, an unknown reference),
// or whose indented form is out of all proportion (over kMaxDeclarationWork bytes written on the way), or nothing would
// be declared, the result is the whole sorted list as compact JSON instead; it never fails.
constexpr size_t kMaxDeclarationWork = 32u << 20;
std::string declare_tools(const Json& tools);

}  // namespace perigee
