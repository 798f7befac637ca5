// TensorSource over mapped weight files: the whole list is checked against the files before a byte is used.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "base/log.h"
#include "model/safetensors.h"
#include "model/weights.h"

namespace perigee {
namespace {

bool is_float(const MappedTensor& t) {
  const std::string_view type = t.type->name;
  return type == "BF16" || type == "F16" || type == "F32";
}

// Names of the scale of an e4m3 cache after "self_attn.", in the order in which they are looked up: latents are keys
// and values at once and take the keys' scale. A model may repeat it for the values, and may have scales of quantised
// queries and probabilities, which stay bf16 here.
constexpr std::string_view kCacheScales[] = {"k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale",
                                             "v_scale", "attn.v_scale", "v_proj.v_scale"};
constexpr std::string_view kUnusedScales[] = {"q_scale", "attn.q_scale", "q_proj.q_scale", "prob_scale",
                                              "attn.prob_scale"};

// Whether `name` is one of these of some layer's attention.
bool is_scale(std::string_view name, std::span<const std::string_view> scales) {
  return std::any_of(scales.begin(), scales.end(),
                     [&](std::string_view scale) { return name.ends_with(fmt::format(".self_attn.{}", scale)); });
}

// The other name that a file may have for a tensor, or "": transformers 5 writes a dense layer's MLP as part of
// that layer's block_sparse_moe.
std::string other_name(std::string_view name) {
  constexpr std::string_view kPart = ".mlp.";
  const size_t at = name.find(kPart);
  if (at == std::string_view::npos) return "";
  return fmt::format("{}.block_sparse_moe.{}", name.substr(0, at), name.substr(at + kPart.size()));
}

class FileSource final : public TensorSource {
 public:
  FileSource(WeightFiles files, bool language_model_only)
      : files_(std::move(files)), language_model_only_(language_model_only) {}

  Status verify(std::span<const TensorSpec> specs, const ModelConfig& config) override {
    used_.clear();
    for (const TensorSpec& spec : specs) RETURN_IF_ERROR(verify_one(spec, config.quantization));
    return verify_rest(config);
  }

  bool has(const std::string& name) const override { return find(name) != nullptr; }

  WeightFormat format(const TensorSpec& spec) const override {
    return find(spec.name + ".weight_packed") != nullptr ? WeightFormat::kInt4Group32 : format(get(spec.stored_name()));
  }

  RawWeight matrix(const TensorSpec& spec, const MatrixPart& part) const override {
    RawWeight weight{.matrix = {.format = format(spec), .out = spec.out, .in = spec.in}, .owners = {}};
    RawMatrix& m = weight.matrix;
    const bool int4 = m.format == WeightFormat::kInt4Group32;
    const MappedTensor& data = get(int4 ? spec.name + ".weight_packed" : spec.stored_name());
    m.data = data.data.data();
    if (!m.has_scales()) {
      m = window(m, part);
      m.data = aligned(data_bytes(m), *data.type, weight);
      return weight;
    }
    const MappedTensor& scale = get(spec.name + (int4 ? ".weight_scale" : ".weight_scale_inv"));
    m.scale = scale.data.data();
    m = window(m, part);
    m.data = aligned(data_bytes(m), *data.type, weight);
    m.scale = aligned(scale_bytes(m), *scale.type, weight);
    return weight;
  }

  std::optional<float> cache_scale(const std::string& attention) const override {
    for (const std::string_view scale : kCacheScales)
      if (const MappedTensor* tensor = files_.find(fmt::format("{}.{}", attention, scale))) return scalar(*tensor);
    return std::nullopt;
  }

  std::vector<float> vector(const TensorSpec& spec, const MatrixPart& part) const override {
    const RawWeight weight = matrix(spec, part);
    std::vector<float> out(static_cast<size_t>(part.columns));
    raw_row(weight.matrix, 0, out.data());
    return out;
  }

  std::vector<int64_t> integers(const TensorSpec& spec) const override {
    std::vector<int64_t> out(static_cast<size_t>(spec.in));
    std::memcpy(out.data(), get(spec.stored_name()).data.data(), out.size() * sizeof(int64_t));
    return out;
  }

