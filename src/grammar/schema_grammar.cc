#include "grammar/schema_grammar.h"

#include <fmt/core.h>

#include <exception>
#include <new>
#include <unordered_set>

#include "grammar/schema_rules.h"

namespace perigee {

std::string ebnf_literal(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string json_object_grammar() {
  const Json any(true);
  SchemaRules rules(any, {});
  return rules.finish(rules.any_object());
}

Result<std::string> schema_grammar(std::string_view schema, const SchemaLimits& limits) {
  auto parsed = parse_json(schema, {.max_bytes = limits.bytes, .max_depth = limits.depth});
  if (!parsed.ok()) return Error(Code::kBadInput, "/: " + parsed.error().message);
  try {
    SchemaRules rules(*parsed, limits);
    const std::string root = rules.rule_of(*parsed, "");
    std::unordered_set<std::string> endless = rules.endless();
    if (root.empty()) return Error(Code::kBadInput, "/: no value obeys the schema");
    if (endless.empty()) return rules.finish(root);
    SchemaRules without(*parsed, limits);
    without.leave_out(std::move(endless));
    const std::string ends = without.rule_of(*parsed, "");
    if (ends.empty()) return Error(Code::kBadInput, "/: no value obeys the schema");
    return without.finish(ends);
  } catch (const SchemaRefusal& refusal) {
    return refusal.error;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception&) {  // a keyword whose value has another type than every schema gives it
    return Error(Code::kBadInput, "/: not a schema: a keyword has a value of a wrong type");
  }
}

}  // namespace perigee
