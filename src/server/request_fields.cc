#include "server/request_fields.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <vector>

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
    return fields.fail("stop", fmt::format("must have at most {} strings, got {}", caps.max_stops, list.size()));
  for (const Json& stop : list) {
    if (!stop.is_string()) return fields.fail("stop", "must be a string or an array of strings");
    if (stop.as_string().empty()) return fields.fail("stop", "must not hold an empty string; leave it out");
    if (stop.as_string().size() > caps.max_stop_bytes)
      return fields.fail("stop", fmt::format("strings must be at most {} bytes", caps.max_stop_bytes));
    out.stops.push_back(stop.as_string());
  }
  if (!out.stops.empty() && !context.has_tokenizer)
    fields.fail("stop", "needs a tokenizer, which this model lacks; use stop_token_ids");
}

void read_stop_ids(Fields& fields, const RequestContext& context, RequestFields& out) {
  out.ignore_eos = fields.flag("ignore_eos", false);
  if (!out.ignore_eos) out.sampling.stop_ids = context.eos_ids;
  const Json* list = fields.array("stop_token_ids", context.caps.max_stop_ids);
  if (list == nullptr) return;
  for (const Json& entry : list->as_array()) {
    const auto id = as_integer(entry);
    if (!id || *id < 0 || *id >= context.vocab)
      return fields.fail("stop_token_ids", fmt::format("must hold ids between 0 and {}", context.vocab - 1));
    out.sampling.stop_ids.push_back(static_cast<int32_t>(*id));
  }
}

