#include "grammar/reply_grammar.h"

#include <gtest/gtest.h>

#include <future>

#include "base/json.h"
#include "grammar/grammar_compiler.h"
#include "grammar/schema_fixture.h"
#include "text/output_parser.h"

namespace perigee {
namespace {

using Calls = GrammarSpec::Calls;

int32_t special(const char* text) {
  return *grammar_tokenizer()->special_id(text);
}
int32_t end_id() {
  return special("<|im_end|>");
}

GrammarCompiler& compiler() {
  static GrammarCompiler made(grammar_tokenizer(), {end_id()});
  return made;
}

GrammarSpec calls_of(Calls calls, bool after_reasoning = false) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kToolCalls;
  spec.calls = calls;
  spec.after_reasoning = after_reasoning;
  spec.tools = {{"get_name", R"({"type":"object","properties":{"name":{"type":"string"}},"required":["name"]})"},
                {"get_names", R"({"type":"object","properties":{"n":{"type":"integer","minimum":1}}})"},
                {"f", ""}};
  return spec;
}

std::shared_ptr<const Constraint> compiled(const GrammarSpec& spec) {
  auto made = compiler().compile_now(spec);
  CHECK(made.ok(), made.error().message);
  return *made;
}

ParsedOutput parsed(const RandomReply& reply, bool in_reasoning) {
  OutputParser parser(*grammar_tokenizer(),
                      {.thinking = true, .starts_in_reasoning = in_reasoning, .parse_tools = true});
  std::vector<OutputEvent> events;
  for (const int32_t id : reply.ids) parser.push(id, events);
  parser.finish(events);
  return collect(events);
}

void expect_declared(const ParsedOutput& output, const std::string& text) {
  for (const ParsedOutput::Call& call : output.calls) {
    auto value = parse_json(call.arguments, {.max_depth = 1000});
    const bool repeated = !value.ok() && value.error().message.find(" twice in one object") != std::string::npos;
    EXPECT_TRUE(value.ok() || repeated) << call.arguments << " in " << text;
    EXPECT_TRUE(call.name == "get_name" || call.name == "get_names" || call.name == "f") << call.name;
    if (value.ok() && call.name == "get_name") {
      EXPECT_TRUE(value->find("name") != nullptr && value->find("name")->is_string());
    }
  }
}

TEST(ReplyGrammar, RequiredCallsAreMadeInTime) {
  for (const Calls calls : {Calls::kRequired, Calls::kExactlyOne}) {
    for (const bool reasoning : {false, true}) {
      const auto constraint = compiled(calls_of(calls, reasoning));
      Rng rng(5);
      for (int i = 0; i < 200; ++i) {
        const int32_t budget = constraint->shortest() + static_cast<int32_t>(rng.below(120));
        const RandomReply reply = random_reply(*grammar_tokenizer(), *constraint, end_id(), budget, rng);
        ASSERT_TRUE(reply.ended) << reply.text;
        const ParsedOutput output = parsed(reply, reasoning);
        ASSERT_GE(output.calls.size(), 1u) << reply.text;
        if (calls == Calls::kExactlyOne) {
          ASSERT_EQ(output.calls.size(), 1u);
        }
        ASSERT_FALSE(output.content.has_value()) << *output.content;
        expect_declared(output, reply.text);
      }
    }
  }
}

// The contract of Constraint::kSpareIds: with so many ids over the shortest reply, nothing else is left.
TEST(ReplyGrammar, WithEightIdsToSpareRepliesAreTheShortest) {
  GrammarSpec text;
  text.kind = GrammarSpec::Kind::kJsonSchema;
  text.text = R"({"type":"object","properties":{"name":{"type":"string"}},"required":["name"]})";
  for (const GrammarSpec& spec : {text, calls_of(Calls::kRequired), calls_of(Calls::kExactlyOne)}) {
    const auto constraint = compiled(spec);
    Rng rng(9);
    for (int32_t spare = 0; spare <= Constraint::kSpareIds; ++spare) {
      const int32_t budget = constraint->shortest() + spare;
      for (int i = 0; i < 20; ++i) {
        const RandomReply reply = random_reply(*grammar_tokenizer(), *constraint, end_id(), budget, rng);
        ASSERT_TRUE(reply.ended) << reply.text;
        ASSERT_EQ(static_cast<int32_t>(reply.ids.size()) + 1, constraint->shortest()) << reply.text;
      }
    }
  }
}

TEST(ReplyGrammar, AutoConstrainsCallsThatBegin) {
  for (const Calls calls : {Calls::kAuto, Calls::kAutoOne}) {
    const auto constraint = compiled(calls_of(calls));
    EXPECT_EQ(constraint->shortest(), 1);
    Rng rng(6);
    size_t with_calls = 0;
    for (int i = 0; i < 100; ++i) {
      const auto state = constraint->begin();
      RandomReply reply;
      const int32_t budget = 10 + static_cast<int32_t>(rng.below(150));
      const int64_t words = (grammar_tokenizer()->vocab_size() + 31) / 32;
      std::vector<uint32_t> mask(static_cast<size_t>(words));
      bool ended = false;
      while (!ended && static_cast<int32_t>(reply.ids.size()) < budget) {
        state->masks({}, budget - static_cast<int32_t>(reply.ids.size()), words, mask.data());
        std::vector<int32_t> ids;
        for (int32_t id = 0; id < words * 32; ++id)
          if (has_bit(mask.data(), id)) ids.push_back(id);
        ASSERT_FALSE(ids.empty());
        int32_t id = ids[rng.below(ids.size())];
        if (has_bit(mask.data(), special("<|tool_calls_section_begin|>")) && rng.below(5) == 0)
          id = special("<|tool_calls_section_begin|>");
        ASSERT_TRUE(state->accept(id));
        ended = id == end_id();
        if (!ended) reply.ids.push_back(id);
      }
      const ParsedOutput output = parsed(reply, false);
      with_calls += output.calls.empty() ? 0 : 1;
      if (!output.calls.empty()) {
        EXPECT_TRUE(ended);
      }
      expect_declared(output, reply.text);
      if (calls == Calls::kAutoOne) {
        EXPECT_LE(output.calls.size(), 1u);
      }
    }
    EXPECT_GT(with_calls, 20u);
  }
}

TEST(ReplyGrammar, MasksAlongDraftsAreThoseOfEachPlace) {
  GrammarSpec spec = calls_of(Calls::kRequired, true);
  const auto constraint = compiled(spec);
  const int64_t words = (grammar_tokenizer()->vocab_size() + 31) / 32;
  Rng rng(8);
  for (int i = 0; i < 30; ++i) {
    const RandomReply reply = random_reply(*grammar_tokenizer(), *constraint, end_id(), 90, rng);
    const auto state = constraint->begin(), ahead = constraint->begin();
    for (size_t at = 0; at + 4 < reply.ids.size(); ++at) {
      std::vector<int32_t> drafts(reply.ids.begin() + static_cast<int64_t>(at),
                                  reply.ids.begin() + static_cast<int64_t>(at) + 4);
      if (rng.below(3) == 0) drafts[rng.below(4)] = special("[PAD]");
      std::vector<uint32_t> masks(5 * static_cast<size_t>(words)), one(static_cast<size_t>(words));
      const int32_t left = 90 - static_cast<int32_t>(at);
      state->masks(drafts, left, words, masks.data());
      const auto walker = constraint->begin();
      for (size_t j = 0; j < at; ++j) ASSERT_TRUE(walker->accept(reply.ids[j]));
      for (size_t place = 0; place < 5; ++place) {
        walker->masks({}, left - static_cast<int32_t>(place), words, one.data());
        const std::vector<uint32_t> got(masks.begin() + static_cast<int64_t>(place) * words,
                                        masks.begin() + static_cast<int64_t>(place + 1) * words);
        ASSERT_EQ(got, one) << at << " " << place;
        if (place == 4 || !walker->accept(drafts[place])) break;
      }
      ASSERT_TRUE(state->accept(reply.ids[at]));
    }
  }
}

TEST(ReplyGrammar, NeedsTheMarkers) {
  auto plain = Tokenizer::create(tiktoken_file(), {{256, "[BOS]", true}, {257, "[EOS]", true}});
  ASSERT_TRUE(plain.ok());
  GrammarCompiler without(*plain, {257});
  EXPECT_FALSE(without.compile_now(calls_of(Calls::kRequired)).ok());
  GrammarSpec json;
  json.after_reasoning = true;
  EXPECT_FALSE(without.compile_now(json).ok());
}

TEST(GrammarCompiler, NamesTheToolAtFault) {
  GrammarSpec spec = calls_of(Calls::kRequired);
  spec.tools[1].parameters =
      R"({"type":"object","properties":{"x":{"uniqueItems":true,"contains":{},"prefixItems":[{}]}}})";
  auto made = compiler().compile_now(spec);
  ASSERT_FALSE(made.ok());
  EXPECT_TRUE(made.error().message.starts_with("tools[1]/parameters/properties/x/uniqueItems:"))
      << made.error().message;
}

// Once begun, such a part could not be closed.
TEST(GrammarCompiler, OptionalPartsWithoutAnEndAreRefusedOrLeftOut) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kEbnf;
  spec.text = "root ::= \"a\" | \"b\" x\nx ::= \"c\" x";
  const auto made = compiler().compile_now(spec);
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.error().message.find("without an end"), std::string::npos) << made.error().message;
  spec.kind = GrammarSpec::Kind::kJsonSchema;
  spec.text = R"({"type":"object","properties":{"a":{"$ref":"#/$defs/b"}},
      "$defs":{"b":{"type":"object","required":["c"],"properties":{"c":{"$ref":"#/$defs/b"}}}}})";
  const auto constraint = compiled(spec);
  Rng rng(4);
  EXPECT_EQ(random_reply(*grammar_tokenizer(), *constraint, end_id(), 100, rng).text, "{}");
  spec.text =
      R"({"type":"object","properties":{"a":{"const":1}},"required":["a"],"additionalProperties":{"$ref":"#/$defs/b"},
      "$defs":{"b":{"type":"object","required":["c"],"properties":{"c":{"$ref":"#/$defs/b"}}}}})";
  const auto open = compiled(spec);
  ASSERT_NE(open, nullptr) << "what may be there no times does not have to end";
  EXPECT_TRUE(random_reply(*grammar_tokenizer(), *open, end_id(), 100, rng).text.starts_with("{\"a\":"));
}

