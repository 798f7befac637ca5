// load_model from folders: round trips of weights in every storage format, and every way in which one can be wrong.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "base/soak.h"
#include "model/dummy.h"
#include "model/registry.h"
#include "model/single_sequence.h"
#include "model/test_weights.h"
#include "ops/ref/ref_ops.h"

namespace perigee {
namespace {

const std::vector<int32_t> kPrompt = {5, 17, 80, 2, 44, 44, 9, 61, 30, 7};

std::vector<StoredTensor> dummy_tensors(const Json& config) {
  const auto parsed = parse_config(config, Json());
  CHECK(parsed.ok(), parsed.error().message);
  const auto source = make_dummy_source(1);
  const std::vector<TensorSpec> specs = find_family(parsed->architecture)->tensors(*parsed);
  CHECK(source->verify(specs, *parsed).ok());
  return stored_tensors(*source, specs);
}

Result<std::unique_ptr<Model>> load(const TempFolder& folder, LoadFormat format, Ops& ops) {
  LoadOptions options;
  options.path = folder.path();
  options.format = format;
  return load_model(options, ops);
}

std::vector<float> last_logits(const TempFolder& folder, LoadFormat format) {
  const auto ops = make_ref_ops();
  const auto model = load(folder, format, *ops);
  if (!model.ok()) {
    ADD_FAILURE() << model.error().message;
    return {};
  }
  SingleSequence sequence(**model, *ops, LatentFormat::kF32, 64);
  return sequence.run(kPrompt, MlaForm::kExpanded).back();
}

// Files of dummy weights must give the same logits as --load-format dummy.
void expect_round_trip(const Json& config, size_t pad) {
  const TempFolder folder;
  folder.write("config.json", dump_json(config));
  folder.write("model.safetensors", safetensors_bytes(dummy_tensors(config), pad));
  const std::vector<float> stored = last_logits(folder, LoadFormat::kSafetensors);
  ASSERT_EQ(stored.size(), 96u);
  EXPECT_EQ(stored, last_logits(folder, LoadFormat::kDummy));
}

Json with(const char* key, Json value) {
  Json config = tiny_config();
  config.set(key, std::move(value));
  return config;
}

Json hybrid_with(const char* key, Json value) {
  Json config = tiny_hybrid_config();
  config.set(key, std::move(value));
  return config;
}

TEST(Loader, RoundTripsEveryFormat) {
  for (const size_t pad : {0, 1}) {  // 1: nothing in the file is aligned
    expect_round_trip(tiny_config(), pad);
    expect_round_trip(with("quantization_config", int4_quantization()), pad);
    expect_round_trip(with("quantization_config", fp8_quantization()), pad);
    expect_round_trip(with("q_lora_rank", Json()), pad);
    expect_round_trip(with("n_shared_experts", Json(0)), pad);
    expect_round_trip(tiny_hybrid_config(), pad);
    expect_round_trip(hybrid_with("quantization_config", fp8_quantization()), pad);
  }
}

TEST(Loader, WeightsOverTheMemoryAreRefusedBeforeTheyAreRead) {
  const auto ops = make_ref_ops();
  for (const Json& config : {tiny_config(), with("quantization_config", int4_quantization()),
                             with("quantization_config", fp8_quantization())}) {
    const TempFolder folder;
    folder.write("config.json", dump_json(config));
    folder.write("model.safetensors", safetensors_bytes(dummy_tensors(config)));
    bool read = false;
    LoadOptions options{.path = folder.path(), .progress = [&](const char*, int64_t, int64_t) { read = true; }};
    const auto sized = size_model(options, *ops->sizes());
    ASSERT_TRUE(sized.ok()) << sized.error().message;
    options.memory_bytes = (*sized)->info().weight_bytes - 1;
    const auto model = load_model(options, *ops);
    ASSERT_FALSE(model.ok());
    EXPECT_NE(model.error().message.find("the weights take "), std::string::npos) << model.error().message;
    EXPECT_FALSE(read);
    EXPECT_NE(model.error().message.find("--kv-cache-memory-bytes"), std::string::npos) << model.error().message;
    ++options.memory_bytes;
    EXPECT_TRUE(load_model(options, *ops).ok());
  }
}

// The names that transformers 5 writes: a dense layer's MLP under block_sparse_moe, too. The same weights give the same
// logits, bit for bit; both names at once are one too many.
TEST(Loader, KimiLinearOfTransformers5) {
  std::vector<StoredTensor> tensors = dummy_tensors(tiny_hybrid_config());
  const std::vector<StoredTensor> old = tensors;
  int renamed = 0;
  for (StoredTensor& tensor : tensors) {
    const size_t at = tensor.name.find(".mlp.");
    if (at == std::string::npos) continue;
    tensor.name.replace(at, 5, ".block_sparse_moe.");
    ++renamed;
  }
  EXPECT_EQ(renamed, 3);
  const TempFolder before, after;
  before.write("config.json", dump_json(tiny_hybrid_config()));
  before.write("model.safetensors", safetensors_bytes(old));
  after.write("config.json", dump_json(tiny_hybrid_config_of_transformers_5()));
  after.write("model.safetensors", safetensors_bytes(tensors));
  const std::vector<float> logits = last_logits(after, LoadFormat::kSafetensors);
  EXPECT_EQ(logits.size(), 96u);
  EXPECT_EQ(logits, last_logits(before, LoadFormat::kSafetensors));

  tensors.push_back(*std::find_if(
      old.begin(), old.end(), [](const StoredTensor& tensor) { return tensor.name.ends_with(".mlp.up_proj.weight"); }));
  after.write("model.safetensors", safetensors_bytes(tensors));
  const auto ops = make_ref_ops();
  const auto twice = load(after, LoadFormat::kSafetensors, *ops);
  ASSERT_FALSE(twice.ok());
  EXPECT_NE(twice.error().message.find("layers.0.block_sparse_moe.up_proj.weight: expected no such tensor"),
            std::string::npos)
      << twice.error().message;
}

TEST(Loader, RoundTripsShardsUnderAPrefix) {
  Json config;
  config.set("architectures", Json(Json::Array{"KimiK25ForConditionalGeneration"}));
  config.set("text_config", tiny_config());
  const std::vector<StoredTensor> all = dummy_tensors(config);
  EXPECT_TRUE(all[0].name.starts_with("language_model.model."));
  const size_t half = all.size() / 2;
  std::vector<StoredTensor> one(all.begin(), all.begin() + half), two(all.begin() + half, all.end());
  two.push_back({"vision_tower.patch_embed.proj.bias", "F32", {1}, "abcd"});
  two.push_back({"language_model.model.layers.3.eh_proj.weight", "U8", {1}, "x"});  // beyond the last
  const TempFolder folder;
  folder.write("config.json", dump_json(config));
  folder.write("a.safetensors", safetensors_bytes(one));
  folder.write("b.safetensors", safetensors_bytes(two));
  Json map{Json::Object{}}, index;
  for (const StoredTensor& t : one) map.set(t.name, "a.safetensors");
  for (const StoredTensor& t : two) map.set(t.name, "b.safetensors");
  index.set("weight_map", map);
  folder.write("model.safetensors.index.json", dump_json(index));
  EXPECT_EQ(last_logits(folder, LoadFormat::kSafetensors), last_logits(folder, LoadFormat::kDummy));
}

// Logits with an e4m3 cache of a model with these extra tensors; `name` within each layer's attention.
Result<std::vector<float>> logits_with(const std::vector<StoredTensor>& scales,
                                       LatentFormat cache = LatentFormat::kF8E4M3) {
  std::vector<StoredTensor> tensors = dummy_tensors(tiny_config());
  for (int layer = 0; layer < 3; ++layer)
    for (StoredTensor scale : scales) {
      scale.name = fmt::format("model.layers.{}.self_attn.{}", layer, scale.name);
      tensors.push_back(scale);
    }
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  folder.write("model.safetensors", safetensors_bytes(tensors));
  const auto ops = make_ref_ops();
  ASSIGN_OR_RETURN(const auto model, load(folder, LoadFormat::kSafetensors, *ops));
  SingleSequence sequence(*model, *ops, cache, 64);
  return sequence.run(kPrompt, MlaForm::kExpanded).back();
}

StoredTensor f32_scale(const std::string& name, float value) {
  return {name, "F32", {}, bytes_of(&value, 4)};
}

TEST(Loader, ReadsTheScalesOfAnFp8Cache) {
  const auto plain = logits_with({}), scaled = logits_with({f32_scale("k_scale", 0.375f)});
  ASSERT_TRUE(plain.ok() && scaled.ok());
  EXPECT_NE(*plain, *scaled);
  EXPECT_EQ(*plain, *logits_with({f32_scale("k_scale", 1)}));
  EXPECT_EQ(*scaled, *logits_with({f32_scale("attn.k_scale", 0.375f), f32_scale("attn.v_scale", 3)}));
  EXPECT_EQ(*scaled, *logits_with({f32_scale("k_proj.k_scale", 0.375f), f32_scale("q_scale", 3)}));
  EXPECT_EQ(*scaled, *logits_with({{"kv_scale", "BF16", {1}, std::string("\xC0\x3E", 2)}}));
  EXPECT_EQ(*logits_with({}, LatentFormat::kF32), *logits_with({f32_scale("k_scale", 0.375f)}, LatentFormat::kF32));
  // 448 of them are the largest latent that is kept: so small a scale cuts them all.
  EXPECT_NE(*logits_with({f32_scale("k_scale", 1e-4f)}), *logits_with({f32_scale("k_scale", 1e-5f)}));
}

// Each name counts before those after it; latents are keys first.
TEST(Loader, TheFirstScaleOfAnFp8CacheCounts) {
  const std::vector<std::string> names = {"k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale",
                                          "v_scale", "attn.v_scale", "v_proj.v_scale"};
  const auto first = logits_with({f32_scale("k_scale", 0.375f)});
  for (size_t i = 0; i < names.size(); ++i)
    for (size_t k = i + 1; k < names.size(); ++k)
      EXPECT_EQ(*first, *logits_with({f32_scale(names[k], 3), f32_scale(names[i], 0.375f)})) << names[i] << names[k];
}

TEST(Loader, RefusesScalesThatAreNone) {
  for (const float value : {0.0f, -1.0f, NAN, INFINITY}) {
    const auto logits = logits_with({f32_scale("k_scale", value)});
    ASSERT_FALSE(logits.ok()) << value;
    EXPECT_NE(logits.error().message.find("layers.0.self_attn.k_scale"), std::string::npos) << logits.error().message;
  }
  EXPECT_FALSE(logits_with({{"k_scale", "F32", {2}, std::string(8, '\x3F')}}).ok());
  EXPECT_FALSE(logits_with({f32_scale("o_scale", 1)}).ok());
}

// Scales of layers 0 to 2, as files have them; `missing` has none.
Status load_without_scale_of(int missing) {
  std::vector<StoredTensor> tensors = dummy_tensors(tiny_config());
  for (int layer = 0; layer < 3; ++layer)
    if (layer != missing) tensors.push_back(f32_scale(fmt::format("model.layers.{}.self_attn.k_scale", layer), 0.5f));
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  folder.write("model.safetensors", safetensors_bytes(tensors));
  const auto ops = make_ref_ops();
  const auto model = load(folder, LoadFormat::kSafetensors, *ops);
  return model.ok() ? Status() : Status(model.error());
}

TEST(Loader, RefusesScalesThatSomeLayersLack) {
  EXPECT_TRUE(load_without_scale_of(-1).ok());
  for (const int missing : {0, 1, 2}) {
    const Status status = load_without_scale_of(missing);
    ASSERT_FALSE(status.ok()) << missing;
    EXPECT_NE(status.error().message.find(
                  fmt::format("model.layers.{}.self_attn.k_scale is missing: expected the scale of an fp8 cache in "
                              "every layer with latent attention or in none, found 2 of 3",
                              missing)),
              std::string::npos)
        << status.error().message;
  }
}

// Dummy weights with the scales of a file of this text.
Result<std::vector<float>> logits_with_file(const std::string& text, LatentFormat cache = LatentFormat::kF8E4M3) {
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  folder.write("scales.json", text);
  LoadOptions options{.path = folder.path(), .format = LoadFormat::kDummy, .cache = cache};
  options.kv_scale_file = folder.path() + "/scales.json";
  const auto ops = make_ref_ops();
  ASSIGN_OR_RETURN(const auto model, load_model(options, *ops));
  EXPECT_TRUE(model->info().has_cache_scales);
  SingleSequence sequence(*model, *ops, cache, 64);
  return sequence.run(kPrompt, MlaForm::kExpanded).back();
}

CacheScales scales_of_all(float scale) {
  CacheScales scales;
  for (int layer = 0; layer < 3; ++layer) scales.emplace(fmt::format("model.layers.{}.self_attn", layer), scale);
  return scales;
}

TEST(Loader, ReadsTheScalesOfAnFp8CacheFromAFile) {
  CacheScales scales = scales_of_all(0.375f);
  const auto of_file = logits_with_file(dump_json(cache_scales_json(scales, json(R"({"margin": 1.5})"))));
  ASSERT_TRUE(of_file.ok()) << of_file.error().message;
  EXPECT_EQ(*of_file, *logits_with({f32_scale("k_scale", 0.375f)}));
  scales["model.layers.1.self_attn"] = 0.02f;
  EXPECT_NE(*of_file, *logits_with_file(dump_json(cache_scales_json(scales, Json()))));
  EXPECT_EQ(*logits_with({}), *logits_with_file(dump_json(cache_scales_json(scales_of_all(1), Json()))));
}

TEST(Loader, CacheScalesKeepTheirBitsInAFile) {
  const std::vector<std::string> names = {"a.self_attn", "b.self_attn", "c.self_attn"};
  const CacheScales scales = {{names[0], 0.1f}, {names[1], 1.17549435e-38f}, {names[2], 3.3895314e38f}};
  const TempFolder folder;
  folder.write("scales.json", dump_json(cache_scales_json(scales, Json())));
  const auto read = read_cache_scales(folder.path() + "/scales.json", names);
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(*read, scales);
}

TEST(Loader, RefusesAFileOfScalesByField) {
  const auto file = [](const char* second) {
    return fmt::format(R"({{"scales": {{"model.layers.0.self_attn.k_scale": 0.5,
      "model.layers.1.self_attn.k_scale": 0.5, {}}}}})",
                       second);
  };
  const std::string third = R"("model.layers.2.self_attn.k_scale": )";
  EXPECT_TRUE(logits_with_file(file((third + "1").c_str())).ok());
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "is empty"},
      {"[1]", "scales: expected an object"},
      {R"({"scales": 1})", "scales: expected an object with a scale for each layer, found number"},
      {R"({"scales": {}})", "model.layers.0.self_attn.k_scale is missing: expected a scale for each of 3 layers"},
      {file(R"("model.layers.3.self_attn.k_scale": 1)"), "layers.3.self_attn.k_scale: the model has no such layer"},
      {file(R"("k": 1)"), "scales: k: the model has no such layer"},
      {file((third + "\"1\"").c_str()), "layers.2.self_attn.k_scale: expected a number, found string"},
      {file((third + "0").c_str()), "layers.2.self_attn.k_scale: expected a number over 0 that f32 holds, found 0"},
      {file((third + "-0.5").c_str()), "expected a number over 0 that f32 holds, found -0.5"},
      {file((third + "1e-40").c_str()), "expected a number over 0 that f32 holds, found 1e-40"},
      {file((third + "1e39").c_str()), "expected a number over 0 that f32 holds, found 1e+39"},
      {file((third + "1e999").c_str()), "expected a number over 0 that f32 holds, found inf"},
      {file((third + "NaN").c_str()), "scales.json: "},
      {file((third + "1, " + third + "1").c_str()), "scales.json: "},
      {std::string((1 << 20) + 1, ' '), "1048576"}};
  for (const auto& [text, message] : cases) {
    const auto logits = logits_with_file(text);
    ASSERT_FALSE(logits.ok()) << message;
    EXPECT_EQ(logits.error().field, "kv-scale");
    if (message != "is empty") {
      EXPECT_NE(logits.error().message.find(message), std::string::npos) << logits.error().message;
    }
    EXPECT_NE(logits.error().message.find("--kv-scale"), std::string::npos) << logits.error().message;
  }
}

