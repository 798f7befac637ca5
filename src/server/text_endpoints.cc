#include "server/text_endpoints.h"

#include <fmt/core.h>

#include <algorithm>

#include "server/chat_request.h"
#include "server/completion_request.h"
#include "server/reply_format.h"
#include "text/detokenizer.h"

namespace perigee {

namespace {

Error no_tokenizer() {
  return bad_input("this model has no tokenizer files; it is served with token ids only");
}

// What /tokenize is asked for: a prompt or a conversation.
struct TokenizeRequest {
  const Json* prompt = nullptr;
  std::optional<Conversation> conversation;
  Json template_kwargs;
  bool return_token_strs = false;
};

Status check_model(Fields& fields, const RequestContext& context) {
  const std::string asked = fields.text("model", 1024).value_or("");
  RETURN_IF_ERROR(fields.status());
  const Result<std::string> name = served_name(context.served_names, asked);
  return name.ok() ? Status() : Status(name.error());
}

Result<TokenizeRequest> read_tokenize(const Json& body, const RequestContext& context) {
  TokenizeRequest request;
  Fields fields(body);
  RETURN_IF_ERROR(check_model(fields, context));
  request.return_token_strs = fields.flag("return_token_strs", false);
  fields.flag("add_special_tokens", true);  // Kimi's tokenizer adds none
  request.prompt = fields.any("prompt");
  const ConversationFields chat(fields);
  request.template_kwargs = read_template_kwargs(fields, context.caps);
  fields.refuse("chat_template", "only the model's own template is used; leave it out");
  for (const char* name : {"mm_processor_kwargs", "media_io_kwargs"})
    fields.refuse(name, "this server takes text only", Json(Json::Object{}));
  if (request.prompt != nullptr && chat.messages != nullptr)
    fields.fail("prompt", "and messages exclude each other; send one of them");
  if (chat.tools != nullptr && chat.messages == nullptr) fields.fail("tools", "needs messages");
  if (chat.messages == nullptr && (request.prompt == nullptr || !request.prompt->is_string()))
    fields.fail("prompt", "must be a string (or send messages)");
  fields.unknown();
  RETURN_IF_ERROR(fields.status());
  if (chat.messages != nullptr) {
    ASSIGN_OR_RETURN(request.conversation, read_conversation(chat, context.caps));
  }
  return request;
}

Result<std::vector<int32_t>> ids_of(const TokenizeRequest& request, const RequestContext& context,
                                    const ModelText& text) {
  if (!request.conversation)
    return text.tokenizer()->encode(request.prompt->as_string(), SpecialsIn::kRecognised, max_tokenized(context));
  if (!text.has_chat()) return bad_input("this model has no chat template", "messages");
  const Conversation& chat = *request.conversation;
  return text.encode_chat(chat.messages, chat.tools, request.template_kwargs, chat.end, max_tokenized(context));
}

}  // namespace

size_t max_tokenized(const RequestContext& context) {
  constexpr size_t kContexts = 4, kLeast = 1u << 16;
  return std::max(kLeast, kContexts * static_cast<size_t>(context.max_model_len));
}

Result<Json> tokenize(const Json& body, const RequestContext& context, const ModelText& text) {
  if (text.tokenizer() == nullptr) return no_tokenizer();
  ASSIGN_OR_RETURN(const TokenizeRequest request, read_tokenize(body, context));
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ids_of(request, context, text));
  if (ids.size() > max_tokenized(context))
    return bad_input(fmt::format("the text has more than {} tokens, the limit of this endpoint; send it in pieces",
                                 max_tokenized(context)),
                     request.conversation ? "messages" : "prompt");
  Json reply(Json::Object{{"count", static_cast<int64_t>(ids.size())},
                          {"max_model_len", context.max_model_len},
                          {"tokens", ids_json(ids)}});
  Json::Array names;
  if (request.return_token_strs)
    for (const int32_t id : ids) names.emplace_back(text.token_text(id, false));
  reply.set("token_strs", request.return_token_strs ? Json(std::move(names)) : Json());
  return reply;
}

Result<Json> detokenize(const Json& body, const RequestContext& context, const ModelText& text) {
  if (text.tokenizer() == nullptr) return no_tokenizer();
  Fields fields(body);
  RETURN_IF_ERROR(check_model(fields, context));
  const Json* tokens = fields.any("tokens");
  if (tokens == nullptr || !tokens->is_array()) fields.fail("tokens", "must be an array of token ids");
  fields.unknown();
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, read_token_ids(tokens->as_array(), context.vocab, "tokens"));
  return Json(Json::Object{{"prompt", decode(*text.tokenizer(), ids, false)}});
}

Result<Json> tokenizer_info(const ModelText& text) {
  if (text.tokenizer() == nullptr) return Error(Code::kNotFound, "this model has no tokenizer files");
  return text.tokenizer_config();
}

}  // namespace perigee