TEST(GrammarCompiler, EqualSchemasOfToolsAreCompiledOnce) {
  GrammarCompiler own(grammar_tokenizer(), {end_id()}, {.tools_time = std::chrono::seconds(0)});
  GrammarSpec spec = calls_of(Calls::kRequired);
  for (GrammarSpec::Tool& tool : spec.tools) tool.parameters = spec.tools[0].parameters;
  EXPECT_TRUE(own.compile_now(spec).ok());
  spec.tools[1].parameters = R"({"type":"object","required":["x"]})";
  auto made = own.compile_now(spec);
  ASSERT_FALSE(made.ok());
  EXPECT_TRUE(made.error().message.starts_with("tools: their schemas take over 0 s")) << made.error().message;
}

TEST(GrammarCompiler, ManyWhoWantTheSameShareIt) {
  GrammarCompiler own(grammar_tokenizer(), {end_id()});
  GrammarSpec spec;
  std::vector<std::promise<std::shared_ptr<const Constraint>>> promises(8);
  for (auto& promise : promises) own.compile(spec, [&](auto made) { promise.set_value(made.ok() ? *made : nullptr); });
  const auto first = promises[0].get_future().get();
  ASSERT_NE(first, nullptr);
  for (size_t i = 1; i < promises.size(); ++i) EXPECT_EQ(promises[i].get_future().get(), first);
  EXPECT_GT(own.cached_bytes(), 0u);
}

TEST(GrammarCompiler, TheCacheHasABound) {
  GrammarCompiler own(grammar_tokenizer(), {end_id()}, {.cache_bytes = 1 << 20});
  for (int i = 0; i < 100; ++i) {
    GrammarSpec spec;
    spec.kind = GrammarSpec::Kind::kChoice;
    spec.choices = {"a" + std::to_string(i)};
    std::promise<bool> done;
    own.compile(spec, [&](auto made) { done.set_value(made.ok()); });
    ASSERT_TRUE(done.get_future().get());
    ASSERT_LE(own.cached_bytes(), size_t{1} << 20);
  }
}

}  // namespace
}  // namespace perigee
