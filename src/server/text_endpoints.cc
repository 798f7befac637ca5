#include "server/text_endpoints.h"

#include "server/chat_request.h"
#include "server/completion_request.h"
#include "server/reply_json.h"
#include "text/detokenizer.h"

namespace perigee {

namespace {

Error no_tokenizer() {
  return bad_input("this checkpoint has no tokenizer files; it is served with token ids only");
}

Result<std::vector<int32_t>> chat_ids(const Json& body, const RequestContext& context, const ModelText& text) {
  if (!text.has_chat()) return bad_input("this checkpoint has no chat template", "messages");
  Fields fields(body);
  const bool open = fields.flag("add_generation_prompt", true);
  const Json* kwargs = fields.object("chat_template_kwargs");
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(const Json messages, read_messages(body.find("messages"), context.caps));
  ASSIGN_OR_RETURN(const Json tools, read_tools(fields.any("tools"), context.caps));
  return text.encode_chat(messages, tools, kwargs == nullptr ? Json(Json::Object{}) : *kwargs, open);
}

Result<std::vector<int32_t>> ids_of(const Json& body, const RequestContext& context, const ModelText& text) {
  if (body.find("messages") != nullptr) return chat_ids(body, context, text);
  const Json* prompt = body.find("prompt");
  if (prompt == nullptr || !prompt->is_string())
    return bad_input("prompt must be a string (or send messages)", "prompt");
  return text.tokenizer()->encode(prompt->as_string(), SpecialsIn::kRecognised);
}

}  // namespace

Result<Json> tokenize(const Json& body, const RequestContext& context, const ModelText& text) {
  if (text.tokenizer() == nullptr) return no_tokenizer();
  Fields fields(body);
  const bool strings = fields.flag("return_token_strs", false);
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ids_of(body, context, text));
  Json reply(Json::Object{{"count", static_cast<int64_t>(ids.size())},
                          {"max_model_len", context.max_model_len},
                          {"tokens", ids_json(ids)}});
  Json::Array names;
  if (strings)
    for (const int32_t id : ids) names.emplace_back(text.token_text(id, false));
  reply.set("token_strs", strings ? Json(std::move(names)) : Json());
  return reply;
}

Result<Json> detokenize(const Json& body, const RequestContext& context, const ModelText& text) {
  if (text.tokenizer() == nullptr) return no_tokenizer();
  const Json* tokens = body.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) return bad_input("tokens must be an array of token ids", "tokens");
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, read_token_ids(tokens->as_array(), context.vocab, "tokens"));
  return Json(Json::Object{{"prompt", decode(*text.tokenizer(), ids, false)}});
}

Result<Json> tokenizer_info(const ModelText& text) {
  if (text.tokenizer() == nullptr) return Error(Code::kNotFound, "this checkpoint has no tokenizer files");
  return text.tokenizer_config();
}

}  // namespace perigee
