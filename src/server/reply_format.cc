#include "server/reply_format.h"

#include <algorithm>
#include <cmath>

#include "text/detokenizer.h"

namespace perigee {

Json usage_json(const Usage& usage) {
  Json prompt(Json::Object{{"cached_tokens", usage.cached_tokens}});
  Json json(Json::Object{{"prompt_tokens", usage.prompt_tokens},
                         {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
                         {"completion_tokens", usage.completion_tokens},
                         {"prompt_tokens_details", std::move(prompt)}});
  Json completion(Json::Object{});
  if (usage.reasoning_tokens) completion.set("reasoning_tokens", *usage.reasoning_tokens);
  if (usage.accepted_drafts + usage.rejected_drafts > 0) {
    completion.set("accepted_prediction_tokens", usage.accepted_drafts);
    completion.set("rejected_prediction_tokens", usage.rejected_drafts);
  }
  if (!completion.as_object().empty()) json.set("completion_tokens_details", std::move(completion));
  return json;
}

namespace {

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
}

// The sampled token, then the most likely ones, each id once; at most num_top + 1.
std::vector<std::pair<int32_t, float>> sampled_and_top(const TokenLogprobs& entry, int32_t num_top) {
  std::vector<std::pair<int32_t, float>> out{{entry.id, entry.logprob}};
  const auto end = entry.top.begin() + std::min<ptrdiff_t>(num_top, std::ssize(entry.top));
  for (auto it = entry.top.begin(); it != end; ++it)
    if (it->first != entry.id) out.push_back(*it);
  return out;
}

Json bytes_json(std::string_view bytes) {
  Json::Array out;
  for (const char c : bytes) out.emplace_back(static_cast<int>(static_cast<uint8_t>(c)));
  return Json(std::move(out));
}

}  // namespace

HttpReply json_reply(const Json& body) {
  HttpReply reply;
  reply.body = dump_json(body);
  return reply;
}

const char* finish_name(const ChoiceDelta& delta) {
  switch (delta.finish.value_or(FinishReason::kError)) {
    case FinishReason::kStop: return delta.made_tool_call ? "tool_calls" : "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kDeadline: return "timeout";
    case FinishReason::kCancelled:
    case FinishReason::kError: return "error";
  }
  return "error";
}

Json stop_reason(const ChoiceDelta& delta) {
  if (delta.stop_string) return Json(*delta.stop_string);
  return delta.stop_id >= 0 ? Json(delta.stop_id) : Json();
}

double clamp_logprob(float logprob) {
  return std::isfinite(logprob) ? std::max<double>(logprob, -9999.0) : -9999.0;
}

void CompletionLogprobs::add_token(int32_t id) {
  std::string token = text_.token_text(id, as_ids_);
  text_offset_.emplace_back(offset_);
  offset_ += count_characters(token);
  tokens_.emplace_back(std::move(token));
}

void CompletionLogprobs::add_unscored(int32_t id) {
  add_token(id);
  token_logprobs_.emplace_back();
  top_logprobs_.emplace_back();
}

void CompletionLogprobs::add(const TokenLogprobs& entry) {
  add_token(entry.id);
  token_logprobs_.emplace_back(clamp_logprob(entry.logprob));
  Json top(Json::Object{});
  for (const auto& [id, logprob] : sampled_and_top(entry, num_top_)) {
    const std::string token = text_.token_text(id, as_ids_);
    const double value = clamp_logprob(logprob);
    // Two tokens may read the same (pieces of characters): the more likely one speaks for both.
    if (Json* known = top.find(token))
      *known = Json(std::max(known->as_double(), value));
    else
      top.set(token, value);
  }
  top_logprobs_.push_back(std::move(top));
}

Json CompletionLogprobs::json() && {
  return Json(Json::Object{{"text_offset", std::move(text_offset_)},
                           {"token_logprobs", std::move(token_logprobs_)},
                           {"tokens", std::move(tokens_)},
                           {"top_logprobs", std::move(top_logprobs_)}});
}

namespace {

// 1 for the most likely token.
int64_t rank_of(const TokenLogprobs& entry, int32_t id) {
  if (id == entry.id) return entry.rank;
  int64_t rank = 1;
  for (const auto& [other, logprob] : entry.top) {
    if (other == id) return rank;
    ++rank;
  }
  return rank;
}

Json chat_token(const ModelText& text, bool as_ids, int32_t id, float logprob) {
  const std::string_view bytes = text.tokenizer() == nullptr ? std::string_view() : text.tokenizer()->bytes(id);
  return Json(Json::Object{
      {"token", text.token_text(id, as_ids)}, {"logprob", clamp_logprob(logprob)}, {"bytes", bytes_json(bytes)}});
}

}  // namespace

Json chat_logprobs(const ModelText& text, bool as_ids, int32_t num_top, const std::vector<TokenLogprobs>& entries) {
  Json::Array content;
  for (const TokenLogprobs& entry : entries) {
    Json token = chat_token(text, as_ids, entry.id, entry.logprob);
    Json::Array top;
    for (size_t i = 0; i < entry.top.size() && i < static_cast<size_t>(std::max(0, num_top)); ++i)
      top.push_back(chat_token(text, as_ids, entry.top[i].first, entry.top[i].second));
    token.set("top_logprobs", Json(std::move(top)));
    content.push_back(std::move(token));
  }
  return Json(Json::Object{{"content", std::move(content)}});
}

Json prompt_logprobs_json(const ModelText& text, bool as_ids, int32_t num_top,
                          const std::vector<TokenLogprobs>& entries) {
  Json::Array out;
  out.emplace_back();
  for (const TokenLogprobs& entry : entries) {
    Json map(Json::Object{});
    for (const auto& [id, logprob] : sampled_and_top(entry, num_top))
      map.set(std::to_string(id), Json(Json::Object{{"logprob", clamp_logprob(logprob)},
                                                    {"rank", rank_of(entry, id)},
                                                    {"decoded_token", text.token_text(id, as_ids)}}));
    out.push_back(std::move(map));
  }
  return Json(std::move(out));
}

Json ids_json(const std::vector<int32_t>& ids) {
  Json::Array out;
  out.reserve(ids.size());
  for (const int32_t id : ids) out.emplace_back(static_cast<int>(id));
  return Json(std::move(out));
}

namespace {

class ChatFormat : public ReplyFormat {
 public:
  ChatFormat(ReplyContext context, const ChatRequest& request, TokenIds prompt)
      : context_(std::move(context)),
        fields_(request.fields),
        prompt_(std::move(prompt)),
        tools_(!request.conversation.declared.empty()),
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

namespace {

class CompletionFormat : public ReplyFormat {
 public:
  CompletionFormat(ReplyContext context, const CompletionRequest& request, std::vector<TokenIds> prompts)
      : context_(std::move(context)),
        fields_(request.fields),
        prompts_(std::move(prompts)),
        echo_(request.echo),
        num_top_(request.logprobs) {}

