// `perigee inspect MODEL`: what a checkpoint is and what it needs, from its files alone, and whether it is whole.
#include <cstdio>
#include <filesystem>

#include "main/commands.h"
#include "main/engine_options.h"
#include "main/options.h"
#include "model/config.h"
#include "model/layer_weights.h"
#include "model/model.h"

namespace perigee {
namespace {

void line(const char* name, const std::string& value) {
  std::printf("%-22s %s\n", name, value.c_str());
}

// "3, 7, 11-13": the layers with or without Kimi Delta Attention, counted from 0 as tensor names do.
std::string layers_text(const ModelConfig& c, bool kda) {
  std::string text;
  for (int64_t i = 0; i < c.num_layers; ++i) {
    if (c.is_kda(i) != kda) continue;
    int64_t last = i;
    while (last + 1 < c.num_layers && c.is_kda(last + 1) == kda) ++last;
    text += str_cat(text.empty() ? "" : ", ", i, last > i ? str_cat("-", last) : std::string());
    i = last;
  }
  return text;
}

std::string attention_text(const ModelConfig& c) {
  return str_cat("MLA, ", c.heads, " heads of ", c.nope, "+", c.rope, "/", c.value, ", latent ", c.kv_lora,
                 c.q_lora > 0 ? str_cat(", q_lora ", c.q_lora) : std::string());
}

std::string experts_text(const ModelConfig& c) {
  if (c.num_experts == 0) return "none";
  return str_cat(c.num_experts, " of ", c.moe_inter, ", top ", c.top_k, ", ", c.num_shared_experts, " shared, ",
                 c.score == RouterScore::kSigmoid ? "sigmoid" : "softmax", " router",
                 c.num_groups > 1 ? str_cat(", ", c.top_groups, " of ", c.num_groups, " groups") : std::string());
}

std::string rope_text(const ModelConfig& c) {
  if (!c.rope_enabled) return "none (NoPE)";
  std::string text = str_cat("theta ", c.rope_config.theta);
  if (const auto& yarn = c.rope_config.yarn)
    text += str_cat(", YaRN factor ", yarn->factor, ", beta ", yarn->beta_fast, "/", yarn->beta_slow);
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
  std::string text;
  for (const int32_t id : ids) text += (text.empty() ? "" : ", ") + std::to_string(id);
  return text;
}

double gb(int64_t bytes) {
  return static_cast<double>(bytes) * 1e-9;
}

// What sequences keep in the page pool.
void print_cache(const ModelConfig& c) {
  const CacheLayout cache = cache_layout_of(c, DType::kBF16);
  const CacheLayout fp8 = cache_layout_of(c, DType::kF8E4M3);
  const int64_t state = cache.state_pages() * cache.page_bytes();
  line("cache, bf16",
       str_cat(cache.latent().layers * cache.latent().row_bytes(), " bytes a token, ", cache.page_bytes(),
               " bytes a block of 64 tokens; fp8: ", fp8.page_bytes(), " bytes a block"));
  if (state > 0) {
    line("state of one sequence",
         str_cat(state, " bytes: ", cache.state().units(), " units of ", cache.state().unit_bytes, ", ",
                 cache.units_per_page(), " a page, ", cache.state_pages(), " pages"));
    line("a checkpoint of it", str_cat(state, " bytes, as much as ", cache.state_pages() * 64, " tokens"));
  }
  line("cache for one sequence",
       str_cat(gb(state + cache.page_bytes() * ((c.max_positions + 63) / 64)), " GB at full length"));
}

void print_config(const WeightFiles& files, const ModelConfig& c) {
  line("architecture", c.architecture);
  line("weights",
       str_cat(files.count, files.count == 1 ? " file, " : " files, ", gb(static_cast<int64_t>(files.bytes)), " GB"));
  line("quantization", quantization_text(c.quantization));
  line("layers", str_cat(c.num_layers, " (", c.first_dense, " dense), hidden ", c.hidden));
  line("attention", attention_text(c));
  if (c.num_kda_layers() > 0) {
    line("  in layers", layers_text(c, false));
    line("linear attention", str_cat("KDA, ", c.kda.heads, " heads of ", c.kda.dim, ", convolution of ", c.kda.conv));
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

int run_inspect(const std::vector<std::string>& arguments) {
  Options options("perigee inspect", "What a checkpoint is, what it needs, and whether its files are whole.");
  options.positional("model", "folder with config.json");
  if (Status status = options.parse(arguments); !status.ok()) {
    const bool help = status.error().code == Code::kCancelled;
    std::fprintf(help ? stdout : stderr, "%s%s\n", help ? "" : "perigee inspect: ", status.error().message.c_str());
    return help ? 0 : 2;
  }
  const auto fail = [](const Error& error) {
    std::fprintf(stderr, "perigee inspect: %s\n", error.message.c_str());
    return 1;
  };
  if (Status status = check_model_folder(options.text("model")); !status.ok()) return fail(status.error());
  const auto config = read_config(options.text("model"));
  if (!config.ok()) return fail(config.error());
  const WeightFiles files = weight_files(options.text("model"));
  print_config(files, *config);
  if (files.count == 0) return 0;  // config.json alone is enough for sizing
  std::fflush(stdout);
  LoadOptions load;
  load.path = options.text("model");
  const Status whole = check_model_files(load);
  return whole.ok() ? 0 : fail(whole.error());
}

}  // namespace perigee
