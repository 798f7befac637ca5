// `perigee inspect MODEL`: what a model is and what it needs, from its files alone, and whether they are complete.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "main/commands.h"
#include "main/engine_flags.h"
#include "model/config.h"
#include "model/layer_weights.h"
#include "model/model.h"

namespace perigee {
namespace {

void line(const char* name, const std::string& value) {
  fmt::print("{:<22} {}\n", name, value);
}

// "3, 7, 11-13": the layers with or without Kimi Delta Attention, counted from 0 as tensor names do.
std::string layers_text(const ModelConfig& c, bool kda) {
  std::string text;
  for (int64_t i = 0; i < c.num_layers; ++i) {
    if (c.is_kda(i) != kda) continue;
    int64_t last = i;
    while (last + 1 < c.num_layers && c.is_kda(last + 1) == kda) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", i) + (last > i ? fmt::format("-{}", last) : "");
    i = last;
  }
  return text;
}

std::string attention_text(const ModelConfig& c) {
  return fmt::format("MLA, {} heads of {}+{}/{}, latent {}", c.heads, c.nope, c.rope, c.value, c.kv_lora) +
         (c.q_lora > 0 ? fmt::format(", q_lora {}", c.q_lora) : "");
}

std::string experts_text(const ModelConfig& c) {
  if (c.num_experts == 0) return "none";
  return fmt::format("{} of {}, top {}, {} shared, {} router", c.num_experts, c.moe_inter, c.top_k,
                     c.num_shared_experts, c.score == RouterScore::kSigmoid ? "sigmoid" : "softmax") +
         (c.num_groups > 1 ? fmt::format(", {} of {} groups", c.top_groups, c.num_groups) : "");
}

std::string rope_text(const ModelConfig& c) {
  if (!c.rope_enabled) return "none (NoPE)";
  std::string text = fmt::format("theta {:g}", c.rope_config.theta);
  if (const auto& yarn = c.rope_config.yarn)
    text += fmt::format(", YaRN factor {:g}, beta {:g}/{:g}", yarn->factor, yarn->beta_fast, yarn->beta_slow);
  return text;
}

const char* quantization_text(Quantization quantization) {
  switch (quantization) {
    case Quantization::kNone: return "none";
    case Quantization::kFp8Block128: return "FP8 e4m3, 128 x 128 blocks";
    case Quantization::kInt4Group32: return "routed experts INT4, groups of 32";
  }
  return "?";
}

struct WeightFiles {
  int count = 0;
  uint64_t bytes = 0;
};

WeightFiles weight_files(const std::string& folder) {
  WeightFiles files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() != ".safetensors" || !entry.is_regular_file(error)) continue;
    files.bytes += entry.file_size(error);
    ++files.count;
  }
  return files;
}

std::string ids_text(const std::vector<int32_t>& ids) {
  return fmt::format("{}", fmt::join(ids, ", "));
}

double gb(int64_t bytes) {
  return static_cast<double>(bytes) * 1e-9;
}

// The record is for one geometry.
std::string block_of_records(const ModelConfig& c) {
  if (c.kv_lora != 512 || c.rope != 64) return "not of this geometry";
  return fmt::format("{} bytes a block", cache_layout_of(c, LatentFormat::kF8Tiles).page_bytes());
}

// What sequences keep in the page pool.
void print_cache(const ModelConfig& c) {
  const CacheLayout cache = cache_layout_of(c, LatentFormat::kBF16);
  const int64_t state = cache.state_pages() * cache.page_bytes();
  line("cache, bf16",
       fmt::format("{} bytes a token, {} bytes a block of 64 tokens; fp8: {} bytes a block; fp8_ds_mla: {}",
                   cache.latent().layers * cache.latent().row_bytes(), cache.page_bytes(),
                   cache_layout_of(c, LatentFormat::kF8E4M3).page_bytes(), block_of_records(c)));
  if (state > 0) {
    line("state of one sequence",
         fmt::format("{} bytes: {} units of {}, {} a page, {} pages", state, cache.state().units(),
                     cache.state().unit_bytes, cache.units_per_page(), cache.state_pages()));
    line("a checkpoint of it", fmt::format("{} bytes, as much as {} tokens", state, cache.state_pages() * 64));
  }
  line("cache for one sequence",
       fmt::format("{:g} GB at full length", gb(state + cache.page_bytes() * ((c.max_positions + 63) / 64))));
}

void print_config(const WeightFiles& files, const ModelConfig& c) {
  line("architecture", c.architecture);
  line("weights", fmt::format("{} {}, {:g} GB", files.count, files.count == 1 ? "file" : "files",
                              gb(static_cast<int64_t>(files.bytes))));
  line("quantization", quantization_text(c.quantization));
  line("layers", fmt::format("{} ({} dense), hidden {}", c.num_layers, c.first_dense, c.hidden));
  line("attention", attention_text(c));
  if (c.num_kda_layers() > 0) {
    line("  in layers", layers_text(c, false));
    line("linear attention", fmt::format("KDA, {} heads of {}, convolution of {}", c.kda.heads, c.kda.dim, c.kda.conv));
    line("  in layers", layers_text(c, true));
  }
  line("experts", experts_text(c));
  line("rope", rope_text(c));
  line("vocabulary", std::to_string(c.vocab));
  line("positions", std::to_string(c.max_positions));
  line("end-of-sequence ids", ids_text(c.eos_ids));
  print_cache(c);
}

}  // namespace

int run_inspect(const std::vector<std::string>& words) {
  LoadOptions load;
  CommandLine flags("perigee inspect", "What a model is, what it needs, and whether its files are complete.");
  flags.add("model,--model", load.path, "folder with config.json");
  if (Status status = flags.parse(words); !status.ok()) return print_refusal("perigee inspect", status.error());
  const auto fail = [](const Error& error) {
    fmt::print(stderr, "perigee inspect: {}\n", error.message);
    return 1;
  };
  if (Status status = check_model_folder(load.path); !status.ok()) return fail(status.error());
  const auto config = read_config(load.path);
  if (!config.ok()) return fail(config.error());
  const WeightFiles files = weight_files(load.path);
  print_config(files, *config);
  if (files.count == 0) return 0;  // config.json alone is enough for sizing
  std::fflush(stdout);
  const Status whole = check_model_files(load);
  return whole.ok() ? 0 : fail(whole.error());
}

}  // namespace perigee