TEST(Loader, AFileOfScalesIsForAnFp8CacheWithoutOthers) {
  const std::string text = dump_json(cache_scales_json(scales_of_all(1), Json()));
  for (const LatentFormat other : {LatentFormat::kBF16, LatentFormat::kF8Tiles})
    EXPECT_NE(logits_with_file(text, other).error().message.find("--kv-scale"), std::string::npos);
  std::vector<StoredTensor> tensors = dummy_tensors(tiny_config());
  for (int layer = 0; layer < 3; ++layer)
    tensors.push_back(f32_scale(fmt::format("model.layers.{}.self_attn.attn.k_scale", layer), 0.5f));
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  folder.write("model.safetensors", safetensors_bytes(tensors));
  folder.write("scales.json", text);
  LoadOptions options{.path = folder.path(), .cache = LatentFormat::kF8E4M3};
  options.kv_scale_file = folder.path() + "/scales.json";
  const Status status = check_model_files(options);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("has scales of its own"), std::string::npos) << status.error().message;
}

// The record is made for one shape, and not every backend keeps it. Before a weight is read.
TEST(Loader, RefusesARecordThatCannotHoldTheLatents) {
  const auto refusal = [](Json config, LatentFormat cache = LatentFormat::kF8Tiles) -> std::string {
    const TempFolder folder;
    folder.write("config.json", dump_json(config));
    LoadOptions options{.path = folder.path(), .format = LoadFormat::kDummy, .cache = cache};
    options.progress = [](const char*, int64_t, int64_t) { ADD_FAILURE() << "weights are read"; };
    const auto ops = make_ref_ops();
    const auto model = load_model(options, *ops);
    if (model.ok()) return "";
    EXPECT_EQ(model.error().field, "kv-cache-dtype");
    return model.error().message;
  };
  const std::string narrow = refusal(tiny_config());
  EXPECT_NE(narrow.find("for kv_lora_rank 512 and qk_rope_head_dim 64, config.json has 32 and 8"), std::string::npos)
      << narrow;
  Json hybrid = tiny_hybrid_config();
  hybrid.set("linear_attn_config", json(R"({"head_dim": 128, "num_heads": 3, "short_conv_kernel_size": 4,
                                            "kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []})"));
  const std::string recurrent = refusal(hybrid);
  EXPECT_NE(recurrent.find("no layer of this model has latent attention"), std::string::npos) << recurrent;
}

