#include "text/tool_declarations.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

namespace perigee {
namespace {

Json json(std::string_view text) {
  return parse_json(text).value();
}

// The list of one tool named f with these parameters.
Json tool(std::string_view parameters) {
  return json(fmt::format("{}{}}}}}]", R"([{"type":"function","function":{"name":"f","parameters":)", parameters));
}

std::string declared(std::string_view parameters) {
  return declare_tools(tool(parameters));
}

// The text around the single line or block that declares f.
std::string wrapped(std::string_view body) {
  return fmt::format("# Tools\n\n## functions\nnamespace functions {{\n{}\n}}\n", body);
}

std::string fields(std::string_view body) {
  return wrapped(fmt::format("type f = (_: {{\n{}\n}}) => any;", body));
}

std::string one_field(std::string_view schema) {
  return declared(fmt::format("{}{}}}}}", R"({"type":"object","properties":{"p":)", schema));
}

void expect_json_fallback(std::string_view parameters) {
  EXPECT_EQ(declared(parameters), dump_json(deep_sorted(tool(parameters)))) << parameters;
}

TEST(ToolDeclarations, WeatherToolOfTheFacts) {
  const Json tools = json(R"([{"type":"function","function":{"name":"get_weather",
    "description":"Get weather for a city.","parameters":{"type":"object","required":["city"],"properties":{
      "unit":{"enum":["c","f"],"description":"Unit","type":"string"},
      "days":{"type":"integer","minimum":1,"maximum":7,"default":3},
      "city":{"type":"string","description":"City name"}}}}}])");
  EXPECT_EQ(declare_tools(tools), wrapped("// Get weather for a city.\n"
                                          "type get_weather = (_: {\n"
                                          "  // City name\n"
                                          "  city: string,\n"
                                          "  // maximum: 7, minimum: 1\n"
                                          "  // Default: 3\n"
                                          "  days?: number,\n"
                                          "  // Unit\n"
                                          "  unit?: \"c\" | \"f\"\n"
                                          "}) => any;"));
}

TEST(ToolDeclarations, ArrayOfDescribedNumbersOfTheFacts) {
  EXPECT_EQ(declared(R"({"type":"object","properties":{"n":{"type":"array","minItems":1,"maxItems":3,
      "items":{"type":"number","minimum":0},"default":[1,2]}},"additionalProperties":{"type":"string"}})"),
            fields("  // maxItems: 3, minItems: 1\n"
                   "  // Default: [1, 2]\n"
                   "  n?: Array<\n"
                   "    // minimum: 0\n"
                   "    number\n"
                   "  >,\n"
                   "  [k: string]: string"));
}

TEST(ToolDeclarations, WithoutParameters) {
  EXPECT_EQ(declare_tools(json(R"([{"type":"function","function":{"name":"f"}}])")),
            wrapped("type f = (_: {}) => any;"));
  EXPECT_EQ(declared("null"), wrapped("type f = (_: {}) => any;"));
  EXPECT_EQ(declared(R"({"anyOf":[{"type":"string"}]})"), wrapped("type f = (_: {}) => any;"));
}

TEST(ToolDeclarations, Types) {
  EXPECT_EQ(one_field(R"({"enum":[1,"a",null,true]})"), fields("  p?: 1 | \"a\" | None | True"));
  EXPECT_EQ(one_field(R"({"type":["string","null"]})"), fields("  p?: string | null"));
  EXPECT_EQ(one_field(R"({"type":["object","array","integer"]})"), fields("  p?: {} | Array<any> | number"));
  EXPECT_EQ(one_field("{}"), fields("  p?: any"));
  EXPECT_EQ(one_field("true"), fields("  p?: any"));
  EXPECT_EQ(one_field("false"), fields("  p?: null"));
  EXPECT_EQ(one_field(R"({"type":"array"})"), fields("  p?: Array<any>"));
  EXPECT_EQ(one_field(R"({"type":"file"})"), fields("  p?: file"));
  EXPECT_EQ(one_field(R"({"anyOf":[{"type":"integer"},{"enum":["x"]}]})"), fields("  p?: number | \"x\""));
  EXPECT_EQ(one_field(R"({"enum":["say \"hi\""]})"), fields("  p?: \"say \"hi\"\""));
  EXPECT_EQ(one_field(R"({"type":"object","properties":{"q":{"type":"boolean"}},"additionalProperties":false})"),
            fields("  p?: {\n    q?: boolean,\n    [k: string]: never\n  }"));
}

