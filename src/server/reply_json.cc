#include "server/reply_json.h"

#include <algorithm>
#include <cmath>

namespace perigee {

Json usage_json(const Usage& usage) {
  Json details(Json::Object{{"cached_tokens", usage.cached_tokens}});
  return Json(Json::Object{{"prompt_tokens", usage.prompt_tokens},
                           {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
                           {"completion_tokens", usage.completion_tokens},
                           {"prompt_tokens_details", std::move(details)}});
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
      map.set(str_cat(id), Json(Json::Object{{"logprob", clamp_logprob(logprob)},
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

}  // namespace perigee
