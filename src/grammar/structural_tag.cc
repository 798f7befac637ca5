#include "grammar/structural_tag.h"

#include <fmt/core.h>

#include "grammar/pattern.h"
#include "grammar/schema_grammar.h"

namespace perigee {
namespace {

Error refusal(const std::string& place, std::string_view why) {
  return Error(Code::kBadInput, fmt::format("{}: {}", place, why));
}

Json grammar_format(std::string ebnf) {
  return Json(Json::Object{{"type", "grammar"}, {"grammar", Json(std::move(ebnf))}});
}

Status check_excludes(const Json& format, const std::string& place) {
  const Json* excludes = format.find("excludes");
  if (excludes == nullptr || *excludes == Json(Json::Array{})) return {};
  return refusal(place + "/excludes", "not supported: say it in the schema or the expression itself");
}

Result<Json> of_regex(const Json& format, const std::string& place) {
  const Json* text = format.find("pattern");
  if (text == nullptr || !text->is_string()) return refusal(place + "/pattern", "expected a string");
  RETURN_IF_ERROR(check_excludes(format, place));
  auto pattern = Pattern::parse(text->as_string(), Pattern::Whole::kYes);
  if (!pattern.ok()) return refusal(place + "/pattern", pattern.error().message);
  return grammar_format("root ::= Regex(" + ebnf_literal(pattern->spelt()) + ")\n");
}

Result<Json> of_schema(const Json& format, const std::string& place) {
  const Json *style = format.find("style"), *spaces = format.find("max_whitespace_cnt");
  if (style != nullptr && !(*style == Json("json")))
    return refusal(place + "/style", "only \"json\" is supported: spell other styles as a grammar");
  RETURN_IF_ERROR(check_excludes(format, place));
  if (spaces != nullptr && *spaces == Json(0))
    return refusal(place + "/max_whitespace_cnt", "0 is not supported: a space may follow a comma or a colon");
  auto ebnf = schema_grammar(dump_json(*format.find("json_schema")));
  if (!ebnf.ok()) {
    const std::string& why = ebnf.error().message;
    return Error(ebnf.error().code, place + "/json_schema" + (why.starts_with("/:") ? why.substr(1) : why));
  }
  return grammar_format(*std::move(ebnf));
}

// Formats lie in members and arrays of other formats; a schema is not looked into.
Result<Json> replaced(const Json& in, const std::string& place) {
  if (in.is_array()) {
    Json::Array out;
    for (size_t i = 0; i < in.as_array().size(); ++i) {
      auto each = replaced(in.as_array()[i], fmt::format("{}/{}", place, i));
      if (!each.ok()) return each.error();
      out.push_back(*std::move(each));
    }
    return Json(std::move(out));
  }
  if (!in.is_object()) return in;
  const Json* type = in.find("type");
  if (in.find("json_schema") != nullptr) {
    if (type == nullptr || *type == Json("json_schema")) return of_schema(in, place);
    return refusal(place + "/json_schema", "belongs to a format of type \"json_schema\"");
  }
  if (type != nullptr && *type == Json("regex")) return of_regex(in, place);
  Json::Object out;
  for (const auto& [name, value] : in.as_object()) {
    auto each = replaced(value, fmt::format("{}/{}", place, name));
    if (!each.ok()) return each.error();
    out.emplace_back(name, *std::move(each));
  }
  return Json(std::move(out));
}

}  // namespace

Result<Json> with_own_grammars(const Json& tag) {
  return replaced(tag, "");
}

}  // namespace perigee
