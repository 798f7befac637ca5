#include "main/speculation_flag.h"

#include <fmt/core.h>

#include <filesystem>

#include "base/log.h"
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

void read_draft_model(Fields& fields, RankConfig& rank) {
  constexpr size_t kMaxPath = 4096;
  rank.draft_model = fields.text("model", kMaxPath).value_or("");
  if (rank.draft_model.empty()) fields.fail("model", "is missing: the folder of a draft model");
  fields.text("draft_attention_backend", kMaxPath);  // kernels follow from device and sizes
  if (fields.flag("use_local_argmax_reduction", false))
    log_info(
        "use_local_argmax_reduction has no effect: drafts are always greedy, each the largest of the ranks' largest "
        "logits");
  const auto ranks = fields.integer("draft_tensor_parallel_size", 1, 1 << 16);
  const int64_t all = rank.shard().size;
  if (ranks && *ranks != all && *ranks != 1)
    fields.fail("draft_tensor_parallel_size",
                fmt::format("is {}: a draft is divided among the {} ranks of its target, or each has all of it (1)",
                            *ranks, all));
  if (ranks == 1 && all > 1) rank.draft_layer = Eagle3::Layer::kWhole;
  const auto cache =
      fields.choice("draft_kv_cache_dtype", {"auto", "bfloat16", "bf16", "fp8", "fp8_e4m3", "fp8_ds_mla"});
  if (cache && *cache != "auto")
    rank.draft_cache = cache->starts_with("bf") ? LatentFormat::kBF16
                       : *cache == "fp8_ds_mla" ? LatentFormat::kF8Tiles
                                                : LatentFormat::kF8E4M3;
}

// Of each place that drafts get there and are accepted -> of each place, given those before. vLLM's values.
std::vector<float> synthetic_rates(Fields& fields, int64_t num_drafts) {
  constexpr const char* kKey = "synthetic_acceptance_rates";
  const Json* list = fields.array(kKey, kMaxDrafts);
  std::vector<float> rates;
  double before = 1;
  for (const Json& rate : list == nullptr ? Json::Array() : list->as_array()) {
    const double value = rate.is_number() ? rate.as_double() : -1;
    if (!(value >= 0 && value <= before)) break;
    rates.push_back(before > 0 ? static_cast<float>(value / before) : 0);
    before = value;
  }
  if (list == nullptr || std::ssize(rates) != num_drafts || std::ssize(list->as_array()) != num_drafts)
    fields.fail(kKey, fmt::format("must be {} numbers from 1 to 0, none larger than the one before it: the share of "
                                  "verifying rows that accept their draft at each place",
                                  num_drafts));
  return rates;
}

// Drafts are certain. Then the first three accept a draft with the model's own probability for it, which no method that
// keeps the model's distribution exceeds: a draft d1 ... dk is accepted as often as the model would write it.
void read_rejection(Fields& fields, int64_t num_drafts, RankConfig& rank) {
  const auto method = fields.choice("rejection_sample_method", {"probabilistic", "strict", "block", "synthetic"});
  if (method == "synthetic") rank.synthetic_rates = synthetic_rates(fields, num_drafts);
}

Status read(const Json& object, RankConfig& rank) {
  Fields fields(object);
  RankConfig asked = rank;
  const auto method = fields.choice("method", {"ngram", "eagle3"});
  const auto num_drafts = fields.integer("num_speculative_tokens", 1, kMaxDrafts);
  read_rejection(fields, num_drafts.value_or(0), asked);
  if (method == "ngram") asked.ngram = ngram_match(fields);
  if (method == "eagle3") read_draft_model(fields, asked);
  if (fields.any("method") == nullptr) fields.fail("method", "is missing: it must be \"ngram\" or \"eagle3\"");
  if (!num_drafts) fields.fail("num_speculative_tokens", fmt::format("is missing: 1 to {} tokens", kMaxDrafts));
  fields.refuse_unknown();
  RETURN_IF_ERROR(fields.status());
  asked.limits.num_drafts = static_cast<int32_t>(*num_drafts);
  rank = std::move(asked);
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

Status check_draft_folder(const std::string& path) {
  if (path.empty()) return {};
  std::error_code unknown;
  const bool is_folder = std::filesystem::is_directory(path, unknown);
  if (is_folder && std::filesystem::exists(std::filesystem::path(path) / "config.json", unknown)) return {};
  return bad_input(
      fmt::format(
          "--speculative-config: \"model\" is {}, {}: give the folder of an EAGLE-3 draft on this machine, with "
          "config.json and weights (models are not downloaded)",
          path,
          is_folder                                ? "a folder without config.json"
          : std::filesystem::exists(path, unknown) ? "which is a file"
                                                   : "which does not exist"),
      "speculative-config");
}

}  // namespace perigee