TEST(Loader, ProgressReachesTheTotal) {
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  LoadOptions options;
  options.path = folder.path();
  options.format = LoadFormat::kDummy;
  int64_t last = 0, all = 0;
  options.progress = [&](const char*, int64_t done, int64_t total) {
    EXPECT_LE(last, done);
    EXPECT_LE(done, total);
    last = done;
    all = total;
  };
  const auto ops = make_ref_ops();
  const auto model = load_model(options, *ops);
  ASSERT_TRUE(model.ok());
  EXPECT_GT(all, 100'000);
  EXPECT_EQ(last, all);
  EXPECT_GT((*model)->info().weight_bytes, all);  // f32 in ref
}

TEST(Loader, LatentEpsDefaultsToTheNormEps) {
  const TempFolder folder;
  folder.write("config.json", dump_json(with("rms_norm_eps", Json(0.5))));
  const auto logits = [&](double latent_eps) {
    LoadOptions options;
    options.path = folder.path();
    options.format = LoadFormat::kDummy;
    options.latent_norm_eps = latent_eps;
    const auto ops = make_ref_ops();
    const auto model = load_model(options, *ops);
    SingleSequence sequence(**model, *ops, LatentFormat::kF32, 64);
    return sequence.run(kPrompt, MlaForm::kAbsorbed).back();
  };
  EXPECT_EQ(logits(-1), logits(0.5));
  EXPECT_NE(logits(-1), logits(1e-6));
}

class Wrong : public ::testing::Test {
 protected:
  using Tensors = std::vector<StoredTensor>;
  static StoredTensor& find(Tensors& tensors, const std::string& name) {
    for (StoredTensor& t : tensors)
      if (t.name == name) return t;
    CHECK(false, "no tensor ", name);
  }
  // The error of loading the model after `change`; empty when it loads.
  static std::string error(const Json& config, const std::function<void(Tensors&)>& change) {
    Tensors tensors = dummy_tensors(config);
    change(tensors);
    const TempFolder folder;
    folder.write("config.json", dump_json(config));
    folder.write("model.safetensors", safetensors_bytes(tensors));
    const auto ops = make_ref_ops();
    const auto model = load(folder, LoadFormat::kSafetensors, *ops);
    if (model.ok()) return "";
    EXPECT_NE(model.error().message.find(folder.path()), std::string::npos) << model.error().message;
    return model.error().message;
  }
  static void expect_parts(const std::string& error, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
      EXPECT_NE(error.find(part), std::string::npos) << "\"" << error << "\" lacks " << part;
  }
};

TEST_F(Wrong, EveryMissingTensorIsNamed) {
  for (const Json& config : {tiny_config(), with("quantization_config", fp8_quantization()), tiny_hybrid_config()}) {
    const Tensors tensors = dummy_tensors(config);
    constexpr size_t kEvery = kSanitized ? 10 : 1;
    for (size_t i = 0; i < tensors.size(); i += kEvery) {
      const StoredTensor& t = tensors[i];
      const std::string message = error(config, [&](Tensors& all) {
        std::erase_if(all, [&](const StoredTensor& other) { return other.name == t.name; });
      });
      expect_parts(message, {"tensor " + t.name + " is missing", "expected"});
    }
  }
}

TEST_F(Wrong, TensorsOfKimiLinearHaveTheirShapes) {
  const std::string attention = "model.layers.3.self_attn.";
  for (const auto& [name, shape] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {attention + "A_log", {1, 1, 3, 1}},
           {attention + "dt_bias", {384}},
           {attention + "k_conv1d.weight", {384, 1, 4}},
           {attention + "f_b_proj.weight", {384, 128}},
           {attention + "b_proj.weight", {3, 64}},
           {attention + "o_norm.weight", {128}},
           {"model.layers.4.block_sparse_moe.experts.7.w2.weight", {64, 32}},
           {"model.layers.0.mlp.down_proj.weight", {64, 160}}}) {
    const std::string message = error(tiny_hybrid_config(), [&, name = name, shape = shape](Tensors& all) {
      StoredTensor& tensor = find(all, name);
      EXPECT_EQ(tensor.shape, shape) << name;
      tensor.shape.push_back(1);
    });
    expect_parts(message, {name, shape_text(shape)});
  }
}

