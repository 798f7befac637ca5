// Both request parsers over arbitrary bytes: never a crash, every refusal is a 400 or a 413 that names what is wrong
// and shows nothing of the process, every acceptance is inside the limits that the engine relies on.
#include <cmath>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "server/api_error.h"
#include "server/chat_request.h"
#include "server/completion_request.h"

namespace {

perigee::RequestContext context_of(uint8_t variant) {
  perigee::RequestContext context;
  context.vocab = 2304;
  context.max_model_len = 4096;
  context.eos_ids = {2049, 2050};
  context.has_tokenizer = (variant & 1) == 0;
  return context;
}

void check_error(const perigee::Error& error) {
  CHECK(!error.message.empty());
  CHECK(error.code == perigee::Code::kBadInput || error.code == perigee::Code::kTooLarge, error.message);
  const perigee::HttpReply reply = perigee::error_reply(error);
  CHECK(reply.status == 400 || reply.status == 413);
  CHECK(perigee::parse_json(reply.body).ok(), "an error body that is no JSON");
}

void check_fields(const perigee::RequestFields& fields, const perigee::RequestContext& context) {
  const perigee::SamplingParams& s = fields.sampling;
  CHECK(std::isfinite(s.temperature) && s.temperature >= 0);
  CHECK(s.top_p > 0 && s.top_p <= 1 && s.min_p >= 0 && s.min_p <= 1 && s.top_k >= 0);
  CHECK(std::abs(s.presence_penalty) <= 2 && std::abs(s.frequency_penalty) <= 2 && s.repetition_penalty > 0);
  CHECK(fields.n >= 1 && fields.n <= context.caps.max_n);
  CHECK(s.logprobs >= -1 && s.logprobs <= context.caps.max_logprobs);
  CHECK(s.prompt_logprobs >= -1 && s.prompt_logprobs <= context.caps.max_logprobs);
  CHECK(!fields.max_tokens || (*fields.max_tokens >= 0 && *fields.max_tokens <= context.max_model_len));
  for (const int32_t id : s.stop_ids) CHECK(id >= 0 && id < context.vocab);
  for (const auto& [id, bias] : s.logit_bias) CHECK(id >= 0 && id < context.vocab && std::abs(bias) <= 100);
  for (const std::string& stop : fields.stops) CHECK(!stop.empty() && stop.size() <= context.caps.max_stop_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  const perigee::RequestContext context = context_of(size > 0 ? data[size - 1] : 0);
  const auto json = perigee::parse_body(body, context.caps);
  if (!json.ok()) {
    check_error(json.error());
    return 0;
  }
  const auto completion = perigee::parse_completion_request(*json, context);
  if (completion.ok()) {
    check_fields(completion->fields, context);
    CHECK(!completion->prompts.empty() && completion->prompts.size() <= context.caps.max_prompts);
  } else {
    check_error(completion.error());
  }
  const auto chat = perigee::parse_chat_request(*json, context);
  if (chat.ok()) {
    check_fields(chat->fields, context);
    CHECK(chat->conversation.messages.is_array() && !chat->conversation.messages.as_array().empty());
    CHECK(chat->template_kwargs.is_object());
  } else {
    check_error(chat.error());
  }
  return 0;
}
