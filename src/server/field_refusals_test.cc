// Fields that would give a wrong answer if they were ignored: each a 400 with its name and the way out.
#include <gtest/gtest.h>

#include "server/chat_request.h"
#include "server/completion_request.h"
#include "server/text_endpoints.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

RequestContext test_context() {
  RequestContext context;
  context.served_names = {"tiny"};
  context.vocab = 512;
  context.max_model_len = 256;
  context.eos_ids = {258};
  return context;
}

const std::string kTool = R"({"type":"function","function":{"name":"f"}})";

// "FIELD: MESSAGE", or "" when the request is accepted.
template <typename T>
std::string shown(const Result<T>& result) {
  return result.ok() ? "" : result.error().field + ": " + result.error().message;
}
std::string completion(const std::string& members) {
  const RequestContext context = test_context();
  return shown(parse_completion_request(*parse_body(R"({"prompt":"x",)" + members + "}", context.caps), context));
}
std::string chat(const std::string& members) {
  const RequestContext context = test_context();
  const bool with_messages = members.find("\"messages\"") != std::string::npos;
  const std::string body = (with_messages ? "{" : R"({"messages":[{"role":"user","content":"x"}],)") + members + "}";
  return shown(parse_chat_request(*parse_body(body, context.caps), context));
}
std::string message(const std::string& text) {
  const RequestContext context = test_context();
  return shown(parse_chat_request(*parse_body(R"({"messages":[)" + text + "]}", context.caps), context));
}
std::string tokenizing(const std::string& body) {
  const RequestContext context = test_context();
  const auto text = ModelText::make(
      test_tokenizer(),
      [](const Json&, const Json&, const Json&, PromptEnd, size_t) { return std::vector<int32_t>{1}; }, true, {});
  return shown(tokenize(*parse_body(body, context.caps), context, *text));
}
std::string detokenizing(const std::string& body) {
  const RequestContext context = test_context();
  const auto text = ModelText::make(test_tokenizer(), nullptr, true, {});
  return shown(detokenize(*parse_body(body, context.caps), context, *text));
}

struct Case {
  std::string members;
  std::string field;    // "" for accepted
  std::string way_out;  // in the message
};

void check(std::string (*parse)(const std::string&), const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    const std::string fault = parse(c.members);
    if (c.field.empty()) {
      EXPECT_EQ(fault, "") << c.members;
      continue;
    }
    EXPECT_TRUE(fault.starts_with(c.field + ": ")) << c.members << ": " << fault;
    EXPECT_NE(fault.find(c.way_out, c.field.size()), std::string::npos) << fault;
    EXPECT_NE(fault.find(c.field, c.field.size()), std::string::npos) << "the message names the field: " << fault;
  }
}

TEST(FieldRefusals, OfBothApis) {
  std::vector<Case> cases;
  for (const char* name : {"regex", "ebnf", "grammar", "json_schema", "structural_tag"})
    cases.push_back({std::string("\"") + name + "\":\"x\"", name, "structured_outputs"});
  for (const char* name : {"lora_path", "lora_request"})
    cases.push_back({std::string("\"") + name + "\":\"x\"", name, "adapters"});
  for (const Case& c : std::vector<Case>{
           {R"("logits_processors":["x"])", "logits_processors", "logit_bias"},
           {R"("typical_p":0.5)", "typical_p", "top_p"},
           {R"("typical_p":1.0,"use_beam_search":false,"watermarking":false,"length_penalty":1)", "", ""},
           {R"("max_new_tokens":5)", "max_new_tokens", "use max_tokens"},
           {R"("repeat_penalty":1.1)", "repeat_penalty", "repetition_penalty"},
           {R"("store":true)", "store", "not stored"},
           {R"("store":false,"modalities":["text"],"n":3,"best_of":3,"service_tier":"auto","metadata":{})", "", ""},
           {R"("n":3,"best_of":4)", "best_of", "use n"},
           {R"("modalities":["text","audio"])", "modalities", "text"},
           {R"("service_tier":"flex")", "service_tier", "\"auto\", \"default\""},
           {R"("metadata":1)", "metadata", "an object"},
           {R"("user":7)", "user", "a string"},
           {R"("response_format":"text")", "response_format", "an object"},
           {R"("stream":true,"stream_options":{"include_usge":true})", "stream_options.include_usge",
            "stream_options.include_usage"},
           {R"("stream":true,"stream_options":{"include_usage":1})", "stream_options.include_usage", "true or false"},
           {R"("stream":true,"stream_options":{"include_obfuscation":false})", "", ""},
           {R"("temprature":1)", "temprature", "did you mean temperature?"},
           {R"("max_token":1)", "max_token", "did you mean max_tokens?"},
           {R"("stop_token_id":[1])", "stop_token_id", "did you mean stop_token_ids?"},
           {R"("topP":1)", "topP", "did you mean top_p?"},
           {R"("made_up":1,"another_one":{})", "", ""}})
    cases.push_back(c);
  check(completion, cases);
  check(chat, cases);
}

