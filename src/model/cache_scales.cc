#include "model/cache_scales.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/file.h"
#include "model/layer_weights.h"

namespace perigee {
namespace {

constexpr size_t kMostBytes = 1 << 20, kMostMembers = 4096, kMostKeyBytes = 256, kMostStringBytes = 4096;
constexpr std::string_view kScales = "scales", kSuffix = ".k_scale";

std::string field_of(const std::string& attention) {
  return attention + std::string(kSuffix);
}

// The file's scales, by the name of their attention. Errors are without the file's name.
Result<CacheScales> parse_scales(std::string_view text, std::span<const std::string> attentions) {
  ASSIGN_OR_RETURN(const Json file, parse_json(text, {.max_bytes = kMostBytes,
                                                      .max_depth = 4,
                                                      .max_members = kMostMembers,
                                                      .max_elements = kMostMembers,
                                                      .max_key_bytes = kMostKeyBytes,
                                                      .max_string_bytes = kMostStringBytes}));
  const Json* scales = file.find(kScales);
  if (scales == nullptr || !scales->is_object())
    return bad_input(fmt::format("{}: expected an object with a scale for each layer, found {}", kScales,
                                 scales == nullptr ? "nothing" : scales->type_name()));
  CacheScales out;
  for (const auto& [key, value] : scales->as_object()) {
    const std::string attention = key.substr(0, key.size() - std::min(key.size(), kSuffix.size()));
    if (!key.ends_with(kSuffix) || std::find(attentions.begin(), attentions.end(), attention) == attentions.end())
      return bad_input(fmt::format("{}: {}: the model has no such layer with latent attention", kScales, key));
    if (!value.is_number())
      return bad_input(fmt::format("{}: {}: expected a number, found {}", kScales, key, value.type_name()));
    const double number = value.is_int() ? static_cast<double>(value.as_int()) : value.as_double();
    const auto scale = static_cast<float>(number);
    if (!is_cache_scale(scale))
      return bad_input(
          fmt::format("{}: {}: expected a number over 0 that f32 holds, found {:g}", kScales, key, number));
    out.emplace(attention, scale);
  }
  for (const std::string& attention : attentions)
    if (!out.contains(attention))
      return bad_input(fmt::format("{}: {} is missing: expected a scale for each of {} layers with latent attention",
                                   kScales, field_of(attention), attentions.size()));
  return out;
}

}  // namespace

std::vector<std::string> latent_attentions(const ModelConfig& config) {
  const TensorNames names(config);
  std::vector<std::string> out;
  for (int64_t i = 0; i < config.num_layers; ++i)
    if (!config.is_kda(i)) out.push_back(names.layer(i, "self_attn"));
  return out;
}

Json cache_scales_json(const CacheScales& scales, Json notes) {
  Json fields{Json::Object{}};
  for (const auto& [attention, scale] : scales) fields.set(field_of(attention), static_cast<double>(scale));
  notes.set(kScales, std::move(fields));
  return notes;
}

Result<CacheScales> read_cache_scales(const std::string& path, std::span<const std::string> attentions) {
  constexpr const char* kFlag = "kv-scale";
  const auto text = read_file(path, kMostBytes);
  if (!text.ok()) return bad_input(fmt::format("--kv-scale: {}", text.error().message), kFlag);
  auto scales = parse_scales(*text, attentions);
  if (!scales.ok()) return bad_input(fmt::format("--kv-scale {}: {}", path, scales.error().message), kFlag);
  return scales;
}

}  // namespace perigee