 private:
  static WeightFormat format(const MappedTensor& t) {
    const std::string_view type = t.type->name;
    if (type == "F32") return WeightFormat::kF32;
    if (type == "F16") return WeightFormat::kF16;
    return type == "BF16" ? WeightFormat::kBF16 : WeightFormat::kF8Block128;
  }

  const MappedTensor* find(std::string_view name) const {
    const MappedTensor* tensor = files_.find(name);
    return tensor != nullptr ? tensor : files_.find(other_name(name));
  }

  const MappedTensor& get(std::string_view name) const {
    const MappedTensor* tensor = find(name);
    CHECK(tensor != nullptr, name, " was not verified");
    return *tensor;
  }

  static float scalar(const MappedTensor& tensor) {
    RawWeight copy;
    const ByteRows bytes = {.data = tensor.data.data(), .rows = 1, .row_bytes = tensor.type->bytes};
    return raw_element({.format = format(tensor), .out = 1, .in = 1, .data = aligned(bytes, *tensor.type, copy)}, 0, 0);
  }

  // The file promises no alignment; bytes that lie badly are copied once.
  static const void* aligned(const ByteRows& bytes, const SafetensorsType& type, RawWeight& weight) {
    if (reinterpret_cast<uintptr_t>(bytes.data) % static_cast<uintptr_t>(type.bytes) == 0) return bytes.data;
    auto copy = std::make_shared<Buffer>(static_cast<size_t>(bytes.extent()));
    bytes.copy_to(copy->data(), bytes.stride);
    weight.owners.push_back(copy);
    return copy->data();
  }

  Error mismatch(const std::string& name, const std::string& expected) const {
    const MappedTensor* tensor = find(name);
    if (tensor == nullptr)
      return bad_input(fmt::format("{}: tensor {} is missing: expected {}", files_.folder(), name, expected), name);
    return bad_input(fmt::format("{}: tensor {}: expected {}, found {}", files_.where(*tensor), name, expected,
                                 tensor->description()),
                     name);
  }

  // Requires tensor `name` of exactly this type and shape.
  Status require(const std::string& name, const char* type, const std::vector<int64_t>& shape) {
    const MappedTensor* tensor = find(name);
    if (tensor == nullptr || tensor->type->name != std::string_view(type) || tensor->shape != shape)
      return mismatch(name, fmt::format("{} {}", type, shape_text(shape)));
    used_.insert(tensor);
    return {};
  }

  Status verify_one(const TensorSpec& spec, Quantization quantization) {
    if (spec.role == TensorRole::kRoutedExpert && find(spec.name + ".weight_packed") != nullptr)
      return verify_int4(spec, quantization);
    const std::string name = spec.stored_name();
    if (spec.role == TensorRole::kOffsets) return require(name, "I64", spec.stored_shape());
    const MappedTensor* tensor = find(name);
    const bool projection = spec.role == TensorRole::kProjection || spec.role == TensorRole::kRoutedExpert;
    const bool fp8 = projection && quantization == Quantization::kFp8Block128 && tensor != nullptr &&
                     tensor->type->name == std::string_view("F8_E4M3");
    if (tensor == nullptr || tensor->shape != spec.stored_shape() || !(fp8 || is_float(*tensor))) {
      const bool may_be_fp8 = projection && quantization == Quantization::kFp8Block128;
      return mismatch(name, fmt::format("{}{}{}", may_be_fp8 ? "F8_E4M3, BF16, F16 or F32 " : "BF16, F16 or F32 ",
                                        shape_text(spec.stored_shape()), spec.why));
    }
    used_.insert(tensor);
    if (!fp8) return {};
    return require(spec.name + ".weight_scale_inv", "F32", {(spec.out + 127) / 128, (spec.in + 127) / 128});
  }

