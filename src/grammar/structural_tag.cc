#include "grammar/structural_tag.h"

#include <fmt/core.h>

#include <chrono>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "grammar/regex_grammar.h"
#include "grammar/schema_grammar.h"
#include "grammar/text_grammar.h"

namespace perigee {
namespace {

Error refusal(const std::string& place, std::string_view why) {
  return Error(Code::kBadInput, fmt::format("{}: {}", place, why));
}

Status check_excludes(const Json& format, const std::string& place) {
  const Json* excludes = format.find("excludes");
  if (excludes == nullptr || *excludes == Json(Json::Array{})) return {};
  return refusal(place + "/excludes", "not supported: say it in the schema or the expression itself");
}

class Tag {
 public:
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
      return refusal(place + "/type", "not supported: schemas are of type \"json_schema\"");
    }
    if (type != nullptr && *type == Json("regex")) return of_regex(in, place);
    RETURN_IF_ERROR(check_own(in, place));
    Json::Object out;
    for (const auto& [name, value] : in.as_object()) {
      auto each = replaced(value, fmt::format("{}/{}", place, name));
      if (!each.ok()) return each.error();
      out.emplace_back(name, *std::move(each));
    }
    return Json(std::move(out));
  }

 private:
  Result<Json> grammar_format(const std::string& ebnf, const std::string& place) {
    constexpr size_t kMostBytes = 1 << 20;
    bytes_ += ebnf.size();
    if (bytes_ > kMostBytes)
      return refusal(place, "its schemas have over 1 MiB together as grammars: use fewer or smaller");
    return Json(Json::Object{{"type", "grammar"}, {"grammar", Json(ebnf)}});
  }

  // What xgrammar reads, and a TextCursor would not follow.
  static Status check_own(const Json& format, const std::string& place) {
    for (const char* name : {"max_tokens", "max_chars"})
      if (const Json* bound = format.find(name); bound != nullptr && bound->is_number())
        return refusal(place + "/" + name, "not supported: bound the text by a regex or a grammar");
    const Json* ebnf = format.find("grammar");
    if (ebnf == nullptr || !ebnf->is_string()) return {};
    const Status status = TextGrammar::check_ebnf(ebnf->as_string());
    return status.ok() ? Status() : Error(status.error().code, place + "/grammar: " + status.error().message);
  }

  Result<Json> of_regex(const Json& format, const std::string& place) {
    const Json* text = format.find("pattern");
    if (text == nullptr || !text->is_string()) return refusal(place + "/pattern", "expected a string");
    RETURN_IF_ERROR(check_excludes(format, place));
    const auto ebnf = regex_grammar(text->as_string());
    if (!ebnf.ok()) return refusal(place + "/pattern", ebnf.error().message);
    return grammar_format(*ebnf, place);
  }

  Result<Json> of_schema(const Json& format, const std::string& place) {
    const Json *style = format.find("style"), *spaces = format.find("max_whitespace_cnt");
    if (style != nullptr && !(*style == Json("json")))
      return refusal(place + "/style", "only \"json\" is supported: spell other styles as a grammar");
    RETURN_IF_ERROR(check_excludes(format, place));
    if (spaces != nullptr && *spaces == Json(0))
      return refusal(place + "/max_whitespace_cnt", "0 is not supported: a space may follow a comma or a colon");
    const std::string text = dump_json(*format.find("json_schema"));
    if (const auto known = by_schema_.find(text); known != by_schema_.end())
      return grammar_format(known->second, place);
    constexpr std::chrono::seconds kMost(5);
    if (std::chrono::steady_clock::now() - began_ > kMost)
      return refusal(place, "the schemas before it take over 5 s: use fewer or smaller");
    auto ebnf = schema_grammar(text);
    if (!ebnf.ok()) {
      const std::string& why = ebnf.error().message;
      return Error(ebnf.error().code, place + "/json_schema" + (why.starts_with("/:") ? why.substr(1) : why));
    }
    return grammar_format(by_schema_.emplace(text, *std::move(ebnf)).first->second, place);
  }

  std::unordered_map<std::string, std::string> by_schema_;  // EBNF
  size_t bytes_ = 0;                                        // of all EBNF, equal ones again
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// The older spelling: {"triggers": […], "structures": [{"begin", "schema", "end"}]}.
Result<Json> modern_tag(const Json& tag) {
  const Json *structures = tag.find("structures"), *triggers = tag.find("triggers");
  if (tag.find("format") != nullptr || structures == nullptr || triggers == nullptr) return tag;
  if (!structures->is_array()) return refusal("/structures", "expected an array");
  Json::Array tags;
  for (size_t i = 0; i < structures->as_array().size(); ++i) {
    const Json& each = structures->as_array()[i];
    const Json *begin = each.find("begin"), *schema = each.find("schema"), *end = each.find("end");
    if (begin == nullptr || schema == nullptr || end == nullptr)
      return refusal(fmt::format("/structures/{}", i), "expected begin, schema and end");
    const Json content(Json::Object{{"type", "json_schema"}, {"json_schema", *schema}});
    tags.emplace_back(Json::Object{{"type", "tag"}, {"begin", *begin}, {"content", content}, {"end", *end}});
  }
  const Json format(Json::Object{{"type", "triggered_tags"}, {"triggers", *triggers}, {"tags", Json(std::move(tags))}});
  return Json(Json::Object{{"type", "structural_tag"}, {"format", format}});
}

}  // namespace

Result<Json> with_own_grammars(const Json& tag) {
  auto modern = modern_tag(tag);
  if (!modern.ok()) return modern.error();
  return Tag().replaced(*modern, "");
}

}  // namespace perigee