TEST(ToolDeclarations, RequiredFieldsComeFirst) {
  EXPECT_EQ(declared(R"({"type":"object","required":["z","m"],"properties":{"b":{"type":"string"},"z":{"type":"string"},
      "a":{"type":"string"},"m":{"type":"string"}}})"),
            fields("  m: string,\n  z: string,\n  a?: string,\n  b?: string"));
}

TEST(ToolDeclarations, CommentsAndDefaults) {
  EXPECT_EQ(one_field(R"({"type":"string","description":"one\n\ntwo","pattern":"^a$","minLength":1,"minimum":3})"),
            fields("  // one\n\n  // two\n  // minLength: 1, pattern: ^a$\n  p?: string"));
  EXPECT_EQ(one_field(R"({"type":"boolean","default":true})"), fields("  // Default: True\n  p?: boolean"));
  EXPECT_EQ(one_field(R"({"type":"number","default":1.5})"), fields("  // Default: 1.5\n  p?: number"));
  EXPECT_EQ(one_field(R"({"type":"string","default":"é"})"), fields("  // Default: \"é\"\n  p?: string"));
  EXPECT_EQ(one_field(R"({"type":"string","default":null})"), fields("  p?: string"));
}

TEST(ToolDeclarations, Definitions) {
  EXPECT_EQ(declared(R"({"type":"object","properties":{"root":{"$ref":"#/$defs/Node"}},"$defs":{"Node":{
      "type":"object","description":"A node.","properties":{"next":{"$ref":"#/$defs/Node"}}}}})"),
            wrapped("// A node.\ninterface Node {\n  next?: Node\n}\ntype f = (_: {\n  root?: Node\n}) => any;"));
  EXPECT_EQ(declared(R"({"type":"object","required":["z"],"properties":{"z":{"type":"string"},"a":{"$ref":"#"}}})"),
            wrapped("interface parameters {\n  a?: parameters,\n  z: string\n}\ntype f = (_: parameters) => any;"));
  expect_json_fallback(R"({"properties":{"a":{"$ref":"#/$defs/Missing"}}})");
  expect_json_fallback(R"({"properties":{"a":{"$ref":"other.json"}}})");
}

TEST(ToolDeclarations, FallsBackToJson) {
  expect_json_fallback(R"({"properties":{"a":{"oneOf":[{"type":"string"}]}}})");
  expect_json_fallback(R"({"properties":{"a":{"const":1}}})");
  expect_json_fallback(R"({"properties":{"a":{"allOf":[]}}})");
  expect_json_fallback(R"({"properties":{"a":{"type":"string","enum":[1]}}})");
  expect_json_fallback(R"({"properties":{"a":{"type":["string","number"],"enum":["a"]}}})");
  expect_json_fallback(R"({"properties":[1]})");
  expect_json_fallback("[]");
  EXPECT_EQ(declare_tools(json("[]")), "[]");
  EXPECT_EQ(declare_tools(json(R"([{"type":"web","b":1,"a":"é"}])")), R"([{"a":"é","b":1,"type":"web"}])");
}

TEST(ToolDeclarations, OneBadToolTurnsTheWholeListIntoJson) {
  const Json tools = json(R"([{"type":"function","function":{"name":"good"}},
      {"type":"function","function":{"name":"bad","parameters":{"properties":{"a":{"not":{}}}}}}])");
  EXPECT_EQ(declare_tools(tools), dump_json(deep_sorted(tools)));
}

TEST(ToolDeclarations, SkipsOtherKindsOfTools) {
  EXPECT_EQ(declare_tools(json(R"([{"type":"web"},{"type":"function","function":{"name":"a"}},
      {"type":"function","function":{"name":"b"}}])")),
            wrapped("type a = (_: {}) => any;\ntype b = (_: {}) => any;"));
}

// Twelve levels of objects around many short properties: these are indented by 26 blanks and copied once a level.
TEST(ToolDeclarations, SchemasThatUnfoldWithoutMeasureStayJson) {
  std::string inner = R"({"type":"object","properties":{)";
  for (int i = 0; i < 3000; ++i) inner += fmt::format("{}\"p{}\":{{}}", i > 0 ? "," : "", i);
  inner += "}}";
  for (int level = 0; level < 12; ++level)
    inner = fmt::format("{}{}}}}}", R"({"type":"object","properties":{"a":)", inner);
  const Json one = json(R"({"type":"function","function":{"name":"f","parameters":)" + inner + "}}");
  EXPECT_TRUE(declare_tools(Json(Json::Array{one})).starts_with("# Tools"));
  const Json many(Json::Array(60, one));
  EXPECT_EQ(declare_tools(many), dump_json(deep_sorted(many)));
}

}  // namespace
}  // namespace perigee