TEST(FieldRefusals, OfFormsOfReplies) {
  const auto format = [](const std::string& members) { return R"("response_format":{)" + members + "}"; };
  const auto schema = [&](const std::string& members) {
    return format(R"("type":"json_schema","json_schema":{)" + members + "}");
  };
  const auto outputs = [](const std::string& members) { return R"("structured_outputs":{)" + members + "}"; };
  const std::string field = "response_format.json_schema", good = schema(R"("name":"x","schema":{})");
  const std::vector<Case> cases = {
      {format(R"("type":"text")"), "", ""},
      {format(R"("type":"json_object")"), "", ""},
      {good, "", ""},
      {schema(R"("name":"x","description":"d","strict":false,"schema":{"type":"object"})"), "", ""},
      {schema(R"("name":"x","strict":null,"schema":{})"), "", ""},
      {format(R"("type":"structural_tag","format":{})"), "", ""},
      {format(R"("type":"bogus")"), "response_format.type", "\"json_schema\""},
      {format(R"("type":7)"), "response_format.type", "\"json_schema\""},
      {format(""), "response_format.type", "required"},
      {format(R"("type":"json_schema")"), field, "required"},
      {format(R"("type":"json_schema","json_schema":"x")"), field, "an object"},
      {format(R"("type":"json_object","json_shema":{})"), "response_format.json_shema", "json_schema"},
      {schema(R"("schema":{})"), field + ".name", "required"},
      {schema(R"("name":"","schema":{})"), field + ".name", "not empty"},
      {schema(R"("name":1,"schema":{})"), field + ".name", "a string"},
      {schema(R"("name":"x")"), field + ".schema", "required"},
      {schema(R"("name":"x","schema":"x")"), field + ".schema", "an object"},
      {schema(R"("name":"x","schema":[])"), field + ".schema", "an object"},
      {schema(R"("name":"x","schema":{},"strict":"yes")"), field + ".strict", "true or false"},
      {schema(R"("name":"x","schema":{},"strct":true)"), field + ".strct", "strict"},
      {outputs(R"("json":{"type":"object"})"), "", ""},
      {outputs(R"("json":"{}","disable_any_whitespace":true)"), "", ""},
      {outputs(R"("regex":"a+")"), "", ""},
      {outputs(R"("choice":["a","b"],"regex":null)"), "", ""},
      {outputs(R"("grammar":"root ::= \"a\"")"), "", ""},
      {outputs(R"("json_object":true)"), "", ""},
      {outputs(R"("structural_tag":{"format":{}})"), "", ""},
      {outputs(""), "structured_outputs", "one of json, regex"},
      {outputs(R"("json_object":false)"), "structured_outputs", "one of json, regex"},
      {outputs(R"("json":{},"regex":"a")"), "structured_outputs.regex", "json exclude each other"},
      {outputs(R"("json":7)"), "structured_outputs.json", "an object or a string"},
      {outputs(R"("regex":7)"), "structured_outputs.regex", "a string"},
      {outputs(R"("choice":[])"), "structured_outputs.choice", "at least one"},
      {outputs(R"("choice":["a",1])"), "structured_outputs.choice", "strings"},
      {outputs(R"("choice":[""])"), "structured_outputs.choice", "not empty"},
      {outputs(R"("choice":"a")"), "structured_outputs.choice", "an array"},
      {outputs(R"("regex":"a","gramar":"b")"), "structured_outputs.gramar", "structured_outputs.grammar"},
      {outputs(R"("json":{},"whitespace_pattern":" *")"), "structured_outputs.whitespace_pattern", "one line"},
      {R"("structured_outputs":"x")", "structured_outputs", "an object"},
      {R"("guided_json":{},"guided_decoding_backend":"auto")", "", ""},
      {R"("guided_regex":"a")", "", ""},
      {R"("guided_choice":["a"])", "", ""},
      {R"("guided_grammar":"root ::= \"a\"")", "", ""},
      {R"("guided_json":[])", "guided_json", "an object or a string"},
      {R"("guided_whitespace_pattern":" ")", "guided_whitespace_pattern", "one line"},
      {R"("guided_json":{},"guided_regex":"a")", "guided_regex", "guided_json exclude each other"},
      {good + R"(,"guided_regex":"a")", "guided_regex", field + ".schema exclude each other"},
      {format(R"("type":"json_object")") + "," + outputs(R"("regex":"a")"), "structured_outputs.regex",
       "response_format exclude"},
      {good + R"(,"ignore_eos":true)", "ignore_eos", "response_format"},
  };
  check(completion, cases);
  check(chat, cases);
  const std::string tools = ",\"tools\":[" + kTool + "]";
  check(chat, {{good + tools + R"(,"tool_choice":"none")", "", ""},
               {good + tools, field + ".schema", "\"tool_choice\": \"none\""},
               {good + tools + R"(,"tool_choice":"required")", field + ".schema", "tool_choice exclude each other"},
               {format(R"("type":"text")") + tools, "", ""}});
}

TEST(FieldRefusals, OfToolChoices) {
  const std::string tools = "\"tools\":[" + kTool + "],";
  const auto named = [](const std::string& name) {
    return R"("tool_choice":{"type":"function","function":{"name":")" + name + "\"}}";
  };
  check(chat, {{R"("tool_choice":"none")", "", ""},
               {R"("tool_choice":"auto")", "", ""},
               {tools + R"("tool_choice":"auto")", "", ""},
               {tools + R"("tool_choice":"required")", "", ""},
               {tools + named("f"), "", ""},
               {tools + R"("tool_choice":{"function":{"name":"f"}})", "", ""},
               {R"("tool_choice":"required")", "tool_choice", "declares no tools"},
               {R"("tools":[],"tool_choice":"required")", "tools", "leave it out"},
               {named("f"), "tool_choice", "declares no tools"},
               {tools + named("g"), "tool_choice", "'g'"},
               {tools + R"("tool_choice":"bogus")", "tool_choice", "\"required\""},
               {tools + R"("tool_choice":7)", "tool_choice", "\"required\""},
               {tools + R"("tool_choice":{})", "tool_choice", "\"required\""},
               {tools + R"("tool_choice":{"type":"custom","function":{"name":"f"}})", "tool_choice", "\"function\""},
               {tools + R"("tool_choice":"required","ignore_eos":true)", "ignore_eos", "tool_choice"},
               {tools + R"("tool_choice":"auto","ignore_eos":true)", "", ""},
               {R"("tools":[{"type":"function","function":{"name":"f","strict":true}}],"ignore_eos":true)",
                "ignore_eos", "a strict tool"}});
}

