#include "main/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/cgroup.h"
#include "base/file.h"
#include "exec/host_device.h"
#include "main/commands.h"
#include "main/engine_flags.h"
#include "main/progress.h"
#include "main/result_file.h"
#include "model/single_sequence.h"
#include "server/model_text.h"

namespace perigee {
namespace {

constexpr size_t kMostFileBytes = 256 << 20, kMostPrompts = 65536;
constexpr int32_t kChunkTokens = 512;

Result<std::vector<int32_t>> read_prompt(std::string_view line, const Tokenizer* tokenizer, int64_t vocab,
                                         int64_t max_tokens) {
  ASSIGN_OR_RETURN(const Json row, parse_json(line, {.max_bytes = kMostFileBytes, .max_depth = 8}));
  const Json* prompt = row.find("prompt");
  const auto most = static_cast<size_t>(max_tokens);
  std::vector<int32_t> ids;
  if (prompt != nullptr && prompt->is_string()) {
    if (tokenizer == nullptr)
      return bad_input("prompt: the model folder has no tokenizer; expected a list of token ids");
    ids = tokenizer->encode(prompt->as_string(), SpecialsIn::kRecognised, most);
  } else if (prompt != nullptr && prompt->is_array()) {
    for (const Json& id : prompt->as_array()) {
      if (!id.is_int() || id.as_int() < 0 || id.as_int() >= vocab)
        return bad_input(fmt::format("prompt: expected token ids from 0 to {}", vocab - 1));
      ids.push_back(static_cast<int32_t>(id.as_int()));
    }
  } else {
    return bad_input("prompt: expected text or a list of token ids");
  }
  if (ids.size() > most) ids.resize(most);
  return ids;
}

// Of the rows of one layer that a sequence has, f32 or bf16.
float largest_of(const LatentLayer& layer, const SingleSequence& sequence) {
  const bool wide = layer.format == LatentFormat::kF32;
  const int64_t width = layer.row_bytes / (wide ? 4 : 2);
  float largest = 0;
  for (int32_t position = 0; position < sequence.length(); ++position) {
    const uint8_t* row =
        layer.base + sequence.page_of(position) * layer.page_bytes + position % kRowsOfBlock * layer.row_bytes;
    for (int64_t j = 0; j < width; ++j) {
      const float value =
          wide ? reinterpret_cast<const float*>(row)[j] : bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[j]);
      if (!std::isfinite(value)) return NAN;
      largest = std::max(largest, std::fabs(value));
    }
  }
  return largest;
}

struct CalibrateFlags {
  LoadOptions load;
  Device device = Device::kCpu;
  std::string prompts, output;
  double margin = 1.5;
  int64_t max_tokens = 8192;
};

void add_flags(CommandLine& flags, CalibrateFlags& to) {
  flags.group("Model and device");
  add_load_flags(flags, to.load);
  flags.add("--device", to.device, OneOf<Device>{{{"cpu", Device::kCpu}, {"ref", Device::kRef}}},
            "cpu (AVX2, AVX-512, AMX), ref (the slow definition)");
  flags.group("Calibration");
  flags.add("--prompts", to.prompts, "lines of JSON objects with a prompt: text or a list of token ids");
  flags.add("--output,-o", to.output, "file for the scales, which serve takes as --kv-scale");
  flags.add("--margin", to.margin, Number{1, 1024}, "so much larger latents than those of the prompts are still kept");
  flags.add("--max-prompt-tokens", to.max_tokens, Whole{1, 1 << 20}, "of each prompt, the first ones");
}

Result<std::unique_ptr<Ops>> make_ops(const CalibrateFlags& flags) {
  if (flags.device == Device::kRef) return make_ref_ops();
  return make_cpu_ops({.num_threads = flags.load.num_threads > 0 ? flags.load.num_threads : available_cores()});
}

Status check_flags(const CalibrateFlags& flags) {
  RETURN_IF_ERROR(check_model_folder(flags.load.path));
  if (flags.prompts.empty())
    return bad_input("--prompts names the file of prompts; without any there is nothing to calibrate from", "prompts");
  if (flags.output.empty()) return bad_input("--output names the file that the scales are written to", "output");
  return check_result_file(flags.output, "output");
}

Result<int> calibrate(const std::vector<std::string>& words) {
  CalibrateFlags read;
  CommandLine flags("perigee calibrate", "Scales of an fp8 cache for a model, from prompts.");
  add_flags(flags, read);
  RETURN_IF_ERROR(flags.parse(words));
  RETURN_IF_ERROR(check_flags(read));
  ASSIGN_OR_RETURN(const ModelConfig config, read_config(read.load.path));
  ASSIGN_OR_RETURN(const auto text, ModelText::load(read.load.path));
  ASSIGN_OR_RETURN(const TokenPrompts prompts,
                   read_prompts(read.prompts, text->tokenizer(), config.vocab, read.max_tokens));
  ASSIGN_OR_RETURN(const auto ops, make_ops(read));
  read.load.memory_bytes = host_memory_bytes();
  read.load.progress = Progress("GB", 1e9, 2);
  ASSIGN_OR_RETURN(const auto model, load_model(read.load, *ops));
  int64_t tokens = 0;
  ASSIGN_OR_RETURN(
      const std::vector<float> largest,
      largest_latents(*model, *ops, prompts, [&, show = Progress("tokens", 1, 0)](int64_t done, int64_t total) mutable {
        show("calibrate", done, total);
        tokens = total;
      }));
  const std::vector<std::string> attentions = latent_attentions(config);
  const CacheScales scales = scales_for(attentions, largest, read.margin);
  Json notes{Json::Object{}};
  notes.set("model", config.architecture);
  notes.set("prompts", static_cast<int64_t>(prompts.size()));
  notes.set("tokens", tokens);
  notes.set("margin", read.margin);
  RETURN_IF_ERROR(save_result(read.output, cache_scales_json(scales, std::move(notes)), "output"));
  for (size_t i = 0; i < attentions.size(); ++i)
    fmt::print("{:<40} largest {:<12.6g} scale {:.6g}\n", attentions[i], largest[i], scales.at(attentions[i]));
  fmt::print("serve with --kv-cache-dtype fp8 --kv-scale {}\n", read.output);
  return 0;
}

}  // namespace

