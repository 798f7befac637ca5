#include "text/output_parser.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "base/rng.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

using Kind = OutputEvent::Kind;
using Events = std::vector<OutputEvent>;

constexpr OutputParserOptions kThinkingTools = {.thinking = true, .starts_in_reasoning = true, .parse_tools = true};
constexpr OutputParserOptions kTools = {.parse_tools = true};
constexpr OutputParserOptions kThinking = {.thinking = true, .starts_in_reasoning = true};

const Tokenizer& tokenizer() {
  static const auto kTokenizer = test_tokenizer({"func", "tion", "\"}", "\n\n", "  ", "\xE4\xBD", "\xA0\xE5"});
  return *kTokenizer;
}

// Markers written as in a template; everything between them is split into small tokens.
Events parse(std::string_view reply, OutputParserOptions options) {
  OutputParser parser(tokenizer(), options);
  Events out;
  for (const int32_t id : tokenizer().encode(reply, SpecialsIn::kRecognised)) parser.push(id, out);
  parser.finish(out);
  return out;
}

ParsedOutput parse_whole(std::string_view reply, OutputParserOptions options) {
  return collect(parse(reply, options));
}

// One line: R[reasoning] C[content] id|name|arguments; absent parts are left out.
std::string shown(const ParsedOutput& output) {
  std::string out;
  if (output.reasoning) out += "R[" + *output.reasoning + "]";
  if (output.content) out += "C[" + *output.content + "]";
  for (const auto& call : output.calls) out += "{" + call.id + "|" + call.name + "|" + call.arguments + "}";
  return out;
}

const std::string kBegin = "<|tool_calls_section_begin|>";
const std::string kEnd = "<|tool_calls_section_end|>";

std::string call(const std::string& header, const std::string& arguments) {
  return "<|tool_call_begin|>" + header + "<|tool_call_argument_begin|>" + arguments + "<|tool_call_end|>";
}

struct Case {
  const char* what;
  std::string reply;
  OutputParserOptions options;
  std::string want;
};

void check(const std::vector<Case>& cases) {
  for (const Case& c : cases) EXPECT_EQ(shown(parse_whole(c.reply, c.options)), c.want) << c.what;
}

TEST(OutputParser, Reasoning) {
  check({
      {"ends at the marker", "why</think>because", kThinkingTools, "R[why]C[because]"},
      {"an opening marker is swallowed", "<think>why</think>because", kThinkingTools, "R[why]C[because]"},
      {"the model opens its thinking itself", "\n<think>why</think>because", {.thinking = true}, "R[why]C[because]"},
      {"never ends", "why and why", kThinkingTools, "R[why and why]"},
      {"trailing white space goes", "why \n\xE3\x80\x80\n</think>because", kThinkingTools, "R[why]C[because]"},
      {"inner and leading white space stays", "\n\nwhy  so\n \nlong\n", kThinkingTools, "R[\n\nwhy  so\n \nlong]"},
      {"only white space is none", " \n</think>because", kThinkingTools, "C[because]"},
      {"a second end is swallowed", "a</think>b</think>c", kThinkingTools, "R[a]C[bc]"},
      {"thinking off: markers are text", "a</think>b<think>", kTools, "C[a</think>b<think>]"},
      {"without tools", "a</think>\n\nb", kThinking, "R[a]C[\n\nb]"},
      {"a section ends it", "why " + kBegin + call("functions.f:0", "{}"), kThinkingTools,
       "R[why]{functions.f:0|f|{}}"},
      {"nothing at all", "", kThinkingTools, ""},
  });
}