  Status verify_int4(const TensorSpec& spec, Quantization quantization) {
    if (quantization != Quantization::kInt4Group32)
      return mismatch(spec.name + ".weight_packed", "no INT4 tensor, as config.json declares none");
    if (spec.in % 32 != 0)
      return mismatch(spec.name + ".weight_packed",
                      fmt::format("a multiple of 32 columns, config.json says {}", spec.in));
    RETURN_IF_ERROR(require(spec.name + ".weight_packed", "I32", {spec.out, spec.in / 8}));
    RETURN_IF_ERROR(require(spec.name + ".weight_scale", "BF16", {spec.out, spec.in / 32}));
    const std::string shape = spec.name + ".weight_shape";
    const MappedTensor* tensor = find(shape);
    if (tensor == nullptr) return {};  // it repeats what is known
    const bool wide = tensor->type->name == std::string_view("I64");
    RETURN_IF_ERROR(require(shape, wide ? "I64" : "I32", {2}));
    int64_t found[2] = {};
    for (int i = 0; i < 2; ++i)
      std::memcpy(&found[i], tensor->data.data() + i * tensor->type->bytes, static_cast<size_t>(tensor->type->bytes));
    if (found[0] != spec.out || found[1] != spec.in)
      return bad_input(fmt::format("{}: tensor {}: expected the values ({}, {}), found ({}, {})", files_.where(*tensor),
                                   shape, spec.out, spec.in, found[0], found[1]),
                       shape);
    return {};
  }

  Status verify_cache_scale(const std::string& name, const MappedTensor& tensor) const {
    const bool one = static_cast<int64_t>(tensor.data.size()) == tensor.type->bytes;
    if (!one || !is_float(tensor)) return mismatch(name, "BF16, F16 or F32, one number");
    if (const float scale = scalar(tensor); !is_cache_scale(scale))
      return bad_input(fmt::format("{}: tensor {}: the scale of a cache must be finite and over 0, found {:g}",
                                   files_.where(tensor), name, scale),
                       name);
    return {};
  }

  // Every tensor that no spec used must be one that is known to be left out, or the scale of a cache.
  Status verify_rest(const ModelConfig& config) const {
    int64_t vision = 0, beyond = 0;
    for (const auto& [name, tensor] : files_.tensors()) {
      if (used_.contains(&tensor) || name.ends_with("rotary_emb.inv_freq")) continue;
      if (beyond_last_layer(name, config)) {
        ++beyond;
        continue;
      }
      if (is_scale(name, kUnusedScales)) continue;
      if (name == "t2d" && !config.draft_layer.empty()) continue;  // what d2t says, the other way around
      if (is_scale(name, kCacheScales)) {
        RETURN_IF_ERROR(verify_cache_scale(std::string(name), tensor));
        continue;
      }
      if (name.starts_with("vision_tower.") || name.starts_with("mm_projector.")) {
        ++vision;
        continue;
      }
      return bad_input(
          fmt::format("{}: tensor {}: expected no such tensor in a {} of {} layers, found {}", files_.where(tensor),
                      name.substr(0, 200), config.architecture, config.num_layers, tensor.description()),
          name);
    }
    if (beyond > 0)
      log_info(files_.folder(), ": ", beyond, " tensors are not loaded: their layers are not under num_hidden_layers ",
               config.num_layers, " (drafts; or is config.json another model's?)");
    if (vision > 0 && !language_model_only_)
      log_info(files_.folder(), ": ", vision, " vision tensors are not loaded: this build reads text only");
    return {};
  }

  static bool beyond_last_layer(std::string_view name, const ModelConfig& config) {
    const std::string layers = config.prefix + "model.layers.";
    if (!name.starts_with(layers)) return false;
    int64_t layer = 0;
    const char* end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + layers.size(), end, layer);
    return parsed.ec == std::errc() && parsed.ptr < end && *parsed.ptr == '.' && layer >= config.num_layers;
  }

  WeightFiles files_;
  bool language_model_only_;
  std::unordered_set<const MappedTensor*> used_;
};

}  // namespace

Result<std::unique_ptr<TensorSource>> open_file_source(const std::string& folder, bool language_model_only) {
  ASSIGN_OR_RETURN(WeightFiles files, WeightFiles::open(folder));
  return std::unique_ptr<TensorSource>(std::make_unique<FileSource>(std::move(files), language_model_only));
}

}  // namespace perigee