TEST(FieldRefusals, OfCompletions) {
  check(completion, {{R"("messages":[])", "messages", "/v1/chat/completions"},
                     {R"("tools":[])", "tools", "/v1/chat/completions"},
                     {R"("max_completion_tokens":5)", "max_completion_tokens", "max_tokens"},
                     {R"("suffix":"x")", "suffix", "leave it out"},
                     {R"("suffix":"")", "", ""}});
}

TEST(FieldRefusals, OfChat) {
  const std::string tools = "\"tools\":[" + kTool + "]";
  check(chat, {{R"("max_tokens":3,"max_completion_tokens":4)", "max_completion_tokens", "contradicts max_tokens 3"},
               {R"("max_tokens":3,"max_completion_tokens":3)", "", ""},
               {R"("reasoning_effort":"turbo")", "reasoning_effort", "\"none\", \"minimal\", \"low\""},
               {R"("reasoning_effort":3)", "reasoning_effort", "one of"},
               {R"("reasoning_effort":"xhigh")", "", ""},
               {R"("thinking":true)", "thinking", "an object"},
               {R"("thinking":{})", "", ""},
               {R"("thinking":{"type":"maybe"})", "thinking.type", "\"disabled\""},
               {R"("thinking":{"type":"enabled","budget_tokens":100})", "thinking.budget_tokens", "leave it out"},
               {R"("thinking":{"type":"enabled","effort":5})", "thinking.effort", "\"high\""},
               {R"("thinking":{"type":"enabled","keep":"some"})", "thinking.keep", "\"all\""},
               {R"("thinking":{"type":"enabled","keep":null,"effort":"low"},"reasoning_effort":"high")", "", ""},
               {R"("thinking":{"type":"enabled"},"reasoning_effort":"none")", "reasoning_effort", "contradicts"},
               {R"("thinking":{"type":"disabled"},"reasoning_effort":"none")", "", ""},
               {R"("chat_template_kwargs":{"thinkng":false})", "chat_template_kwargs.thinkng",
                "chat_template_kwargs.thinking"},
               {R"("chat_template_kwargs":{"a_name_of_the_template":1})", "", ""},
               {R"("enable_thinking":false)", "enable_thinking", "chat_template_kwargs"},
               {"\"tools\":[" + kTool + "," + kTool + "]", "tools", "function f twice"},
               {R"("tools":[{"type":"function","function":{"name":"f","strict":true}}])", "", ""},
               {R"("tools":[{"type":"function","function":{"name":"f","strict":1}}])", "tools[0].function.strict",
                "true or false"},
               {R"("tools":[{"type":"function","function":{"name":"f","strict":false,"x":1}}])", "", ""},
               {"\"tools\":[" + kTool + R"(,{"type":"function","function":{"name":"g","parameter":{}}}])",
                "tools[1].function.parameter", "parameters"},
               {R"("tools":[{"type":"function","function":{"name":"f","parameters":[]}}])",
                "tools[0].function.parameters", "an object"},
               {R"("tools":[{"type":"function","function":{"name":"f","description":1}}])",
                "tools[0].function.description", "a string"},
               {R"("tools":[{"type":"web_search"}])", "tools[0].type", "\"function\""},
               {R"("tools":[7])", "tools", "an object"},
               {R"("parallel_tool_calls":1)", "parallel_tool_calls", "true or false"},
               {tools + R"(,"parallel_tool_calls":false)", "", ""},
               {R"("tool_choice":"none")", "", ""},
               {R"("prompt":"x")", "prompt", "/v1/completions"},
               {R"("functions":[])", "functions", "tools"},
               {R"("verbosity":"high")", "verbosity", "message"},
               {R"("verbosity":"medium","separate_reasoning":true)", "", ""}});
}

