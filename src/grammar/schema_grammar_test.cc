#include "grammar/schema_grammar.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "grammar/grammar_compiler.h"
#include "grammar/language.h"
#include "grammar/schema_fixture.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_obeys.h"

namespace perigee {
namespace {

int32_t end_id() {
  return *grammar_tokenizer()->special_id("<|im_end|>");
}

GrammarCompiler& compiler() {
  static GrammarCompiler made(grammar_tokenizer(), {end_id()});
  return made;
}

Result<std::shared_ptr<const Constraint>> compiled(const std::string& schema) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kJsonSchema;
  spec.text = schema;
  return compiler().compile_now(spec);
}

// Schemas whose replies obeys() can judge; tests/e2e has many more, judged by Python's jsonschema.
constexpr const char* kSchemas[] = {
    R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":3}},"required":["a"]})",
    R"({"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":{"type":"boolean"}})",
    R"({"type":"object","properties":{"ab":{"const":1},"name":{"enum":["x","y"]}},"required":["ab","name"],"additionalProperties":{"type":"null"}})",
    R"({"type":"array","items":{"type":"number","minimum":-1.5,"exclusiveMaximum":2},"minItems":1,"maxItems":4})",
    R"({"type":"integer","minimum":-12,"maximum":1000})",
    R"({"type":"integer","exclusiveMinimum":7})",
    R"({"type":"number","exclusiveMinimum":0,"maximum":0.25})",
    R"({"type":"string","pattern":"^[a-c]{2,4}$"})",
    R"({"type":"string","pattern":"b\"\\\\?","maxLength":6})",
    R"({"type":"string","minLength":2,"maxLength":5})",
    R"({"anyOf":[{"type":"null"},{"type":"string","maxLength":2},{"enum":[1,2.5,{"a":[]}]}]})",
    R"({"type":"object","minProperties":2,"maxProperties":3,"properties":{"a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"},"d":{"type":"null"}}})",
    R"({"allOf":[{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]},{"properties":{"a":{"minimum":5,"maximum":9},"b":{"const":true}}}]})",
    R"({"type":["integer","null"],"not":{"type":"null"},"minimum":3,"maximum":4})",
    R"({"type":"array","uniqueItems":true,"minItems":1,"items":{"enum":["a","b","c"]}})",
    R"({"type":"array","uniqueItems":true,"items":{"type":"string"},"minItems":3})",
    R"({"type":"array","uniqueItems":true,"items":{"type":"integer"},"minItems":2})",
    R"({"type":"array","uniqueItems":true,"items":{"type":"number"}})",
    R"({"type":"array","uniqueItems":true,"minItems":8})",
    R"({"type":"array","uniqueItems":true,"items":{"type":"string","format":"date"},"minItems":2,"maxItems":3})",
    R"({"type":"array","uniqueItems":true,"items":{"enum":["b","a",1,null,2.5]},"minItems":4})",
    R"({"type":"array","uniqueItems":true,"items":{"enum":[0,1,2,3,4,5,6,7,8,9]},"minItems":1,"maxItems":2})",
    R"({"type":"array","uniqueItems":true,"items":{"type":"integer","minimum":9223372036854775805,"maximum":9223372036854775807},"minItems":3})",
    R"({"type":"array","uniqueItems":true,"minItems":3,"items":{"type":"object","properties":{"n":{"type":"null"},"id":{"type":"string"}},"required":["n","id"]}})",
    R"({"type":"array","uniqueItems":true,"minItems":2,"contains":{"const":5},"items":{"type":"integer"}})",
    R"({"type":"array","uniqueItems":true,"contains":{"pattern":"\\w"},"items":{"type":"string","pattern":"^[éab]$"}})",
    R"({"type":"array","uniqueItems":true,"contains":{"enum":["a","b"]},"items":{"enum":["a","b",1,2,3]}})",
    R"({"type":"array","uniqueItems":true,"minContains":2,"contains":{"type":"integer"},"items":{"type":"integer"}})",
    R"({"type":"array","uniqueItems":true,"minItems":3,"prefixItems":[{"enum":["a","b","c"]},{"enum":["a","b","c"]},{"enum":["c","a"]}],"items":false})",
    R"({"type":"array","uniqueItems":true,"minItems":2,"prefixItems":[{"type":"null"},{"type":"integer"}],"items":{"type":"boolean"}})",
    R"({"type":"array","uniqueItems":true,"minItems":2,"items":{"type":"array","items":{"enum":[1,2]},"maxItems":2}})",
    R"({"type":"array","uniqueItems":true,"minItems":2,"items":{"type":"object","properties":{"id":{"enum":["a","b","c"]}}}})",
    R"({"type":"array","uniqueItems":true,"minItems":2,"items":{"type":"object","additionalProperties":{"type":"null"},"maxProperties":3}})",
    R"({"type":"array","allOf":[{"contains":{"const":1}},{"contains":{"type":"null"}}],"items":{"type":["integer","null"]},"maxItems":3})",
    R"({"type":"integer","multipleOf":10})",
    R"({"type":"object","properties":{"":{"type":"integer"},"a":{"type":"null"}},"required":[""],"additionalProperties":{"type":"boolean"}})",
    R"({"not":{"anyOf":[{"type":"object"},{"type":"array"},{"type":"number"}]},"maxLength":3})",
    R"({"oneOf":[{"type":"integer","multipleOf":3},{"type":"integer","multipleOf":5}],"minimum":0,"maximum":60})",
    R"({"type":"object","properties":{"k":{"enum":["a","b"]},"x":{"type":"null"},"y":{"type":"null"}},"additionalProperties":false,"required":["k"],"if":{"properties":{"k":{"const":"a"}}},"then":{"required":["x"]},"else":{"required":["y"]}})",
    R"({"type":"string","allOf":[{"pattern":"^[ab]"},{"pattern":"1$"},{"not":{"enum":["a1","b1"]}}],"maxLength":4})",
    R"({"type":"object","additionalProperties":{"type":"null"},"minProperties":2,"not":{"required":["a"]}})",
    R"({"type":"integer","not":{"enum":[0,1]},"minimum":-3,"maximum":3})",
    R"({"type":"integer","minimum":-9223372036854775808,"maximum":18446744073709551615})",
    R"({"type":"array","items":{"enum":[1]},"maxItems":2,"not":{"enum":[[],[1,1,1]]}})",
    R"({"type":["array","null"],"oneOf":[{"type":"array","items":{"enum":[1]},"minItems":2,"maxItems":2},{"not":{"type":"array","uniqueItems":true}}]})",
};

