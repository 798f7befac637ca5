// ModelText from the files of a model folder, and how it makes prompts of messages.
#include <fmt/core.h>

#include "base/log.h"
#include "base/model_folder.h"
#include "server/model_text.h"
#include "text/chat_prompt.h"

namespace perigee {

namespace {

constexpr size_t kMaxConfigBytes = 16u << 20;

Result<Json> read_json_file(const std::string& dir, const std::string& name) {
  ASSIGN_OR_RETURN(const std::string text, read_in_folder(dir, name, kMaxConfigBytes));
  Result<Json> json = parse_json(text);
  if (!json.ok())
    return Error(json.error().code, fmt::format("{}/{}: {}", dir, name, json.error().message), json.error().field);
  return json;
}

// The template of `dir`: chat_template.jinja, else the one inside tokenizer_config.json; "" when there is none.
Result<std::string> template_source(const std::string& dir, const Json& tokenizer_config) {
  constexpr const char* kFile = "chat_template.jinja";
  if (folder_has(dir, kFile)) return read_in_folder(dir, kFile, kMaxTemplateBytes);
  const Json* inside = tokenizer_config.find("chat_template");
  return inside != nullptr && inside->is_string() ? inside->as_string() : std::string();
}

Result<std::vector<int32_t>> encode(const ChatPrompt& chat, const Tokenizer& tokenizer, const Json& messages,
                                    const Json& tools, const Json& kwargs, PromptEnd end, size_t max_ids) {
  constexpr size_t kLeastOutput = TemplateLimits().max_output_bytes, kMostOutput = 32u << 20, kBytesPerId = 8;
  ChatPromptOptions options;
  options.limits.max_output_bytes = std::clamp(std::min(max_ids, kMostOutput) * kBytesPerId, kLeastOutput, kMostOutput);
  options.end = end;
  options.template_kwargs = kwargs;
  const auto neutralise = [&](std::string_view untrusted) { return tokenizer.neutralise(untrusted); };
  ASSIGN_OR_RETURN(const std::string prompt, chat.render(messages, tools, options, neutralise));
  return tokenizer.encode_rendered(prompt, max_ids);
}

}  // namespace

Result<std::shared_ptr<const ModelText>> ModelText::load(const std::string& dir) {
  auto text = std::make_shared<ModelText>();
  if (folder_has(dir, "generation_config.json")) {
    ASSIGN_OR_RETURN(const Json generation, read_json_file(dir, "generation_config.json"));
    text->defaults_ = read_generation_config(generation);
  }
  if (!folder_has(dir, "tiktoken.model")) {
    log_warning(dir, " has no tiktoken.model: served with token ids only");
    return std::shared_ptr<const ModelText>(std::move(text));
  }
  ASSIGN_OR_RETURN(text->tokenizer_config_, read_json_file(dir, "tokenizer_config.json"));
  ASSIGN_OR_RETURN(text->tokenizer_, Tokenizer::load(dir));
  ASSIGN_OR_RETURN(const std::string source, template_source(dir, text->tokenizer_config_));
  if (source.empty()) {
    log_warning(dir, " has no chat template: served without /v1/chat/completions");
    return std::shared_ptr<const ModelText>(std::move(text));
  }
  text->tokenizer_config_.set("chat_template", source);
  text->thinks_ = source.find("<think>") != std::string::npos;
  Result<ChatPrompt> chat = ChatPrompt::create(source);
  if (!chat.ok()) return Error(chat.error().code, dir + ": " + chat.error().message);
  text->chat_ = [chat = *chat, tokenizer = text->tokenizer_](const Json& messages, const Json& tools,
                                                             const Json& kwargs, PromptEnd end, size_t max_ids) {
    return encode(chat, *tokenizer, messages, tools, kwargs, end, max_ids);
  };
  return std::shared_ptr<const ModelText>(std::move(text));
}

}  // namespace perigee