TEST(OutputParser, ToolCalls) {
  const std::string f = call("functions.get_weather:0", "{\"city\": \"Bei\"}");
  const std::string f_shown = "{functions.get_weather:0|get_weather|{\"city\": \"Bei\"}}";
  check({
      {"one", kBegin + f + kEnd + "<|im_end|>", kTools, f_shown},
      {"two", kBegin + f + call("functions.a:1", "{}") + kEnd, kTools, f_shown + "{functions.a:1|a|{}}"},
      {"content before stays as it is", "Let me see. \n" + kBegin + f + kEnd, kTools, "C[Let me see. \n]" + f_shown},
      {"white space before is dropped", " \n\n" + kBegin + f + kEnd, kTools, f_shown},
      {"reasoning, white space, call", "r</think>\n\n" + kBegin + f, kThinkingTools, "R[r]" + f_shown},
      {"trailing space in the header", kBegin + call(" functions.a:0 \n", "{}"), kTools, "{functions.a:0|a|{}}"},
      {"no prefix", kBegin + call("get_weather:0", "{}"), kTools, "{get_weather:0|get_weather|{}}"},
      {"a dotted name keeps its dots", kBegin + call("functions.a.b:12", "{}"), kTools, "{functions.a.b:12|a.b|{}}"},
      {"two colons", kBegin + call("functions.a:b:1", "{}"), kTools, "{functions.a:b:1|a|{}}"},
      {"not JSON", kBegin + call("functions.a:0", "{oops"), kTools, "{functions.a:0|a|{oops}"},
      {"bad headers are skipped",
       kBegin + call("functions.invalid.0", "{}") + call("7", "{}") + call("functions.:0", "{}") + call("a:", "{}") +
           call(":1", "{}") + call("a:1x", "{}") + call("functions.ok:1", "{}"),
       kTools, "{functions.ok:1|ok|{}}"},
      {"preamble and between never leak", kBegin + "pre" + f + "mid" + call("functions.b:1", "{}") + "post" + kEnd,
       kTools, f_shown + "{functions.b:1|b|{}}"},
      {"empty section", kBegin + kEnd, kTools, ""},
      {"text after the section is dropped", "a" + kBegin + f + kEnd + "tail", kTools, "C[a]" + f_shown},
      {"a second section still counts", kBegin + f + kEnd + "x" + kBegin + call("functions.b:1", "{}") + kEnd, kTools,
       f_shown + "{functions.b:1|b|{}}"},
      {"truncated in the arguments",
       kBegin + "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{\"city\": \"Bei", kTools,
       "{functions.a:0|a|{\"city\": \"Bei}"},
      {"truncated in the header", kBegin + "<|tool_call_begin|>functions.a:0", kTools, ""},
      {"no call end before the section end",
       kBegin + "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}" + kEnd + "x", kTools,
       "{functions.a:0|a|{}}"},
      {"HTML in a string", kBegin + call("functions.a:0", "{\"h\": \"<b>x</b> <|im\"}"), kTools,
       "{functions.a:0|a|{\"h\": \"<b>x</b> <|im\"}}"},
      {"arguments are trimmed", kBegin + call("functions.a:0", " \n{ \"x\": 1 }\n "), kTools,
       "{functions.a:0|a|{ \"x\": 1 }}"},
      {"no arguments", kBegin + call("functions.a:0", "  \n"), kTools, "{functions.a:0|a|{}}"},
      {"a think marker in arguments is text", kBegin + call("functions.a:0", "\"<think>\""), kThinkingTools,
       "{functions.a:0|a|\"<think>\"}"},
      {"suppressed", "a" + kBegin + f + kEnd + "b", {.parse_tools = true, .suppress_tools = true}, "C[a]"},
      {"tools off: markers are text", kBegin + "x", {}, "C[" + kBegin + "x]"},
  });
}