TEST(SchemaGrammar, RepliesObeyAndCloseInTime) {
  for (const char* schema : kSchemas) {
    auto constraint = compiled(schema);
    ASSERT_TRUE(constraint.ok()) << schema << ": " << constraint.error().message;
    const Json parsed = *parse_json(schema);
    Rng rng(7);
    for (int i = 0; i < 60; ++i) {
      const int32_t budget = (*constraint)->shortest() + static_cast<int32_t>(rng.below(80));
      const RandomReply reply = random_reply(*grammar_tokenizer(), **constraint, end_id(), budget, rng);
      ASSERT_TRUE(reply.ended) << schema << ": " << reply.text;
      auto value = parse_json(reply.text);
      ASSERT_TRUE(value.ok() || value.error().message.find(" twice in one object") != std::string::npos)
          << schema << ": " << reply.text;
      if (value.ok()) {
        ASSERT_EQ(obeys(*value, parsed), Obeys::kYes) << schema << ": " << reply.text;
      }
    }
  }
}

// Blocks of optional members are spelt by what their names have in common; each set of members is a text, in order.
TEST(SchemaGrammar, AnyOfManyOptionalMembersInOrder) {
  std::vector<std::string> names{"a", "ab", "abc", "b\\\"", "b\\\\", "\xC3\xA9", "\xC3\xA8", "\xC3\xA8\xC3\xA9"};
  for (int i = 0; names.size() < 53; ++i) names.push_back("name_" + std::to_string(i * 7));
  std::string properties;
  for (const std::string& name : names) properties += (properties.empty() ? "\"" : ",\"") + name + "\":{\"const\":1}";
  const auto made = compiled(R"({"type":"object","properties":{)" + properties + R"(},"required":["name_63"]})");
  ASSERT_TRUE(made.ok()) << made.error().message;
  const auto takes = [&](const std::vector<size_t>& members) {
    std::string text = "{";
    for (const size_t i : members) text += (text.size() > 1 ? ",\"" : "\"") + names[i] + "\":1";
    text += "}";
    const auto state = (*made)->begin();
    for (const char byte : text) {
      const auto id = grammar_tokenizer()->encode(std::string_view(&byte, 1), SpecialsIn::kPlainText);
      if (id.size() != 1 || !state->accept(id[0])) return false;
    }
    return state->accept(end_id());
  };
  constexpr size_t kRequired = 17;
  ASSERT_EQ(names[kRequired], "name_63");
  Rng rng(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<size_t> members;
    for (size_t i = 0; i < names.size(); ++i)
      if (i == kRequired || rng.below(1 + static_cast<uint64_t>(round) % 20) == 0) members.push_back(i);
    EXPECT_TRUE(takes(members));
    std::vector<size_t> wrong = members;
    wrong.insert(wrong.begin() + static_cast<std::ptrdiff_t>(rng.below(wrong.size())), members.back());
    EXPECT_FALSE(takes(wrong)) << "twice, or before another";
    std::erase(members, kRequired);
    EXPECT_FALSE(takes(members)) << "without a required one";
  }
}

