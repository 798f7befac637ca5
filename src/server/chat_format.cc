#include "server/reply_format.h"
#include "server/reply_json.h"

namespace perigee {

namespace {

class ChatFormat : public ReplyFormat {
 public:
  ChatFormat(ReplyContext context, const ChatRequest& request, TokenIds prompt)
      : context_(std::move(context)),
        fields_(request.fields),
        prompt_(std::move(prompt)),
        tools_(!request.tools.is_null()),
        one_call_(!request.parallel_tool_calls),
        include_reasoning_(request.include_reasoning),
        num_top_(request.top_logprobs) {}

  const char* id_prefix() const override { return "chatcmpl-"; }
  const char* object_name(bool streamed) const override {
    return streamed ? "chat.completion.chunk" : "chat.completion";
  }
  bool discards_output() const override { return false; }
  bool shows_prompt() const override { return fields_.return_token_ids; }

  std::unique_ptr<ChoiceFold> make_fold(const std::vector<int32_t>& prompt) const override {
    const Tokenizer& tokenizer = *context_.text->tokenizer();
    OutputParserOptions options;
    options.thinking = context_.text->thinks();
    options.starts_in_reasoning = options.thinking && prompt_leaves_reasoning_open(tokenizer, prompt);
    options.parse_tools = tools_;
    options.suppress_tools = !tools_;
    options.skip_special_tokens = fields_.skip_special_tokens;
    options.one_call = one_call_;
    return make_chat_fold(tokenizer, options, fields_, context_.eos_ids);
  }

  std::vector<Json> stream(ChoiceState& state, const ChoiceDelta& delta) const override {
    std::vector<Json> out;
    const bool told = !delta.ids.empty() && (fields_.continuous_usage || fields_.return_token_ids || num_top_ >= 0);
    if (delta.empty() && !told) return out;
    if (!state.opened) {
      Json opening = chunk(state, Json(Json::Object{{"role", "assistant"}, {"content", ""}}), {});
      if (fields_.return_token_ids) opening.set("prompt_token_ids", ids_json(*prompt_));
      out.push_back(std::move(opening));
    }
    state.opened = true;
    out.push_back(chunk(state, delta_json(delta.events), delta));
    return out;
  }

  Json whole(ChoiceState& state) const override {
    const ChoiceDelta& total = state.total;
    ParsedOutput parsed = collect(total.events);
    Json message(Json::Object{{"role", "assistant"}});
    message.set("content", parsed.content ? Json(*parsed.content) : parsed.calls.empty() ? Json("") : Json());
    if (parsed.reasoning && include_reasoning_) set_reasoning(*parsed.reasoning, message);
    Json::Array calls;
    for (ParsedOutput::Call& call : parsed.calls) {
      Json function(Json::Object{{"name", std::move(call.name)}, {"arguments", std::move(call.arguments)}});
      calls.push_back(Json(Json::Object{{"id", call.id}, {"type", "function"}, {"function", std::move(function)}}));
    }
    if (!calls.empty()) message.set("tool_calls", Json(std::move(calls)));
    Json out(Json::Object{{"index", static_cast<int64_t>(state.index)},
                          {"message", std::move(message)},
                          {"logprobs", logprobs(total)},
                          {"finish_reason", finish_name(total)},
                          {"stop_reason", stop_reason(total)}});
    if (fields_.return_token_ids) out.set("token_ids", ids_json(total.ids));
    return out;
  }

  void add_reply_members(const std::vector<ChoiceState>& choices, Json& reply) const override {
    if (fields_.return_token_ids) reply.set("prompt_token_ids", ids_json(*prompt_));
    if (fields_.sampling.prompt_logprobs >= 0)
      reply.set("prompt_logprobs", prompt_logprobs_json(*context_.text, fields_.tokens_as_ids,
                                                        fields_.sampling.prompt_logprobs, choices[0].prompt_logprobs));
  }

 private:
  Json logprobs(const ChoiceDelta& delta) const {
    return num_top_ < 0 ? Json() : chat_logprobs(*context_.text, fields_.tokens_as_ids, num_top_, delta.logprobs);
  }

  Json chunk(const ChoiceState& state, Json delta_members, const ChoiceDelta& delta) const {
    Json out(Json::Object{{"index", static_cast<int64_t>(state.index)},
                          {"delta", std::move(delta_members)},
                          {"logprobs", delta.ids.empty() ? Json() : logprobs(delta)},
                          {"finish_reason", delta.finish ? Json(finish_name(delta)) : Json()}});
    if (delta.finish) out.set("stop_reason", stop_reason(delta));
    if (fields_.return_token_ids && !delta.ids.empty()) out.set("token_ids", ids_json(delta.ids));
    return out;
  }

  void set_reasoning(const std::string& text, Json& message) const {
    if (context_.reasoning_field != "reasoning_content") message.set("reasoning", text);
    if (context_.reasoning_field != "reasoning") message.set("reasoning_content", text);
  }

  // The events of one chunk as one delta: pieces of the same kind, or of the same call, are joined.
  Json delta_json(const std::vector<OutputEvent>& events) const {
    std::string reasoning, content;
    Json::Array calls;
    for (const OutputEvent& event : events) {
      if (event.kind == OutputEvent::Kind::kReasoning) reasoning += event.text;
      if (event.kind == OutputEvent::Kind::kContent) content += event.text;
      if (event.kind == OutputEvent::Kind::kToolCall) {
        Json function(Json::Object{{"name", event.name}, {"arguments", ""}});
        calls.push_back(Json(Json::Object{{"index", static_cast<int64_t>(event.call_index)},
                                          {"id", event.call_id},
                                          {"type", "function"},
                                          {"function", std::move(function)}}));
      }
      if (event.kind == OutputEvent::Kind::kArguments) add_arguments(event, calls);
    }
    Json out(Json::Object{});
    if (!reasoning.empty() && include_reasoning_) set_reasoning(reasoning, out);
    if (!content.empty()) out.set("content", content);
    if (!calls.empty()) out.set("tool_calls", Json(std::move(calls)));
    return out;
  }

  static void add_arguments(const OutputEvent& event, Json::Array& calls) {
    const Json index(static_cast<int64_t>(event.call_index));
    if (calls.empty() || !(*calls.back().find("index") == index)) {
      Json function(Json::Object{{"arguments", event.text}});
      calls.push_back(Json(Json::Object{{"index", index}, {"function", std::move(function)}}));
      return;
    }
    calls.back().find("function")->find("arguments")->as_string() += event.text;
  }

  const ReplyContext context_;
  const RequestFields fields_;
  const TokenIds prompt_;
  const bool tools_;
  const bool one_call_;
  const bool include_reasoning_;
  const int32_t num_top_;
};

}  // namespace

std::unique_ptr<ReplyFormat> make_chat_format(ReplyContext context, const ChatRequest& request, TokenIds prompt) {
  return std::make_unique<ChatFormat>(std::move(context), request, std::move(prompt));
}

}  // namespace perigee
