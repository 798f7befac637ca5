#include "server/refused_fields.h"

#include <vector>

namespace perigee {

namespace {

struct Refused {
  std::string_view name;
  std::string_view way_out;
  Json harmless = {};  // the value that asks for nothing
};

constexpr std::string_view kGrammar = "it needs grammar support, which this version lacks; leave it out";
constexpr std::string_view kMedia = "this server takes text and token ids only";
constexpr std::string_view kSampler = "this sampler is not offered; use temperature, top_p, top_k or min_p";
constexpr std::string_view kBeams = "beam search is not offered; use n with a temperature";
constexpr std::string_view kAdapters = "this server has no adapters; leave it out";
constexpr std::string_view kSplit = "split prefill and decode are not built in; leave it out";
constexpr std::string_view kCut = "send the part of the prompt that you want";
constexpr std::string_view kLeaveOut = "leave it out";
constexpr std::string_view kMaxTokens = "use max_tokens";
constexpr std::string_view kTools = "use tools and tool_choice";

const std::vector<Refused>& refused_by_both() {
  static const std::vector<Refused> kTable = {
      // Constraints on the output.
      {"structured_outputs", kGrammar},
      {"guided_json", kGrammar},
      {"guided_regex", kGrammar},
      {"guided_choice", kGrammar},
      {"guided_grammar", kGrammar},
      {"guided_decoding_backend", kGrammar},
      {"guided_whitespace_pattern", kGrammar},
      {"regex", kGrammar},
      {"ebnf", kGrammar},
      {"grammar", kGrammar},
      {"json_schema", kGrammar},
      {"structural_tag", kGrammar},
      {"allowed_token_ids", kGrammar, Json(Json::Array{})},
      {"bad_words", kGrammar, Json(Json::Array{})},
      // Sampling.
      {"logits_processors", "use logit_bias", Json(Json::Array{})},
      {"custom_logit_processor", "use logit_bias"},
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
      {"kv_transfer_params", kSplit},
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
      {"continue_final_message", "use /v1/completions with the rendered prompt", Json(false)},
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
  if (const Json* format = fields.object("response_format")) {
    const Json* type = format->find("type");
    if (type == nullptr || !(*type == Json("text")))
      fields.fail("response_format", str_cat("is not supported: ", kGrammar));
  }
  read_harmless(fields);
}

}  // namespace perigee