// Markers where vLLM's table has no rule.
TEST(OutputParser, OneCallEndsTheReply) {
  OutputParserOptions one = kTools;
  one.one_call = true;
  const std::string first = call("functions.f:0", "{\"a\":1}"), second = call("functions.g:1", "{}");
  check(
      {{"two calls", "x" + kBegin + first + second + kEnd + "y", one, "C[x]{functions.f:0|f|{\"a\":1}}"},
       {"no end marker", kBegin + "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}" + second, one,
        "{functions.f:0|f|{}}"},
       {"a dropped header is not a call", kBegin + call("nonsense", "{}") + second + kEnd, one, "{functions.g:1|g|{}}"},
       {"no call", "xyz", one, "C[xyz]"}});
  OutputParser parser(tokenizer(), one);
  Events events;
  for (const int32_t id : tokenizer().encode(kBegin + first, SpecialsIn::kRecognised)) {
    EXPECT_FALSE(parser.done());
    parser.push(id, events);
  }
  EXPECT_TRUE(parser.done()) << "with the end marker, not later";
}

TEST(OutputParser, MarkersOutOfPlace) {
  check({
      {"a call without a section", std::string("a") + call("functions.f:0", "{}"), kTools, "C[a]{functions.f:0|f|{}}"},
      {"a call in reasoning", std::string("a") + call("functions.f:0", "{}"), kThinkingTools,
       "R[a]{functions.f:0|f|{}}"},
      {"strays in content", "a<|tool_call_end|>b<|tool_call_argument_begin|>c" + kEnd + "d", kTools, "C[abcd]"},
      {"strays in reasoning", "a<|tool_call_end|>b" + kEnd + "c", kThinkingTools, "R[abc]"},
      {"a call begins in arguments",
       kBegin + "<|tool_call_begin|>a:0<|tool_call_argument_begin|>{1" + call("b:1", "{2}"), kTools,
       "{a:0|a|{1}{b:1|b|{2}}"},
      {"a call begins in a header", kBegin + "<|tool_call_begin|>junk" + call("b:1", "{2}"), kTools, "{b:1|b|{2}}"},
      {"a header ends without arguments", kBegin + "<|tool_call_begin|>a:0<|tool_call_end|>" + call("b:1", "{2}"),
       kTools, "{b:1|b|{2}}"},
      {"strays in arguments", kBegin + call("a:0", "{<|tool_call_argument_begin|>" + kBegin + "}"), kTools,
       "{a:0|a|{}}"},
      {"thinking again", "a</think>b<think>c</think>d", kThinking, "R[ac]C[bd]"},
      {"think markers in the section", kBegin + "</think>" + call("a:<think>0", "{}"), kThinkingTools, "{a:0|a|{}}"},
  });
}

TEST(OutputParser, OtherSpecialTokens) {
  check({
      {"dropped by default", "a<|im_end|>b<|reserved_token_268|>c", kThinkingTools, "R[abc]"},
      {"text on demand", "a<|im_end|>b", {.skip_special_tokens = false}, "C[a<|im_end|>b]"},
  });
  OutputParser parser(tokenizer(), kTools);
  Events out;
  for (const int32_t id : tokenizer().encode(kBegin, SpecialsIn::kPlainText)) parser.push(id, out);
  parser.push(-1, out);
  parser.push(1 << 30, out);
  parser.finish(out);
  EXPECT_EQ(shown(collect(out)), "C[" + kBegin + "]");  // spelt with ordinary tokens it is not a marker
}

TEST(OutputParser, VocabularyWithoutMarkers) {
  const auto plain = Tokenizer::create(tiktoken_file(), {});
  ASSERT_TRUE(plain.ok());
  OutputParser parser(**plain, kThinkingTools);
  Events out;
  for (const int32_t id : (*plain)->encode("a</think>b" + kBegin, SpecialsIn::kRecognised)) parser.push(id, out);
  parser.finish(out);
  EXPECT_EQ(shown(collect(out)), "R[a</think>b" + kBegin + "]");
  EXPECT_FALSE(prompt_leaves_reasoning_open(**plain, {}));
}