// A list that says one kind of layer over tensors of the other: the message names the layer as the list counts.
TEST_F(Wrong, LayerListsMustAgreeWithTheTensors) {
  const std::vector<StoredTensor> tensors = dummy_tensors(tiny_hybrid_config());
  const auto error_of = [&](const char* kda, const char* latent) {
    Json config = tiny_hybrid_config();
    config.find("linear_attn_config")->set("kda_layers", json(kda));
    config.find("linear_attn_config")->set("full_attn_layers", json(latent));
    return error(config, [&](Tensors& all) { all = tensors; });
  };
  expect_parts(error_of("[1, 2, 3, 4]", "[5]"),
               {"model.layers.2.self_attn.A_log", "missing", "kda_layers of config.json has layer 3"});
  expect_parts(error_of("[1, 2]", "[3, 4, 5]"), {"model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "missing",
                                                 "full_attn_layers of config.json has layer 4"});
}

struct NarrowOps : RefOps {
  const char* name() const override { return "narrow"; }
  ShapeLimits limits() const override { return {.max_latent = 31}; }
};

TEST_F(Wrong, AModelThatTheBackendCannotComputeIsRefused) {
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  NarrowOps ops;
  const auto model = load(folder, LoadFormat::kDummy, ops);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.error().field, "kv_lora_rank");
  expect_parts(model.error().message, {"narrow", "at most 31", "found 32", "--device cpu"});
}