TEST(FieldRefusals, OfMessages) {
  check(message,
        {{R"({"role":"user","content":"x","tools":[]})", "", ""},
         {R"({"role":"assistant","content":"x","prefix":true})", "messages[0].prefix", "use partial"},
         {R"({"role":"assistant","content":"x","partial":false,"refusal":null,"annotations":[]})", "", ""},
         {R"({"role":"assistant","content":"x","function_call":{}})", "messages[0].function_call", "tool_calls"},
         {R"({"role":"assistant","content":null,"refusal":"no"})", "messages[0].refusal", "content"},
         {R"({"role":"user","content":"x"},{"role":"user","contnt":"x","content":"y"})", "messages[1].contnt",
          "messages[1].content"},
         {R"({"role":"user","content":"x","cache_control":{"type":"ephemeral"},"weight":1})", "", ""}});
}

// The rules of Kimi's own API for tools that are declared inside the conversation.
TEST(FieldRefusals, OfToolsInMessages) {
  const auto system = [](const std::string& members) { return R"({"role":"system",)" + members + "}"; };
  const auto tools = [&](const std::string& list) { return system(R"("content":"","tools":)" + list); };
  const auto named = [](const std::string& name) {
    return R"({"type":"function","function":{"name":")" + name + "\"}}";
  };
  const std::string f = named("f"), field = "messages[0].tools";
  check(message,
        {{tools("[" + f + "," + named("g") + "]"), "", ""},
         {tools("[" + f + "]") + R"(,{"role":"user","content":"x"},)" + tools("[" + named("g") + "]"), "", ""},
         {system("\"tools\":[" + f + "]"), "", ""},
         {system("\"content\":null,\"tools\":[" + f + "]"), "", ""},
         {R"({"role":"developer","tools":[)" + f + "]}", "", ""},
         {tools(R"([{"type":"function","function":{"name":"_f.g-1","strict":false,"parameters":{}}}])"), "", ""},
         {R"({"role":"user","content":"x","tools":[)" + f + "]}", field, "system messages only"},
         {R"({"role":"assistant","content":"x","tools":[)" + f + "]}", field, "system messages only"},
         {system(R"("content":"x","tools":[)" + f + "]"), field, "empty content"},
         {system(R"("content":[{"type":"text","text":""}],"tools":[)" + f + "]"), field, "empty content"},
         {tools(R"([{"function":{"name":"f"}}])"), field + "[0].type", "\"function\""},
         {tools(R"([{"type":"bogus","function":{"name":"f"}}])"), field + "[0].type", "\"function\""},
         {tools("[" + f + R"(,{"type":"bogus"}])"), field + "[1].type", "\"function\""},
         {tools(R"([{"type":"function"}])"), field, "function.name"},
         {tools(R"([{"type":"function","function":{}}])"), field, "function.name"},
         {tools("[" + named("") + "]"), field, "function.name"},
         {tools("[" + named("1f") + "]"), field, "a letter or '_'"},
         {tools("[" + named("f@") + "]"), field, "function.name"},
         {tools("[" + named(std::string(257, 'f')) + "]"), field, "function.name"},
         {tools(R"({"type":"function"})"), field, "an array"},
         {tools("[null]"), field, "an object"},
         {tools("[" + f + "," + f + "]"), field, "f twice"},
         {tools("[" + f + "]") + "," + tools("[" + f + "]"), "messages[1].tools", "f twice"},
         {R"({"role":"tool","content":"x"})", "messages[0].tool_call_id", "required"}});
  check(chat, {{"\"messages\":[" + tools("[" + f + "]") + "],\"tools\":[" + f + "]", field, "f twice"},
               {"\"messages\":[" + tools("[" + f + "]") + "],\"tools\":[" + named("1f") + "]", "", ""},
               {"\"messages\":[" + tools("[" + f + "]") + R"(],"tool_choice":"none")", "", ""}});
}