TEST(OutputParser, EventsOfAStream) {
  const Events events =
      parse(" a \n" + kBegin + call("bad", "x") + call("functions.f:3", " {\"k\": 1 }\n") + call("g:4", ""), kTools);
  std::string content, arguments;
  std::vector<std::string> calls;
  for (const OutputEvent& event : events) {
    EXPECT_EQ(event.text.empty(), event.kind == Kind::kToolCall);
    if (event.kind == Kind::kContent) content += event.text;
    if (event.kind == Kind::kToolCall)
      calls.push_back(fmt::format("{}{}{}", event.call_index, event.call_id, event.name));
    if (event.kind == Kind::kArguments) arguments += fmt::format("{}{}", event.call_index, event.text);
  }
  EXPECT_EQ(content, " a \n");
  EXPECT_EQ(calls, (std::vector<std::string>{"0functions.f:3f", "1g:4g"}));
  EXPECT_EQ(arguments, "0{0\"0k0\"0:0 10 }1{}");
}

TEST(OutputParser, CharactersAcrossTokens) {
  OutputParser parser(tokenizer(), {});
  Events out;
  const auto push = [&](std::initializer_list<int> ids) {
    out.clear();
    for (const int id : ids) parser.push(id, out);
    return out.empty() ? "" : out.back().text;
  };
  EXPECT_EQ(push({0xE4}), "");
  EXPECT_EQ(push({0xBD}), "");
  EXPECT_EQ(push({0xA0}), "\xE4\xBD\xA0");
  EXPECT_EQ(push({0xE4, 0xBD}), "");
  out.clear();
  parser.finish(out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].text, "\xEF\xBF\xBD");
}

TEST(OutputParser, SawToolCall) {
  OutputParser parser(tokenizer(), kTools);
  Events out;
  for (const int32_t id : tokenizer().encode(kBegin + "<|tool_call_begin|>a:0", SpecialsIn::kRecognised))
    parser.push(id, out);
  EXPECT_FALSE(parser.saw_tool_call());
  parser.push(*tokenizer().special_id("<|tool_call_argument_begin|>"), out);
  EXPECT_TRUE(parser.saw_tool_call());
}

TEST(OutputParser, CountsTheTokensOfReasoningWithoutItsMarkers) {
  const auto count = [](std::string_view reply, OutputParserOptions options) {
    OutputParser parser(tokenizer(), options);
    Events out;
    for (const int32_t id : tokenizer().encode(reply, SpecialsIn::kRecognised)) parser.push(id, out);
    return parser.num_reasoning_ids();
  };
  EXPECT_EQ(count("abc</think>de", kThinkingTools), 3);
  EXPECT_EQ(count("<think>abc", kThinkingTools), 3);
  EXPECT_EQ(count("a</think>b<think>cd</think>e", kThinkingTools), 3);
  EXPECT_EQ(count("ab" + kBegin + call("f:0", "{}") + kEnd + "cd", kThinkingTools), 2);
  EXPECT_EQ(count("abc</think>de", kTools), 0);
}

TEST(OutputParser, WherePromptsLeaveReasoning) {
  const auto open = [](std::string_view prompt) {
    return prompt_leaves_reasoning_open(tokenizer(), tokenizer().encode(prompt, SpecialsIn::kRecognised));
  };
  const std::string history = "<|im_assistant|>assistant<|im_middle|><think></think>x<|im_end|>";
  const std::string tail = "<|im_assistant|>assistant<|im_middle|>";
  EXPECT_TRUE(open(history + tail + "<think>"));           // K2.5
  EXPECT_FALSE(open(history + tail + "<think></think>"));  // K2.5, thinking off
  EXPECT_TRUE(open(history + tail));                       // K2-Thinking opens it itself
  EXPECT_FALSE(open(history + tail + "<think>a" + kBegin));
  EXPECT_TRUE(open(""));
}