TEST(SchemaGrammar, MembersThatAreNeededBesidePatterns) {
  Rng rng(6);
  for (const auto& [pattern, least] : {std::pair{"^x-", 2}, {"^[0-9]$", 3}, {"[ab]z$", 2}}) {
    const auto made = compiled(fmt::format(
        R"({{"type":"object","minProperties":{0},"maxProperties":{0},"patternProperties":{{"{1}":{{"type":"null"}}}},"additionalProperties":false}})",
        least, pattern));
    ASSERT_TRUE(made.ok()) << made.error().message;
    for (int i = 0; i < 20; ++i) {
      const RandomReply reply = random_reply(*grammar_tokenizer(), **made, end_id(), 60, rng);
      ASSERT_TRUE(reply.ended) << reply.text;
      const auto value = parse_json(reply.text, {});
      ASSERT_TRUE(value.ok()) << reply.text;
      std::set<std::string> names;
      for (const auto& [name, member] : value->as_object()) {
        EXPECT_TRUE(*Language::pattern_matches(pattern, Reading::kNarrow, name)) << reply.text;
        EXPECT_TRUE(member.is_null()) << reply.text;
        names.insert(name);
      }
      EXPECT_GE(std::ssize(names), least) << reply.text;
    }
  }
}

TEST(SchemaGrammar, ContainsAsksForOneUnlessItSaysOtherwise) {
  const Json silent = *parse_json(R"({"contains":{"const":1}})");
  for (const auto& [least, both] : {std::pair{0, 1}, {1, 1}, {2, 2}}) {
    const Json says = *parse_json(fmt::format(R"({{"contains":{{"const":1}},"minContains":{}}})", least));
    EXPECT_EQ(*merge_schemas(silent, says)->find("minContains"), Json(both));
    EXPECT_EQ(*merge_schemas(says, silent)->find("minContains"), Json(both));
    EXPECT_EQ(*merge_schemas(says, says)->find("minContains"), Json(least));
  }
}

TEST(SchemaGrammar, RecursionEnds) {
  auto constraint =
      compiled(R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","required":["v","next"],"properties":{)"
               R"("v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]},)"
               R"("all":{"type":"array","items":{"$ref":"#"}}}}}})");
  ASSERT_TRUE(constraint.ok()) << constraint.error().message;
  Rng rng(3);
  for (int i = 0; i < 200; ++i) {
    const int32_t budget = (*constraint)->shortest() + static_cast<int32_t>(rng.below(200));
    const RandomReply reply = random_reply(*grammar_tokenizer(), **constraint, end_id(), budget, rng);
    ASSERT_TRUE(reply.ended);
    ASSERT_TRUE(parse_json(reply.text, {.max_depth = 1000}).ok()) << reply.text;
  }
}