TEST_F(Wrong, MissingInt4ScaleIsNamed) {
  const std::string name = "model.layers.2.mlp.experts.7.up_proj.weight_scale";
  expect_parts(error(with("quantization_config", int4_quantization()),
                     [&](Tensors& all) { std::erase_if(all, [&](const auto& t) { return t.name == name; }); }),
               {name, "missing", "BF16 [32, 2]"});
}

TEST_F(Wrong, ShapesAndTypesAreNamed) {
  const std::string q_b = "model.layers.1.self_attn.q_b_proj.weight";
  expect_parts(error(tiny_config(),
                     [&](Tensors& all) {
                       find(all, q_b).shape = {40, 48};
                     }),
               {"model.safetensors", q_b, "[48, 40]", "found BF16 [40, 48]"});
  expect_parts(error(tiny_config(), [&](Tensors& all) { find(all, q_b).shape = {48 * 40}; }),
               {q_b, "found BF16 [1920]"});
  expect_parts(error(tiny_config(), [&](Tensors& all) { find(all, q_b).type = "I16"; }), {q_b, "found I16 [48, 40]"});
  const std::string norm = "model.norm.weight";
  expect_parts(error(tiny_config(), [&](Tensors& all) { find(all, norm).type = "I32"; }),
               {norm, "BF16, F16 or F32 [64]", "found I32 [64]"});
  expect_parts(error(tiny_config(),
                     [&](Tensors& all) {
                       find(all, norm) = {norm, "F32", {63}, std::string(63 * 4, 'x')};
                     }),
               {norm, "[64]", "found F32 [63]"});
}

