#include "server/request_fields.h"

#include <algorithm>
#include <charconv>
#include <limits>

namespace perigee {

namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

void read_stops(Fields& fields, const RequestContext& context, RequestFields& out) {
  const RequestCaps& caps = context.caps;
  const Json* value = fields.any("stop");
  if (value == nullptr) return;
  Json::Array list;
  if (value->is_array())
    list = value->as_array();
  else
    list.push_back(*value);
  if (list.size() > caps.max_stops)
    return fields.fail("stop", str_cat("must have at most ", caps.max_stops, " strings, got ", list.size()));
  for (const Json& stop : list) {
    if (!stop.is_string()) return fields.fail("stop", "must be a string or an array of strings");
    if (stop.as_string().empty()) return fields.fail("stop", "must not hold an empty string; leave it out");
    if (stop.as_string().size() > caps.max_stop_bytes)
      return fields.fail("stop", str_cat("strings must be at most ", caps.max_stop_bytes, " bytes"));
    out.stops.push_back(stop.as_string());
  }
  if (!out.stops.empty() && !context.has_tokenizer)
    fields.fail("stop", "needs a tokenizer, which this model lacks; use stop_token_ids");
}

void read_stop_ids(Fields& fields, const RequestContext& context, RequestFields& out) {
  if (!fields.flag("ignore_eos", false)) out.sampling.stop_ids = context.eos_ids;
  const Json* list = fields.array("stop_token_ids", context.caps.max_stop_ids);
  if (list == nullptr) return;
  for (const Json& entry : list->as_array()) {
    const auto id = as_integer(entry);
    if (!id || *id < 0 || *id >= context.vocab)
      return fields.fail("stop_token_ids", str_cat("must hold ids between 0 and ", context.vocab - 1));
    out.sampling.stop_ids.push_back(static_cast<int32_t>(*id));
  }
}

void read_logit_bias(Fields& fields, const RequestContext& context, RequestFields& out) {
  const Json* map = fields.object("logit_bias");
  if (map == nullptr) return;
  if (map->as_object().size() > context.caps.max_logit_bias)
    return fields.fail("logit_bias", str_cat("must have at most ", context.caps.max_logit_bias, " entries"));
  for (const auto& [key, value] : map->as_object()) {
    int64_t id = -1;
    const auto [end, ec] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (ec != std::errc() || end != key.data() + key.size() || id < 0 || id >= context.vocab)
      return fields.fail("logit_bias", str_cat("keys must be token ids between 0 and ", context.vocab - 1));
    const double bias = value.is_number() ? value.as_double() : 1e9;
    if (!(bias >= -100 && bias <= 100)) return fields.fail("logit_bias", "values must be numbers between -100 and 100");
    out.sampling.logit_bias.emplace_back(static_cast<int32_t>(id), static_cast<float>(bias));
  }
}

void read_sampling(Fields& fields, const RequestContext& context, RequestFields& out) {
  const SamplingDefaults& defaults = context.defaults;
  SamplingParams& sampling = out.sampling;
  double temperature = fields.real("temperature", 0, 100).value_or(defaults.temperature);
  if (temperature < 1e-5)
    temperature = 0;  // greedy
  else if (temperature < 0.01)
    temperature = 0.01;
  sampling.temperature = static_cast<float>(temperature);
  sampling.top_p = static_cast<float>(fields.real("top_p", 0, 1).value_or(defaults.top_p));
  if (sampling.top_p == 0.0f)
    fields.fail("top_p", "must be greater than 0; use temperature 0 for the most likely token");
  const int64_t top_k = fields.integer("top_k", -1, kInt32Max).value_or(defaults.top_k);
  sampling.top_k = top_k < 0 ? 0 : static_cast<int32_t>(top_k);  // -1 and 0: all
  sampling.min_p = static_cast<float>(fields.real("min_p", 0, 1).value_or(defaults.min_p));
  sampling.presence_penalty = static_cast<float>(fields.real("presence_penalty", -2, 2).value_or(0));
  sampling.frequency_penalty = static_cast<float>(fields.real("frequency_penalty", -2, 2).value_or(0));
  sampling.repetition_penalty =
      static_cast<float>(fields.real("repetition_penalty", 0.01, 100).value_or(defaults.repetition_penalty));
  sampling.min_tokens = static_cast<int32_t>(fields.integer("min_tokens", 0, kInt32Max).value_or(0));
  const auto seed = fields.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  if (seed) out.seed = static_cast<uint64_t>(*seed);
  const auto prompt_logprobs = fields.integer("prompt_logprobs", -1, context.caps.max_logprobs);
  if (prompt_logprobs == -1)
    fields.fail("prompt_logprobs", str_cat("must be between 0 and ", context.caps.max_logprobs));
  if (prompt_logprobs) sampling.prompt_logprobs = static_cast<int32_t>(*prompt_logprobs);
}

void read_stream(Fields& fields, RequestFields& out) {
  out.stream = fields.flag("stream", false);
  const Json* options = fields.object("stream_options");
  if (options == nullptr) return;
  if (!out.stream) return fields.fail("stream_options", "is only allowed with \"stream\": true");
  Fields members(*options, "stream_options.");
  out.include_usage = members.flag("include_usage", false);
  out.continuous_usage = members.flag("continuous_usage_stats", false) && out.include_usage;
  members.flag("include_obfuscation", false);  // padding against listeners on the wire; there is none
  members.unknown();
  fields.adopt(members);
}

}  // namespace