TEST(SchemaGrammar, RefusesByPlace) {
  for (
      const auto& [schema, place] : std::initializer_list<std::pair<const char*, const char*>>{
          {R"({"uniqueItems":true,"prefixItems":[{}],"contains":{}})", "/uniqueItems:"},
          {R"({"uniqueItems":true,"items":{"type":"object","minProperties":9,"additionalProperties":{"type":"integer"}}})",
           "/uniqueItems:"},
          {R"({"uniqueItems":true,"items":{"type":"string"},"contains":{"pattern":"^a"},"minContains":2})",
           "/minContains:"},
          {R"({"allOf":[{"contains":{"const":1},"maxContains":1},{"contains":{"const":2}}]})", "/maxContains:"},
          {R"({"contains":{},"$perigee:contained":5})", "/$perigee:contained:"},
          {R"({"contains":{},"$perigee:contained":[5]})", "/$perigee:contained:"},
          {R"({"type":"array","uniqueItems":true,"items":{"type":"string"},"minItems":9})", "/minItems:"},
          {R"({"uniqueItems":true,"minItems":9,"items":{"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807}})",
           "/minItems:"},
          {R"({"properties":{"a":{"not":{}}},"required":["a"]})", "/:"},
          {R"({"type":"number","multipleOf":0.00000000000007})", "/multipleOf:"},
          {R"({"type":"integer","multipleOf":1009})", "/multipleOf:"},
          {R"({"type":"strin"})", "/type:"},
          {R"({"$ref":"#/$defs/x"})", "/$ref:"},
          {R"({"$ref":"#"})", "/$ref"},
          {R"({"$ref":"http://x/y"})", "/$ref:"},
          {R"({"$id":"https://e.com/a/s","$ref":"https://f.com/a/s"})", "/$ref:"},
          {R"({"items":{"$id":"a","$ref":"#/$defs/b"},"minItems":1,"$defs":{"b":{"const":1}}})", "/items/$id:"},
          {R"-({"type":"string","pattern":"a(?<!b$)"})-", "/pattern:"},
          {R"-({"type":"string","pattern":"(?<=^a)b"})-", "/pattern:"},
          {R"({"oneOf":[{"uniqueItems":true},{"format":"x"}]})", "/oneOf:"},
          {R"({"type":"integer","minimum":3,"maximum":2})", "/:"},
          {R"({"not":{"uniqueItems":true}})", "/not:"},
          {R"({"type":"object","required":["a"],"additionalProperties":false})", "/:"},
          {R"({"type":"array","contains":{"type":"null"},"minContains":2000})", "/minContains:"},
          {R"({"type":"array","prefixItems":[{},{}],"items":false,"contains":{"const":1},"minContains":2})",
           "/minContains:"},
          {R"({"type":"number","minimum":1e20})", "/minimum:"},
          {R"({"minimum":1000000000000000,"maximum":1000000000000010})", "/minimum:"},
          {R"({"exclusiveMaximum":-1e16})", "/exclusiveMaximum:"},
          {R"({"type":"integer","multipleOf":1009,"minimum":0,"maximum":10000000})", "/multipleOf:"},
          {R"([1])", "/:"},
          {R"({"required":"a"})", "/required:"},
          {R"({"allOf":[{"type":"object","properties":{"a":{}},"unevaluatedProperties":false},{"required":["b"],"properties":{"b":{}}}]})",
           "/:"},
          {R"({"type":"object","required":["b"],"properties":{"b":{}},"anyOf":[{"properties":{"a":{}},"unevaluatedProperties":false}]})",
           "/:"},
          {R"({"type":"object","properties":{"a":false},"required":["a"]})", "/:"},
          {R"({"type":"object","properties":{"a":{"enum":[1,2]}},"not":{"const":{"a":1}}})", "/not:"},
          {R"({"type":"array","items":{"enum":[1]},"not":{"enum":[[],[1]]}})", "/not:"},
          {R"({"type":"object","not":{"properties":{"a":{"const":1}},"required":["a"]},"unevaluatedProperties":false})",
           "/not:"},
          {R"({"unevaluatedProperties":false,"allOf":[{"not":{"properties":{"a":{"const":1}},"required":["a"]}}]})",
           "/allOf/0/not:"},
          {R"({"type":"array","not":{"contains":{"const":1}},"unevaluatedItems":false})", "/not:"},
          {R"({"type":"object","oneOf":[{"properties":{"a":{"const":1}},"required":["a"]},{"maxProperties":1}],"unevaluatedProperties":false})",
           "/oneOf:"},
          {R"({"type":"array","items":{},"allOf":[{"contains":{"const":1},"unevaluatedItems":false}]})",
           "/allOf/0/unevaluatedItems:"},
          {R"({"dependencies":5})", "/dependentSchemas:"},
      }) {
    auto made = schema_grammar(schema);
    ASSERT_FALSE(made.ok()) << schema;
    EXPECT_EQ(made.error().code, Code::kBadInput);
    EXPECT_TRUE(made.error().message.starts_with(place)) << schema << ": " << made.error().message;
  }
}

TEST(SchemaGrammar, ManyBranchesBesideLongAnnotations) {
  std::string schema = R"({"title":")" + std::string(150'000, 't') + R"(","anyOf":[{"const":0})";
  for (int i = 1; i < 1000; ++i) schema += fmt::format(R"(,{{"const":{}}})", i);
  const auto made = schema_grammar(schema + "]}");
  EXPECT_TRUE(made.ok()) << made.error().message;
}

TEST(SchemaGrammar, HostileSchemasAreRefusedSoon) {
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += R"({"items":)";
  std::string values = R"({"enum":[0)";
  for (int i = 1; i < 10'000; ++i) values += fmt::format(",{}", i);
  std::string doubling = R"({"$defs":{"a0":{"type":"null"})";
  for (int i = 1; i < 64; ++i) {
    const std::string ref = fmt::format(R"({{"$ref":"#/$defs/a{}"}})", i - 1);
    doubling += fmt::format(R"(,"a{0}":{{"allOf":[{1},{1}],"anyOf":[{1},{1}]}})", i, ref);
  }
  doubling += R"(},"$ref":"#/$defs/a63"})";
  std::string wide = R"({"$ref":"#/$defs/a0","$defs":{"a12":{"type":"null"})";
  for (int i = 0; i < 12; ++i) {
    const std::string ref = fmt::format(R"({{"$ref":"#/$defs/a{}"}})", i + 1);
    wide += fmt::format(R"(,"a{0}":{{"allOf":[{1},{1},{1},{1},{1},{1},{1},{1}]}})", i, ref);
  }
  wide += "}}";
  const std::string growing = R"({"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}],"$defs":{)"
                              R"("a":{"properties":{"x":{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}]}}},)"
                              R"("b":{"properties":{"x":{"allOf":[{"$ref":"#/$defs/b"},{"$ref":"#/$defs/a"}]}}}}})";
  std::string branches = R"({"oneOf":[{"const":0})";
  for (int i = 1; i < 15'000; ++i) branches += fmt::format(R"(,{{"const":{}}})", i);
  std::string twice = "[0";
  for (int i = 1; i < 20'000; ++i) twice += fmt::format(",{}", i);
  const std::string values_twice = R"({"allOf":[{"enum":)" + twice + R"(]},{"enum":)" + twice + R"(,""]}]})";
  const std::string long_name =
      R"({"properties":{")" + std::string(60'000, 'n') + R"(":{}},"additionalProperties":true})";
  std::string titles = R"({"x-title":")" + std::string(150'000, 't') + R"(","anyOf":[{"const":0})";
  for (int i = 1; i < 1000; ++i) titles += fmt::format(R"(,{{"const":{}}})", i);
  for (const std::string& schema :
       {deep, titles + "]}", values + "]}", doubling, wide, growing, branches + "]}", values_twice, long_name,
        std::string(R"-({"type":"string","pattern":"(a{1,1000}){1,1000}"})-"),
        std::string(R"({"type":"string","minLength":1000000})"), std::string(R"({"minItems":1000000})")}) {
    const auto began = std::chrono::steady_clock::now();
    auto made = compiled(schema);
    EXPECT_FALSE(made.ok()) << schema.substr(0, 80);
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10)) << schema.substr(0, 80);
  }
}

// Both answers of an `if`, and integers that doubles do not tell apart.
TEST(SchemaGrammar, ValuesObey) {
  struct Case {
    const char *schema, *yes, *no;
  };
  for (const Case& each :
       {Case{R"({"if":{"type":"integer"},"then":{"minimum":3},"else":{"minLength":2}})", "3", "2"},
        {R"({"if":{"type":"integer"},"then":{"minimum":3},"else":{"minLength":2}})", "\"ab\"", "\"a\""},
        {R"({"if":{"type":"integer"},"else":false})", "1", "null"},
        {R"({"minimum":9007199254740993})", "9007199254740993", "9007199254740992"},
        {R"({"exclusiveMaximum":9007199254740993})", "9007199254740992", "9007199254740993"},
        {R"({"maximum":9007199254740992.0})", "9007199254740992", "9007199254740993"},
        {R"({"const":9007199254740993})", "9007199254740993", "9007199254740992.0"},
        {R"({"maximum":18446744073709551615})", "9223372036854775807", "1e20"},
        {R"({"const":5.0})", "5", "5.5"},
        {R"({"pattern":"^((((a*)*)*)*)*b$"})", "\"aab\"", "\"aaa\""}}) {
    EXPECT_EQ(obeys(*parse_json(each.yes), *parse_json(each.schema)), Obeys::kYes) << each.schema << each.yes;
    EXPECT_EQ(obeys(*parse_json(each.no), *parse_json(each.schema)), Obeys::kNo) << each.schema << each.no;
  }
}

TEST(SchemaGrammar, ThereIsABoundToWhatIsLookedAt) {
  std::string condition = "true", ref = R"({"$ref":"#/$defs/a"})", refs = ref;
  for (int i = 0; i < 26; ++i) condition = fmt::format(R"({{"if":{},"then":true,"else":true}})", condition);
  for (int i = 1; i < 120; ++i) refs += "," + ref;
  for (const std::string& schema :
       {fmt::format(R"({{"not":{},"$defs":{{"a":{{"allOf":[{}]}}}}}})", ref, refs),
        fmt::format(R"({{"not":{},"$defs":{{"a":{{"type":"null","anyOf":[{}]}}}}}})", ref, refs),
        fmt::format(R"({{"enum":[1],"if":{},"then":true,"else":true}})", condition),
        std::string(R"-({"type":"string","pattern":"^((){100000}){100000}$"})-")}) {
    const auto began = std::chrono::steady_clock::now();
    (void)schema_grammar(schema);
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(500)) << schema.substr(0, 80);
  }
}

// A parser whose memory is rules times states bytes takes 10 MB here, for each reply.
TEST(SchemaGrammar, AStateOfManyRulesTakesLittleMemory) {
  std::string members;
  for (int i = 0; i < 400; ++i) members += fmt::format(R"({}"property_{}":{{"type":"string"}})", i > 0 ? "," : "", i);
  const auto made = compiled(R"({"type":"object","properties":{)" + members + "}}");
  ASSERT_TRUE(made.ok()) << made.error().message;
  const auto used = [] {
    const auto info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  const size_t before = used();
  const auto state = (*made)->begin();
  ASSERT_TRUE(state->accept('{'));
  EXPECT_LT(used() - before, 512u << 10) << used() - before;
}

// Whether a reply may begin with a text, byte by byte.
bool takes(const std::string& schema, const std::string& text) {
  auto made = compiled(schema);
  CHECK(made.ok(), made.error().message);
  const TokenTable table(grammar_tokenizer(), {end_id()});
  const auto state = (*made)->begin();
  return std::all_of(text.begin(), text.end(), [&](char c) { return state->accept(*table.find(std::string(1, c))); });
}

TEST(SchemaGrammar, ItemsOfSetsHaveOneTextAndTheirFormat) {
  const std::string numbers = R"({"type":"array","uniqueItems":true,"items":{"type":"number"}})";
  EXPECT_TRUE(takes(numbers, "[1.5,7]"));
  EXPECT_FALSE(takes(numbers, "[1.5,1.50,"));
  EXPECT_FALSE(takes(numbers, "[7,7.0,"));
  const std::string times = R"({"type":"array","uniqueItems":true,"items":{"type":"string","format":"time"}})";
  EXPECT_TRUE(takes(times, R"(["12:00:00Z")"));
  EXPECT_FALSE(takes(times, R"(["p)"));
}

// Validators take what is not false for true.
TEST(SchemaGrammar, ItemsAreUniqueUnlessThatIsFalse) {
  const auto grammar = [](const std::string& unique) {
    auto made = schema_grammar(R"({"type":"array","items":{"enum":["a","b"]},"uniqueItems":)" + unique + "}");
    return made.ok() ? *made : made.error().message;
  };
  EXPECT_EQ(grammar("\"yes\""), grammar("true"));
  EXPECT_NE(grammar("false"), grammar("true"));
  EXPECT_EQ(obeys(*parse_json("[1,1]", {}), *parse_json(R"({"uniqueItems":"yes"})", {})), Obeys::kNo);
}

// Regular expressions with assertions go another way to a grammar than those without.
TEST(GrammarCompiler, RegexesWithAssertions) {
  Rng rng(4);
  for (const char* pattern : {"[a-z]{2,5}", "(?i)yes|no", "(?=.*[0-9])[a-z0-9]{2,6}", "[ab ]{0,3}\\bcat\\b[ab ]{0,3}",
                              "(?:a|-(?=[ab]))+b", "(?i)(?!no)[a-z]{2,3}"}) {
    for (const bool in_tag : {false, true}) {
      GrammarSpec spec;
      spec.kind = in_tag ? GrammarSpec::Kind::kStructuralTag : GrammarSpec::Kind::kRegex;
      const std::string quoted = dump_json(Json(std::string(pattern)));
      spec.text = in_tag ? R"({"type":"structural_tag","format":{"type":"regex","pattern":)" + quoted + "}}" : pattern;
      const auto constraint = compiler().compile_now(spec);
      ASSERT_TRUE(constraint.ok()) << pattern << ": " << constraint.error().message;
      std::set<std::string> replies;
      for (int i = 0; i < 20; ++i) {
        const RandomReply reply = random_reply(*grammar_tokenizer(), **constraint, end_id(), 40, rng);
        ASSERT_TRUE(reply.ended) << reply.text;
        const size_t flags = flags_length(pattern);
        const std::string whole = fmt::format("{}^(?:{})$", std::string(pattern, flags), pattern + flags);
        EXPECT_TRUE(*Language::pattern_matches(whole, Reading::kNarrow, reply.text)) << pattern << ": " << reply.text;
        replies.insert(reply.text);
      }
      EXPECT_GE(replies.size(), 3u) << pattern;
      if (flags_length(pattern) == 0) continue;
      std::string all;
      for (const std::string& reply : replies) all += reply;
      EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](char c) { return c >= 'A' && c <= 'Z'; })) << pattern;
    }
  }
  for (const char* pattern : {"(?<=^a)b", "a(?=b)", "(?<=a)b", "(a)\\1"}) {
    GrammarSpec spec;
    spec.kind = GrammarSpec::Kind::kRegex;
    spec.text = pattern;
    EXPECT_FALSE(compiler().compile_now(spec).ok()) << pattern;
  }
}

TEST(GrammarCompiler, SchemasAndRegexesInStructuralTagsAreOurs) {
  const auto made = [](const std::string& content) {
    GrammarSpec spec;
    spec.kind = GrammarSpec::Kind::kStructuralTag;
    spec.text = fmt::format(
        R"({{"type":"structural_tag","format":{{"type":"tag","begin":"<t>","content":{},"end":"</t>"}}}})", content);
    return compiler().compile_now(spec);
  };
  const std::string schema = R"({"type":"array","items":{"enum":["a","b"]},"uniqueItems":true,"minItems":2})";
  auto constraint = made(R"({"type":"json_schema","json_schema":)" + schema + "}");
  ASSERT_TRUE(constraint.ok()) << constraint.error().message;
  Rng rng(3);
  for (int i = 0; i < 20; ++i) {
    const RandomReply reply = random_reply(*grammar_tokenizer(), **constraint, end_id(), 40, rng);
    ASSERT_TRUE(reply.ended) << reply.text;
    ASSERT_TRUE(reply.text.starts_with("<t>") && reply.text.ends_with("</t>")) << reply.text;
    auto value = parse_json(reply.text.substr(3, reply.text.size() - 7), {});
    ASSERT_TRUE(value.ok()) << reply.text;
    EXPECT_EQ(obeys(*value, *parse_json(schema, {})), Obeys::kYes) << reply.text;
  }
  for (const auto& [content, place] : std::initializer_list<std::pair<const char*, const char*>>{
           {R"({"type":"json_schema","json_schema":{"type":"string","pattern":"(?<=^a)b"}})",
            "/format/content/json_schema/pattern: "},
           {R"({"type":"json_schema","json_schema":true,"style":"glm_xml"})", "/format/content/style: "},
           {R"({"type":"regex","pattern":"(a)\\1"})", "/format/content/pattern: "},
           {R"({"type":"any_text","max_chars":3})", "/format/content/max_chars: "},
           {R"({"type":"grammar","grammar":"root ::= x\nx[max_chars=3] ::= [a-z]+"})",
            "/format/content/grammar: rule x "}}) {
    constraint = made(content);
    ASSERT_FALSE(constraint.ok()) << content;
    EXPECT_TRUE(constraint.error().message.starts_with(place)) << constraint.error().message;
  }
}

TEST(GrammarCompiler, TakesTheOlderSpellingOfStructuralTags) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kStructuralTag;
  spec.text =
      R"({"type":"structural_tag","triggers":["<f"],"structures":[{"begin":"<f>","schema":{"const":1},"end":"</f>"}]})";
  auto made = compiler().compile_now(spec);
  EXPECT_TRUE(made.ok()) << made.error().message;
  spec.text = R"({"type":"structural_tag","format":{"type":"sequence"}})";
  made = compiler().compile_now(spec);
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.error().message.find("elements"), std::string::npos) << made.error().message;  // xgrammar's reason
}