TEST_F(Wrong, QuantisationMustBeDeclared) {
  const auto swap_in = [](const Json& from, const char* name) {
    return [&from, name](Tensors& all) {
      for (const StoredTensor& t : dummy_tensors(from))
        if (t.name.starts_with(std::string(name) + ".weight")) all.push_back(t);
      std::erase_if(all,
                    [&](const StoredTensor& t) { return t.name == std::string(name) + ".weight" && t.type == "BF16"; });
    };
  };
  const char* expert = "model.layers.1.mlp.experts.0.gate_proj";
  const Json int4 = with("quantization_config", int4_quantization());
  const Json fp8 = with("quantization_config", fp8_quantization());
  expect_parts(error(tiny_config(), swap_in(int4, expert)), {expert, "config.json declares none", "I32 [32, 8]"});
  expect_parts(error(tiny_config(), swap_in(fp8, expert)), {expert, "BF16, F16 or F32", "found F8_E4M3"});
  // One expert left in bf16 in a quantised model is fine: the tensors decide.
  const std::string base = expert;
  EXPECT_EQ(error(int4,
                  [&](Tensors& all) {
                    std::erase_if(all, [&](const StoredTensor& t) { return t.name.starts_with(base + ".weight"); });
                    all.push_back({base + ".weight", "BF16", {32, 64}, std::string(32 * 64 * 2, '\0')});
                  }),
            "");
}

