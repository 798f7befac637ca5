#include "server/model_text.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "text/detokenizer.h"

namespace perigee {

namespace {

void take_number(const Json& config, const char* name, double low, double high, double& out) {
  const Json* value = config.find(name);
  if (value == nullptr || value->is_null()) return;
  const double number = value->is_number() ? value->as_double() : std::nan("");
  if (number >= low && number <= high)
    out = number;
  else
    log_warning("generation_config.json: ", name, " ", dump_json(*value).substr(0, 100), " is not a number from ", low,
                " to ", high, ": ignored");
}

}  // namespace

SamplingDefaults read_generation_config(const Json& config) {
  SamplingDefaults defaults;
  take_number(config, "temperature", 0, 100, defaults.temperature);
  take_number(config, "top_p", 1e-6, 1, defaults.top_p);
  take_number(config, "min_p", 0, 1, defaults.min_p);
  take_number(config, "repetition_penalty", 0.01, 100, defaults.repetition_penalty);
  double top_k = 0;
  take_number(config, "top_k", -1, 1e9, top_k);
  defaults.top_k = static_cast<int64_t>(std::max(top_k, 0.0));
  return defaults;
}

std::string ModelText::token_text(int32_t id, bool as_id) const {
  if (as_id || tokenizer_ == nullptr) return fmt::format("token_id:{}", id);
  Utf8Repair repair;
  std::string text;
  repair.push(tokenizer_->bytes(id), text);
  repair.finish(text);
  return text;
}

std::shared_ptr<const ModelText> ModelText::make(std::shared_ptr<const Tokenizer> tokenizer, ChatEncoder chat,
                                                 bool thinks, SamplingDefaults defaults) {
  auto text = std::make_shared<ModelText>();
  text->tokenizer_ = std::move(tokenizer);
  text->chat_ = std::move(chat);
  text->thinks_ = thinks;
  text->defaults_ = defaults;
  if (text->tokenizer_) text->tokenizer_config_ = Json(Json::Object{});
  return text;
}

}  // namespace perigee