TEST(FieldRefusals, OfContinuedMessages) {
  const std::string last = R"("messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}])";
  const std::string partial =
      R"("messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y","partial":true}])";
  const std::string both = R"(,"continue_final_message":true,"add_generation_prompt":)";
  check(chat,
        {{last + R"(,"continue_final_message":true)", "", ""},
         {last + both + "false", "", ""},
         {last + both + "null", "", ""},
         {last + both + "true", "continue_final_message", "contradicts \"add_generation_prompt\": true"},
         {R"("continue_final_message":true)", "continue_final_message", "an assistant message"},
         {R"("continue_final_message":1)", "continue_final_message", "true or false"},
         {partial, "", ""},
         {partial + both + "false", "", ""},
         {partial + R"(,"add_generation_prompt":true)", "messages[1].partial", "contradicts"},
         {R"("messages":[{"role":"assistant","content":"y","partial":true},{"role":"user","content":"x"}])",
          "messages[0].partial", "the last message"},
         {R"("messages":[{"role":"user","content":"y","partial":true}])", "messages[0].partial", "assistant message"},
         {R"("messages":[{"role":"assistant","content":"y","partial":"yes"}])", "messages[0].partial", "true or false"},
         {R"("messages":[{"role":"assistant","content":null,"partial":true,"tool_calls":[{"id":"a","function":)"
          R"({"name":"f","arguments":"{}"}}]}])",
          "messages[0].partial", "without tool_calls"}});
}