TEST_F(Wrong, Int4ShapeTensorMustAgree) {
  const std::string name = "model.layers.1.mlp.experts.0.gate_proj.weight_shape";
  expect_parts(
      error(with("quantization_config", int4_quantization()), [&](Tensors& all) { find(all, name).bytes[0] = 33; }),
      {name, "(32, 64)", "(33, 64)"});
  expect_parts(
      error(with("quantization_config", int4_quantization()), [&](Tensors& all) { find(all, name).bytes[4] = 63; }),
      {name, "(32, 64)", "(32, 63)"});
  const auto wide = [&](int64_t out, int64_t in) {
    return error(with("quantization_config", int4_quantization()), [&](Tensors& all) {
      const int64_t shape[2] = {out, in};
      find(all, name).type = "I64";
      find(all, name).bytes = bytes_of(shape, 16);
    });
  };
  EXPECT_EQ(wide(32, 64), "");
  expect_parts(wide(32, 64 + (int64_t{1} << 32)), {name, "(32, 64)", "(32, 4294967360)"});
}

TEST_F(Wrong, ExtraTensorsAreNamedUnlessKnown) {
  const auto add = [](const char* name) { return [name](Tensors& all) { all.push_back({name, "U8", {1}, "x"}); }; };
  for (const char* known : {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.3.eh_proj.weight",
                            "model.layers.61.mlp.gate.weight", "vision_tower.x", "mm_projector.pre_norm.weight"})
    EXPECT_EQ(error(tiny_config(), add(known)), "") << known;
  for (const char* extra : {"model.layers.0.mlp.gate.weight", "model.layers.2.self_attn.q_proj.weight",
                            "model.layers.3", "model.layers.-1.x", "model.layers.9x.y", "lm_head.bias",
                            "xmodel.layers.7.y", "model.layers.1.mlp.experts.8.up_proj.weight"})
    expect_parts(error(tiny_config(), add(extra)), {extra, "expected no such tensor", "3 layers", "U8 [1]"});
}

TEST_F(Wrong, LayersThatAreLeftOutAreLogged) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(error(tiny_config(), [](Tensors& all) { all.push_back({"model.layers.3.x", "U8", {1}, "x"}); }), "");
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find(": 1 tensors are not loaded"), std::string::npos) << log;
}

TEST_F(Wrong, ATruncatedFileIsAnError) {
  const TempFolder folder;
  folder.write("config.json", dump_json(tiny_config()));
  const std::string whole = safetensors_bytes(dummy_tensors(tiny_config()));
  const auto ops = make_ref_ops();
  for (size_t n = 0; n < whole.size(); n += whole.size() / 97) {
    folder.write("model.safetensors", whole.substr(0, n));
    EXPECT_FALSE(load(folder, LoadFormat::kSafetensors, *ops).ok()) << n;
  }
}

}  // namespace
}  // namespace perigee