// Random streams of markers, ordinary tokens and broken UTF-8.
std::vector<int32_t> random_stream(Rng& rng) {
  const std::vector<std::string> markers = {
      "<think>",           "</think>",  kBegin, kEnd, "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
      "<|tool_call_end|>", "<|im_end|>"};
  const std::string letters = "a:0 \n{}\"\xE4\xBD\xA0\xFF\xC3";
  const std::vector<int32_t> call_start =
      tokenizer().encode("<|tool_call_begin|>a:0<|tool_call_argument_begin|>", SpecialsIn::kRecognised);
  std::vector<int32_t> ids;
  for (uint64_t n = rng.below(40); n > 0; --n) {
    if (rng.chance(0.03)) {
      ids.insert(ids.end(), call_start.begin(), call_start.end());
    } else if (rng.chance(0.3)) {
      ids.push_back(*tokenizer().special_id(markers[rng.below(markers.size())]));
    } else if (rng.chance(0.7)) {
      ids.push_back(static_cast<uint8_t>(letters[rng.below(letters.size())]));
    } else {
      ids.push_back(256 + static_cast<int32_t>(rng.below(7)));
    }
  }
  return ids;
}

// A client's view of a stream that arrives in groups: it appends what each group brings.
ParsedOutput fold_in_groups(const std::vector<int32_t>& ids, OutputParserOptions options, Rng& rng) {
  OutputParser parser(tokenizer(), options);
  ParsedOutput out;
  Events group;
  const auto flush = [&] {
    for (const OutputEvent& event : group) {
      if (event.kind == Kind::kReasoning) out.reasoning = out.reasoning.value_or("") + event.text;
      if (event.kind == Kind::kContent) out.content = out.content.value_or("") + event.text;
      if (event.kind == Kind::kToolCall) out.calls.push_back({event.call_id, event.name, ""});
      if (event.kind == Kind::kArguments) out.calls.at(event.call_index).arguments += event.text;
    }
    group.clear();
  };
  for (const int32_t id : ids) {
    parser.push(id, group);
    if (rng.chance(0.5)) flush();
  }
  parser.finish(group);
  flush();
  return out;
}

TEST(OutputParser, AnyGroupingGivesTheSameReply) {
  Rng rng(17);
  int with_calls = 0;
  for (int round = 0; round < 30'000; ++round) {
    const std::vector<int32_t> ids = random_stream(rng);
    const OutputParserOptions options = {.thinking = true,
                                         .starts_in_reasoning = rng.chance(0.5),
                                         .parse_tools = true,
                                         .suppress_tools = rng.chance(0.1)};
    Events events;
    OutputParser parser(tokenizer(), options);
    for (const int32_t id : ids) parser.push(id, events);
    parser.finish(events);
    const ParsedOutput whole = collect(events);
    ASSERT_EQ(shown(fold_in_groups(ids, options, rng)), shown(whole));
    ASSERT_EQ(whole.content.value_or("").find('<'), std::string::npos);  // no ordinary token here has a '<'
    ASSERT_EQ(whole.reasoning.value_or("").find('<'), std::string::npos);
    ASSERT_EQ(parser.saw_tool_call(), !whole.calls.empty());
    ASSERT_TRUE(!options.suppress_tools || whole.calls.empty());
    with_calls += !whole.calls.empty();
  }
  EXPECT_GT(with_calls, 300);
}

// Held-back text and long headers are the places where cost could grow with the square of the reply.
TEST(OutputParser, IsLinear) {
  OutputParser parser(tokenizer(), kThinkingTools);
  Events out;
  const auto spaces = [&] {
    for (int i = 0; i < 1'000'000; ++i) parser.push(' ', out);
  };
  spaces();
  parser.push(*tokenizer().special_id("</think>"), out);
  spaces();
  parser.push(*tokenizer().special_id("<|tool_call_begin|>"), out);
  spaces();
  parser.push('a', out);
  parser.push(':', out);
  parser.push('0', out);
  parser.push(*tokenizer().special_id("<|tool_call_argument_begin|>"), out);
  spaces();
  parser.push('1', out);
  spaces();
  parser.finish(out);
  EXPECT_EQ(shown(collect(out)), "{a:0|a|1}");
}

}  // namespace
}  // namespace perigee