std::string strictly(const std::string& members) {
  RequestContext context = test_context();
  context.kimi_strict = true;
  const std::string body = R"({"messages":[{"role":"user","content":"x"}],)" + members + "}";
  return shown(parse_chat_request(*parse_body(body, context.caps), context));
}

// The values are those that the vendor's verifier of other servers sends.
TEST(FieldRefusals, OfKimisOwnApi) {
  check(strictly, {{R"("temperature":0,"top_p":0.95,"presence_penalty":0,"frequency_penalty":0.0,"n":1)", "", ""},
                   {R"("temperature":0.6,"thinking":{"type":"disabled"})", "", ""},
                   {R"("temperature":1.0,"thinking":{"effort":"max"},"reasoning_effort":"low")", "", ""},
                   {R"("temperature":1.1)", "temperature", "between 0.0 and 1.0"},
                   {R"("temperature":2.0)", "temperature", "between 0.0 and 1.0"},
                   {R"("temperature":-0.1)", "temperature", "between 0"},
                   {R"("top_p":0.8)", "top_p", "--kimi-strict"},
                   {R"("presence_penalty":0.5)", "presence_penalty", "--kimi-strict"},
                   {R"("frequency_penalty":0.5)", "frequency_penalty", "--kimi-strict"},
                   {R"("n":2)", "n", "--kimi-strict"},
                   {R"("reasoning_effort":"medium")", "reasoning_effort", "\"low\", \"high\", \"max\""},
                   {R"("thinking":{"type":"enabled","effort":"medium"})", "thinking.effort", "\"max\""}});
  check(chat, {{R"("temperature":1.1,"top_p":0.8,"n":2,"reasoning_effort":"medium")", "", ""}});
}

TEST(FieldRefusals, OfTokenize) {
  check(tokenizing,
        {{R"({"prompt":"x","model":"tiny"})", "", ""},
         {R"({"prompt":"x","model":"other"})", "model", "'tiny'"},
         {R"({"prompt":"x","model":7})", "model", "a string"},
         {R"({"prompt":7})", "prompt", "a string"},
         {R"({})", "prompt", "messages"},
         {R"({"prompt":"x","messages":[]})", "prompt", "exclude"},
         {R"({"prompt":"x","return_token_strs":1})", "return_token_strs", "true or false"},
         {R"({"prompt":"x","add_special_tokens":1})", "add_special_tokens", "true or false"},
         {R"({"prompt":"x","return_token_str":true})", "return_token_str", "return_token_strs"},
         {R"({"prompt":"x","tools":[]})", "tools", "messages"},
         {R"({"messages":[{"role":"user","content":"x"}],"chat_template":"x"})", "chat_template", "own"},
         {R"({"messages":[{"role":"user","content":"x"}],"continue_final_message":true})", "continue_final_message",
          "an assistant message"},
         {R"({"messages":[{"role":"assistant","content":"x","partial":true}]})", "", ""},
         {R"({"messages":[{"role":"system","content":"x","tools":[{}]}]})", "messages[0].tools", "empty content"},
         {R"({"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"thinking":1}})",
          "chat_template_kwargs.thinking", "true or false"},
         {R"({"messages":[{"role":"user","content":"x"}],"thinking":{"type":"disabled"},"model":"tiny"})", "", ""}});
  check(detokenizing, {{R"({"tokens":[97],"model":"tiny"})", "", ""},
                       {R"({"tokens":[97],"model":"other"})", "model", "'tiny'"},
                       {R"({"tokens":"x"})", "tokens", "an array"},
                       {R"({"tokens":[1.5]})", "tokens", "integers"},
                       {R"({"token":[97],"tokens":[]})", "token", "tokens"}});
}

TEST(FieldRefusals, TemplateVariablesAreCounted) {
  std::string members = "\"chat_template_kwargs\":{\"k\":0";
  for (int i = 1; i < 64; ++i) members += ",\"k" + std::to_string(i) + "\":0";
  EXPECT_EQ(chat(members + "}"), "");
  EXPECT_NE(chat(members + ",\"l\":0}").find("chat_template_kwargs must have at most 64 members, got 65"),
            std::string::npos);
}

}  // namespace
}  // namespace perigee