void read_logit_bias(Fields& fields, const RequestContext& context, RequestFields& out) {
  const Json* map = fields.object("logit_bias");
  if (map == nullptr) return;
  if (map->as_object().size() > context.caps.max_logit_bias)
    return fields.fail("logit_bias", fmt::format("must have at most {} entries", context.caps.max_logit_bias));
  for (const auto& [key, value] : map->as_object()) {
    int64_t id = -1;
    const auto [end, ec] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (ec != std::errc() || end != key.data() + key.size() || id < 0 || id >= context.vocab)
      return fields.fail("logit_bias", fmt::format("keys must be token ids between 0 and {}", context.vocab - 1));
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
    fields.fail("prompt_logprobs", fmt::format("must be between 0 and {}", context.caps.max_logprobs));
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
  if (!json.is_object()) return bad_input(fmt::format("the body must be a JSON object, got {}", json.type_name()));
  if (json.as_object().size() > caps.max_body_members)
    return bad_input(
        fmt::format("the body must have at most {} members, got {}", caps.max_body_members, json.as_object().size()));
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
  out.speculation_max_context =
      static_cast<int32_t>(fields.integer("speculation_max_context", 0, kInt32Max).value_or(-1));
  out.cache_salt = fields.text("cache_salt", caps.max_string_bytes).value_or("");
  if (const Json* params = fields.object("kv_transfer_params")) out.transfer = read_transfer_params(*params, fields);
  if (out.stream && out.transfer.leases())
    fields.fail("stream", "must be false beside do_remote_decode: the whole reply says where the prompt's cache is");
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

namespace {

struct Refused {
  std::string_view name;
  std::string_view way_out;
  Json harmless = {};  // the value that asks for nothing
};

constexpr std::string_view kGrammar = "use structured_outputs";
constexpr std::string_view kBias = "use logit_bias";
constexpr std::string_view kMedia = "this server takes text and token ids only";
constexpr std::string_view kSampler = "this sampler is not offered; use temperature, top_p, top_k or min_p";
constexpr std::string_view kBeams = "beam search is not offered; use n with a temperature";
constexpr std::string_view kAdapters = "this server has no adapters; leave it out";
constexpr std::string_view kSplit = "images are not read, on this server or another; leave it out";
constexpr std::string_view kCut = "send the part of the prompt that you want";
constexpr std::string_view kLeaveOut = "leave it out";
constexpr std::string_view kMaxTokens = "use max_tokens";
constexpr std::string_view kTools = "use tools and tool_choice";

const std::vector<Refused>& refused_by_both() {
  static const std::vector<Refused> kTable = {
      // Constraints on the output.
      {"regex", kGrammar},
      {"ebnf", kGrammar},
      {"grammar", kGrammar},
      {"json_schema", kGrammar},
      {"structural_tag", kGrammar},
      {"allowed_token_ids", kBias, Json(Json::Array{})},
      {"bad_words", kBias, Json(Json::Array{})},
      // Sampling.
      {"logits_processors", kBias, Json(Json::Array{})},
      {"custom_logit_processor", kBias},
      {"typical_p", kSampler, Json(1)},
      {"top_a", kSampler, Json(0)},
      {"tfs_z", kSampler, Json(1)},
      {"mirostat", kSampler, Json(0)},
      {"dry_multiplier", kSampler, Json(0)},
      {"xtc_probability", kSampler, Json(0)},
      {"repeat_penalty", "use repetition_penalty"},
      {"repetition_detection", kLeaveOut},
      {"watermarking", kLeaveOut, Json(false)},
      {"use_beam_search", kBeams, Json(false)},
      {"num_beams", kBeams, Json(1)},
      {"length_penalty", "it belongs to beam search; leave it out", Json(1)},
      // Other names of what is offered.
      {"max_new_tokens", kMaxTokens},
      {"max_output_tokens", kMaxTokens},
      {"n_predict", kMaxTokens},
      {"min_new_tokens", "use min_tokens"},
      {"do_sample", "use temperature 0 for the most likely token"},
      {"thinking_token_budget", "leave it out; max_tokens bounds the whole reply", Json(-1)},
      {"thinking_budget", "leave it out; max_tokens bounds the whole reply"},
      // Prompts.
      {"prompt_embeds", kMedia},
      {"input_embeds", kMedia},
      {"multi_modal_data", kMedia},
      {"mm_processor_kwargs", kMedia, Json(Json::Object{})},
      {"media_io_kwargs", kMedia, Json(Json::Object{})},
      {"audio", kMedia},
      {"truncate_prompt_tokens", kCut},
      {"truncation_side", kCut},
      {"chat_template", "only the model's own template is used; leave it out"},
      {"documents", "retrieval documents are not part of this model's prompt format; put them in a message"},
      // Replies.
      {"logprob_token_ids", "use logprobs"},
      {"stream_interval", "every token is sent at once; leave it out", Json(1)},
      {"return_token_offsets", "use return_token_ids", Json(false)},
      {"routed_experts_prompt_start", kLeaveOut, Json(0)},
      {"return_hidden_states", kLeaveOut, Json(false)},
      {"store", "replies are not stored; leave it out", Json(false)},
      {"moderation", kLeaveOut},
      // Deployments.
      {"lora_path", kAdapters},
      {"lora_request", kAdapters},
      {"ec_transfer_params", kSplit},
      {"vllm_xargs", kLeaveOut, Json(Json::Object{})},
      {"custom_params", kLeaveOut, Json(Json::Object{})},
  };
  return kTable;
}

const std::vector<Refused>& refused_by_completions() {
  constexpr std::string_view kChat = "it belongs to /v1/chat/completions";
  static const std::vector<Refused> kTable = {
      {"suffix", "this model does not fill in the middle; leave it out", Json("")},
      {"max_completion_tokens", kMaxTokens},
      {"messages", kChat},
      {"tools", kChat},
      {"tool_choice", kChat, Json("none")},
      {"parallel_tool_calls", kChat, Json(true)},
      {"top_logprobs", "use logprobs with a number"},
      {"thinking", kChat},
      {"reasoning_effort", kChat},
      {"chat_template_kwargs", kChat, Json(Json::Object{})},
  };
  return kTable;
}

const std::vector<Refused>& refused_by_chat() {
  constexpr std::string_view kKwargs = "put it into chat_template_kwargs";
  static const std::vector<Refused> kTable = {
      {"prompt", "it belongs to /v1/completions"},
      {"echo", "use /v1/completions", Json(false)},
      {"functions", kTools},
      {"function_call", kTools},
      {"web_search_options", "declare a tool of your own"},
      {"verbosity", "say it in a message", Json("medium")},
      {"return_prompt_text", "use /tokenize", Json(false)},
      {"separate_reasoning", "use include_reasoning", Json(true)},
      {"stream_reasoning", "use include_reasoning", Json(true)},
      {"reasoning", "use reasoning_effort or thinking"},
      {"enable_thinking", kKwargs},
      {"preserve_thinking", kKwargs},
      {"thinking_effort", kKwargs},
  };
  return kTable;
}

void refuse_all(Fields& fields, const std::vector<Refused>& table) {
  for (const Refused& entry : table) fields.refuse(entry.name, entry.way_out, entry.harmless);
}

// What clients send for services around a model. Here it has no effect, and none is missed.
void read_harmless(Fields& fields) {
  constexpr size_t kMaxTextBytes = 256;
  for (const char* name :
       {"user", "request_id", "session_id", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
    fields.text(name, kMaxTextBytes);
  for (const char* name : {"metadata", "prediction", "prompt_cache_options"}) fields.object(name);
  for (const char* name : {"spaces_between_special_tokens", "add_special_tokens", "return_mm_kwargs"})
    fields.flag(name, true);
  fields.choice("service_tier", {"auto", "default"});
}

}  // namespace

void refuse_unsupported(Fields& fields, Api api, int64_t n) {
  refuse_all(fields, refused_by_both());
  refuse_all(fields, api == Api::kChat ? refused_by_chat() : refused_by_completions());
  fields.refuse("best_of", "use n", Json(n));
  fields.refuse("modalities", kMedia, Json(Json::Array{Json("text")}));
  read_harmless(fields);
}

}  // namespace perigee