TEST(GrammarCompiler, RefusesAttributesOfRules) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kEbnf;
  spec.text = "root ::= x \"[\" [a-z] \"]\"\nx ::= [a-z]+";
  EXPECT_TRUE(compiler().compile_now(spec).ok());
  for (const char* attribute : {"max_tokens=2", "max_chars=3", "capture=\"]\"", "lazy", "temperature=0.7"}) {
    spec.text = fmt::format("root ::= x\nx[{}] ::= [a-z]+", attribute);
    const auto made = compiler().compile_now(spec);
    ASSERT_FALSE(made.ok()) << attribute;
    EXPECT_TRUE(made.error().message.starts_with("rule x has attributes")) << made.error().message;
  }
}

TEST(GrammarCompiler, ErrorsOfAGrammarAreOfTheTextThatCame) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kEbnf;
  for (const char* ebnf : {"root ::= (", "root ::= \"a\" |", "root ::= x", "start ::= \"a\"", ""}) {
    spec.text = ebnf;
    const auto made = compiler().compile_now(spec);
    ASSERT_FALSE(made.ok()) << ebnf;
    const std::string& why = made.error().message;
    EXPECT_EQ(why.find("perigee"), std::string::npos) << why;
    EXPECT_EQ(why.find("line 2"), std::string::npos) << why;
    EXPECT_EQ(why.find('\n'), std::string::npos) << why;
  }
}

