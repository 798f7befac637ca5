#include "main/speculation_flag.h"

#include <fmt/core.h>

#include "server/fields.h"

namespace perigee {
namespace {

constexpr int64_t kMostMatch = 64;

// vLLM's defaults: where one bound is given it is the other one, too.
NgramMatch ngram_match(Fields& fields) {
  const auto least = fields.integer("prompt_lookup_min", 1, kMostMatch);
  const auto most = fields.integer("prompt_lookup_max", 1, kMostMatch);
  NgramMatch match;
  match.least = static_cast<int32_t>(least.value_or(most.value_or(match.least)));
  match.most = static_cast<int32_t>(most.value_or(least.value_or(match.most)));
  if (match.least > match.most)
    fields.fail("prompt_lookup_min",
                fmt::format("is {}, over prompt_lookup_max, which is {}: swap the two", match.least, match.most));
  return match;
}

Status read(const Json& object, RankConfig& rank) {
  Fields fields(object);
  if (fields.choice("method", {"ngram", "eagle3"}) == "eagle3")
    return Error(Code::kUnavailable, "method eagle3 is not in this version; use ngram, or leave the flag out");
  // Drafts of ngram are certain, and then both of these accept a draft with the model's own probability for it.
  fields.choice("rejection_sample_method", {"probabilistic", "strict"});
  const auto num_drafts = fields.integer("num_speculative_tokens", 1, kMaxDrafts);
  const NgramMatch match = ngram_match(fields);
  if (fields.any("method") == nullptr) fields.fail("method", "is missing: it must be \"ngram\"");
  if (!num_drafts) fields.fail("num_speculative_tokens", fmt::format("is missing: 1 to {} tokens", kMaxDrafts));
  fields.refuse_unknown();
  RETURN_IF_ERROR(fields.status());
  if (rank.device == Device::kCuda)
    return Error(Code::kUnavailable, "this version drafts on a CPU alone; leave the flag out, or use --device cpu");
  rank.limits.num_drafts = static_cast<int32_t>(*num_drafts);
  rank.ngram = match;
  return {};
}

}  // namespace

Status read_speculative_config(const std::string& text, RankConfig& rank) {
  constexpr const char* kFlag = "speculative-config";
  if (text.empty()) return {};
  const Result<Json> object = parse_json(text);
  if (!object.ok()) return bad_input(fmt::format("--{}: {}", kFlag, object.error().message), kFlag);
  if (!object->is_object())
    return bad_input(fmt::format("--{} must be a JSON object such as {{\"method\": \"ngram\", "
                                 "\"num_speculative_tokens\": 3}}, got a value of type {}",
                                 kFlag, object->type_name()),
                     kFlag);
  const Status status = read(*object, rank);
  if (status.ok()) return {};
  return Error(status.error().code, fmt::format("--{}: {}", kFlag, status.error().message), kFlag);
}

}  // namespace perigee
