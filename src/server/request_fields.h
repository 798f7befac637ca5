// The request members that completions and chat share, validated: nothing invalid passes this line.
// Every fault is a 400 that names the field and its range or cap.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "control/sampling.h"
#include "server/fields.h"
#include "server/transfer_params.h"

namespace perigee {

struct RequestCaps {
  JsonLimits json = {.max_depth = 128,
                     .max_values = 1u << 15,
                     .max_members = 4096,
                     .max_elements = 1u << 16,
                     .max_key_bytes = 4096,
                     .max_string_bytes = 32u << 20};  // while a body is parsed; see caps_for()
  size_t max_body_members = 256;
  int64_t max_n = 8;
  size_t max_prompts = 32;
  int64_t max_logprobs = 20;
  size_t max_stops = 8, max_stop_bytes = 256;
  size_t max_stop_ids = 64;
  size_t max_logit_bias = 1024;
  size_t max_messages = 4096, max_parts = 4096;
  size_t max_tools = 128, max_tool_name_bytes = 64, max_tool_schema_bytes = 64u << 10;
  size_t max_grammar_bytes = 256u << 10, max_grammar_choices = 16384;  // of a regex, a schema's text; of a list
  size_t max_template_kwargs = 64;
  size_t max_string_bytes = 256;  // cache_salt, names, ids
  double max_timeout_s = 86400;
};

// What a request that says nothing about sampling gets: the model's generation_config.json, else these.
struct SamplingDefaults {
  double temperature = 1.0;
  double top_p = 1.0;
  int64_t top_k = 0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;
};

// What validation needs to know of the model that is served.
struct RequestContext {
  RequestCaps caps;
  std::vector<std::string> served_names;
  SamplingDefaults defaults;
  int64_t vocab = 0;
  int64_t max_model_len = 0;
  int64_t max_choices = 0;  // that run and wait at once
  std::vector<int32_t> eos_ids;
  bool has_tokenizer = true;
  bool kimi_strict = false;  // chat refuses what Kimi's own API refuses
};

struct RequestFields {
  std::string model;        // "": the default one
  SamplingParams sampling;  // max_tokens and seed are set by the handler
  std::optional<int64_t> max_tokens;
  std::optional<uint64_t> seed;
  int32_t n = 1;
  int32_t priority = 0;
  double timeout_s = 0;
  std::string cache_salt;
  int32_t speculation_max_context = -1;  // see EngineRequest
  TransferParams transfer;               // kv_transfer_params
  std::vector<std::string> stops;
  bool include_stop = false;
  bool ignore_eos = false;
  bool skip_special_tokens = true;
  bool stream = false, include_usage = false, continuous_usage = false;
  bool return_token_ids = false;
  bool tokens_as_ids = false;  // logprob tokens read "token_id:N"
  std::vector<std::string> unknown;
};

// `caps` with JSON limits that a request for this model may need: no array longer than a prompt of token ids, no string
// longer than a prompt of the longest tokens (0: none is known).
RequestCaps caps_for(RequestCaps caps, int64_t max_model_len, size_t longest_token_bytes);

// Parses a body that must be one JSON object. Errors: kTooLarge, kBadInput.
Result<Json> parse_body(const std::string& body, const RequestCaps& caps);

// Reads the shared members; faults land in `fields`. `logprobs` are the caller's: the two APIs spell them differently.
RequestFields read_request_fields(Fields& fields, const RequestContext& context);

// The served model that a request names, "" for the default one. Errors: kNotFound with the names there are.
Result<std::string> served_name(const std::vector<std::string>& served, const std::string& asked);

enum class Api { kCompletions, kChat };

// The fields that this server refuses: what exists elsewhere but not here, and would give a wrong answer if ignored.
// 400 for the first of them that asks for something; the values that ask for nothing pass (best_of equal to `n`,
// modalities ["text"]). Also reads the fields that are accepted and have no effect, each with its type.
void refuse_unsupported(Fields& fields, Api api, int64_t n);

}  // namespace perigee