TEST(GrammarCompiler, RefusesManyNestedGroupsOfRegexes) {
  const std::string groups = std::string(50'000, '(') + "a" + std::string(50'000, ')');
  GrammarSpec ebnf;
  ebnf.kind = GrammarSpec::Kind::kEbnf;
  ebnf.text = "root ::= Regex(\"" + groups + "\")";
  GrammarSpec tag;
  tag.kind = GrammarSpec::Kind::kStructuralTag;
  tag.text = R"-({"type":"structural_tag","format":{"type":"grammar","grammar":"root ::= R\u0065gex(\")-" + groups +
             R"-(\")"}})-";
  for (const GrammarSpec& spec : {ebnf, tag}) {
    auto made = compiler().compile_now(spec);
    ASSERT_FALSE(made.ok());
    EXPECT_NE(made.error().message.find("32768"), std::string::npos) << made.error().message;
  }
}

// Their regular expressions are Pattern's, which counts groups itself.
TEST(GrammarCompiler, TakesLongStructuralTagsWithPatterns) {
  std::string tags;
  for (int i = 0; i < 400; ++i)
    tags += fmt::format(R"-({}{{"type":"tag","begin":"<f{}>","content":{{"type":"json_schema","json_schema":)-"
                        R"-({{"type":"string","pattern":"^[ab]$"}}}},"end":"</f>"}})-",
                        i == 0 ? "" : ",", i);
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kStructuralTag;
  spec.text = R"-({"type":"structural_tag","format":{"type":"or","elements":[)-" + tags + "]}}";
  ASSERT_GT(spec.text.size(), 32u << 10);
  const auto made = compiler().compile_now(spec);
  EXPECT_TRUE(made.ok()) << made.error().message;
  spec.text = R"-({"type":"structural_tag","format":{"type":"json_schema","json_schema":{"pattern":")-" +
              std::string(50'000, '(') + "a" + std::string(50'000, ')') + R"-("}}})-";
  EXPECT_FALSE(compiler().compile_now(spec).ok());
}

}  // namespace
}  // namespace perigee