RequestCaps caps_for(RequestCaps caps, int64_t max_model_len, size_t longest_token_bytes) {
  constexpr size_t kLeastString = 1u << 20;
  const auto length = static_cast<size_t>(max_model_len);
  caps.json.max_elements = std::max(caps.json.max_elements, length);
  caps.json.max_values += length / 4;  // two prompts of ids, and 32,768 other values
  caps.json.max_string_bytes =
      std::min(caps.json.max_string_bytes, std::max(kLeastString, length * longest_token_bytes));
  return caps;
}

Result<Json> parse_body(const std::string& body, const RequestCaps& caps) {
  JsonLimits limits = caps.json;
  limits.max_bytes = body.size() + 1;  // the HTTP layer holds the cap of bodies
  ASSIGN_OR_RETURN(Json json, parse_json(body, limits));
  if (!json.is_object()) return bad_input(str_cat("the body must be a JSON object, got ", json.type_name()));
  if (json.as_object().size() > caps.max_body_members)
    return bad_input(
        str_cat("the body must have at most ", caps.max_body_members, " members, got ", json.as_object().size()));
  return json;
}

RequestFields read_request_fields(Fields& fields, const RequestContext& context) {
  const RequestCaps& caps = context.caps;
  RequestFields out;
  out.model = fields.text("model", 1024).value_or("");
  read_sampling(fields, context, out);
  read_stops(fields, context, out);
  read_stop_ids(fields, context, out);
  read_logit_bias(fields, context, out);
  read_stream(fields, out);
  out.n = static_cast<int32_t>(fields.integer("n", 1, caps.max_n).value_or(1));
  out.include_stop = fields.flag("include_stop_str_in_output", false);
  out.skip_special_tokens = fields.flag("skip_special_tokens", true);
  out.return_token_ids = fields.flag("return_token_ids", false);
  out.tokens_as_ids = fields.flag("return_tokens_as_token_ids", false) || !context.has_tokenizer;
  out.priority = static_cast<int32_t>(fields.integer("priority", -kInt32Max - 1, kInt32Max).value_or(0));
  out.timeout_s = fields.real("timeout", 0, caps.max_timeout_s).value_or(0);
  out.cache_salt = fields.text("cache_salt", caps.max_string_bytes).value_or("");
  if (out.stream && out.sampling.prompt_logprobs >= 0)
    fields.fail("prompt_logprobs", "is not available with \"stream\": true; send the request without stream");
  return out;
}

Result<std::string> served_name(const std::vector<std::string>& served, const std::string& asked) {
  if (asked.empty()) return served.front();
  std::string names;
  for (const std::string& name : served) {
    if (name == asked) return name;
    names += (names.empty() ? "'" : ", '") + name + "'";
  }
  return Error(Code::kNotFound, "no such model; this server has " + names, "model");
}

}  // namespace perigee