  const char* id_prefix() const override { return "cmpl-"; }
  const char* object_name(bool) const override { return "text_completion"; }
  bool shows_prompt() const override { return echo_ || fields_.return_token_ids; }
  bool discards_output() const override { return echo_ && fields_.max_tokens == 0; }

  std::unique_ptr<ChoiceFold> make_fold(const std::vector<int32_t>&) const override {
    return make_text_fold(context_.text->tokenizer(), fields_, context_.eos_ids);
  }

  std::vector<Json> stream(ChoiceState& state, const ChoiceDelta& delta) const override {
    const bool first = !state.opened;
    const bool told = !delta.ids.empty() && (fields_.continuous_usage || fields_.return_token_ids || num_top_ >= 0);
    if (delta.empty() && !told) return {};
    state.opened = true;
    std::vector<Json> out;
    out.push_back(choice(state, delta, first));
    return out;
  }

  Json whole(ChoiceState& state) const override {
    Json out = choice(state, state.total, true);
    if (fields_.sampling.prompt_logprobs >= 0 && !(echo_ && num_top_ >= 0))
      out.set("prompt_logprobs", prompt_logprobs_json(*context_.text, fields_.tokens_as_ids,
                                                      fields_.sampling.prompt_logprobs, state.prompt_logprobs));
    return out;
  }

  void add_reply_members(const std::vector<ChoiceState>&, Json&) const override {}

 private:
  Json choice(ChoiceState& state, const ChoiceDelta& delta, bool first) const {
    const std::vector<int32_t>& prompt = *prompts_[state.prompt_index];
    std::string text;
    if (echo_ && first && context_.text->tokenizer() != nullptr)
      text = decode(*context_.text->tokenizer(), prompt, fields_.skip_special_tokens);
    text += delta.text;
    Json out(Json::Object{{"index", static_cast<int64_t>(state.index)},
                          {"text", std::move(text)},
                          {"logprobs", num_top_ >= 0 ? logprobs(state, delta, first) : Json()},
                          {"finish_reason", delta.finish ? Json(finish_name(delta)) : Json()},
                          {"stop_reason", stop_reason(delta)}});
    if (fields_.return_token_ids) {
      out.set("token_ids", ids_json(delta.ids));
      if (first) out.set("prompt_token_ids", ids_json(prompt));
    }
    return out;
  }

  Json logprobs(ChoiceState& state, const ChoiceDelta& delta, bool first) const {
    CompletionLogprobs out(*context_.text, fields_.tokens_as_ids, num_top_, state.text_offset);
    if (echo_ && first) {
      out.add_unscored(prompts_[state.prompt_index]->front());
      for (const TokenLogprobs& entry : state.prompt_logprobs) out.add(entry);
    }
    for (const TokenLogprobs& entry : delta.logprobs) out.add(entry);
    return std::move(out).json();
  }

  const ReplyContext context_;
  const RequestFields fields_;
  const std::vector<TokenIds> prompts_;
  const bool echo_;
  const int32_t num_top_;
};

}  // namespace

std::unique_ptr<ReplyFormat> make_completion_format(ReplyContext context, const CompletionRequest& request,
                                                    std::vector<TokenIds> prompts) {
  return std::make_unique<CompletionFormat>(std::move(context), request, std::move(prompts));
}

}  // namespace perigee