Result<TokenPrompts> read_prompts(const std::string& path, const Tokenizer* tokenizer, int64_t vocab,
                                  int64_t max_tokens) {
  constexpr const char* kFlag = "prompts";
  const auto text = read_file(path, kMostFileBytes);
  if (!text.ok()) return bad_input(fmt::format("--prompts: {}", text.error().message), kFlag);
  TokenPrompts prompts;
  size_t number = 0;
  for (size_t begin = 0; begin < text->size(); ++number) {
    const size_t end = std::min(text->find('\n', begin), text->size());
    const std::string_view line = std::string_view(*text).substr(begin, end - begin);
    begin = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    auto prompt = read_prompt(line, tokenizer, vocab, max_tokens);
    if (!prompt.ok())
      return bad_input(fmt::format("--prompts {}: line {}: {}", path, number + 1, prompt.error().message), kFlag);
    if (!prompt->empty()) prompts.push_back(std::move(*prompt));
    if (prompts.size() > kMostPrompts)
      return bad_input(fmt::format("--prompts {}: more than {} prompts", path, kMostPrompts), kFlag);
  }
  if (prompts.empty()) return bad_input(fmt::format("--prompts {}: no prompt in it", path), kFlag);
  return prompts;
}

Result<std::vector<float>> largest_latents(const Model& model, Ops& ops, const TokenPrompts& prompts,
                                           const std::function<void(int64_t done, int64_t total)>& progress) {
  const LatentFormat format = latent_format(ops.activation_dtype());
  std::vector<float> largest(static_cast<size_t>(model.cache_layout(format).latent().layers));
  int64_t total = 0, done = 0;
  for (const auto& prompt : prompts) total += std::ssize(prompt);
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::vector<int32_t>& prompt = prompts[i];
    SingleSequence sequence(model, ops, format, std::ssize(prompt));
    const MlaForm form = model.choose_form(TokenKind::kPrompt, std::ssize(prompt), 0);
    for (auto from = prompt.begin(); from != prompt.end();) {
      const auto to = from + std::min<std::ptrdiff_t>(kChunkTokens, prompt.end() - from);
      sequence.run({from, to}, form, {});
      done += to - from;
      from = to;
      if (progress) progress(done, total);
    }
    for (size_t layer = 0; layer < largest.size(); ++layer) {
      const float of_prompt = largest_of(sequence.pool().latent_layer(static_cast<int64_t>(layer)), sequence);
      if (std::isnan(of_prompt))
        return bad_input(fmt::format(
            "prompt {}: latent attention layer {} wrote a NaN to the cache: check that the weights are complete", i + 1,
            layer + 1));
      largest[layer] = std::max(largest[layer], of_prompt);
    }
  }
  return largest;
}

CacheScales scales_for(const std::vector<std::string>& attentions, const std::vector<float>& largest, double margin) {
  CHECK(attentions.size() == largest.size(), attentions.size(), " layers, ", largest.size(), " latents");
  CacheScales scales;
  for (size_t i = 0; i < attentions.size(); ++i) {
    const auto scale = static_cast<float>(largest[i] * margin / kLargestE4M3);
    scales.emplace(attentions[i], is_cache_scale(scale) ? scale : 1);
  }
  return scales;
}

int run_calibrate(const std::vector<std::string>& words) {
  const auto code = calibrate(words);
  return code.ok() ? *code : print_refusal("perigee calibrate", code.error());
}

}  // namespace perigee
