#include "model/config.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>

#include "model/test_weights.h"

namespace perigee {
namespace {

Json rope_scaling(double factor, double beta_fast, double mscale) {
  Json yarn;
  yarn.set("type", "yarn");
  yarn.set("factor", factor);
  yarn.set("beta_fast", beta_fast);
  yarn.set("beta_slow", 1.0);
  yarn.set("mscale", mscale);
  yarn.set("mscale_all_dim", mscale);
  yarn.set("original_max_position_embeddings", 4096);
  return yarn;
}

ModelConfig with_rope(double theta, Json scaling, int nope = 128) {
  Json config = tiny_config();
  config.set("rope_theta", theta);
  config.set("rope_scaling", std::move(scaling));
  config.set("qk_nope_head_dim", nope);
  config.set("qk_rope_head_dim", 64);
  const auto parsed = parse_config(config, Json());
  CHECK(parsed.ok(), parsed.error().message);
  return *parsed;
}

void expect_frequencies(const ModelConfig& c, const std::vector<std::pair<int, double>>& samples) {
  const std::vector<float> f = rope_inv_freq(c.rope_config, 64);
  ASSERT_EQ(f.size(), 32u);
  for (const auto& [i, expected] : samples) EXPECT_NEAR(f[i] / expected, 1, 1e-6) << i;
}

void expect_scale(const ModelConfig& c, double expected) {
  EXPECT_NEAR(mla_softmax_scale(c) / expected, 1, 1e-6);
  EXPECT_NEAR(rope_cos_sin_factor(c.rope_config), 1, 1e-12);
}

TEST(Yarn, KimiK2Instruct) {
  const ModelConfig c = with_rope(50000, rope_scaling(32, 1, 1));
  expect_scale(c, 0.130860800);
  expect_frequencies(c, {{0, 1},
                         {1, 0.713111085},
                         {8, 0.0668740305},
                         {9, 0.0476886124},
                         {12, 0.0172936334},
                         {15, 0.00627130338},
                         {19, 0.00162175991},
                         {20, 3.61404677e-05},
                         {23, 1.31058542e-05},
                         {31, 8.76441291e-07}});
}

TEST(Yarn, KimiK2Thinking) {
  const ModelConfig c = with_rope(50000, rope_scaling(64, 1, 1));
  expect_scale(c, 0.144679626);
  expect_frequencies(c, {{9, 0.0476886124}, {19, 0.00162175991}, {20, 1.80702339e-05}, {31, 4.38220646e-07}});
}

TEST(Yarn, KimiK26) {
  const ModelConfig c = with_rope(50000, rope_scaling(64, 32, 1));
  expect_scale(c, 0.144679626);
  expect_frequencies(c, {{8, 0.0668740305},
                         {9, 0.043776656},
                         {12, 0.0116191599},
                         {15, 0.00267020339},
                         {19, 0.000158374991},
                         {20, 1.80702339e-05},
                         {23, 6.55292708e-06}});
}

TEST(Yarn, DeepseekV3AndV2Lite) {
  const ModelConfig v3 = with_rope(10000, rope_scaling(40, 32, 1));
  expect_scale(v3, 0.135233779);
  expect_frequencies(v3, {{1, 0.749894209},
                          {8, 0.1},
                          {9, 0.0749894209},
                          {12, 0.0268793601},
                          {15, 0.00833450895},
                          {19, 0.00137051364},
                          {20, 0.000790569415},
                          {23, 3.33380358e-05},
                          {31, 3.33380358e-06}});
  expect_scale(with_rope(10000, rope_scaling(40, 32, 0.707)), 0.114721387);
}

TEST(Yarn, PlainRope) {
  expect_scale(with_rope(50000, Json()), 0.0721687836);
  expect_scale(with_rope(1000000, Json(), 192), 0.0625);
}

// A context so short that the whole ramp is pair 0: it turns as it did, all others slower by the factor.
TEST(Yarn, ARampOfNoWidth) {
  const RopeConfig rope{.theta = 10000, .yarn = YarnConfig{.factor = 4, .original_positions = 6}};
  const std::vector<float> frequencies = rope_inv_freq(rope, 8);
  EXPECT_EQ(frequencies[0], 1);
  for (int i = 1; i < 4; ++i) EXPECT_FLOAT_EQ(frequencies[i], std::pow(10000.0f, -static_cast<float>(i) / 4) / 4) << i;
}

// A context so long that the ramp, from pair 22 to 35, ends beyond the last pair: that one is not slowed in full.
TEST(Yarn, ARampThatEndsBeyondTheLastPair) {
  const RopeConfig rope{.theta = 10000, .yarn = YarnConfig{.factor = 4, .original_positions = 131072}};
  const std::vector<float> frequencies = rope_inv_freq(rope, 64);
  ASSERT_EQ(frequencies.size(), 32u);
  for (const int i : {22, 23, 27, 31}) {
    const double plain = std::pow(10000.0, -i / 32.0), ramp = (i - 22) / 13.0;
    EXPECT_NEAR(frequencies[static_cast<size_t>(i)] / (plain / 4 * ramp + plain * (1 - ramp)), 1, 1e-6) << i;
  }
}

TEST(Yarn, WhatAConfigurationLeavesOut) {
  const ModelConfig c =
      with_rope(10000, json(R"({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096})"));
  EXPECT_EQ(c.rope_config.yarn->beta_fast, 32);
  EXPECT_EQ(c.rope_config.yarn->beta_slow, 1);
  EXPECT_EQ(c.rope_config.yarn->mscale, 1);
  EXPECT_EQ(c.rope_config.yarn->mscale_all_dim, 0);
}

TEST(Yarn, CosSinFactorIsTheRatioOfBothScales) {
  Json scaling = rope_scaling(40, 32, 1);
  scaling.set("mscale_all_dim", 0.0);
  const ModelConfig c = with_rope(10000, scaling);
  EXPECT_NEAR(rope_cos_sin_factor(c.rope_config), 0.1 * std::log(40) + 1, 1e-9);
  EXPECT_NEAR(mla_softmax_scale(c), 0.0721687836, 1e-9);
}

TEST(Config, NewRopeStyle) {
  Json config = tiny_config();
  config.set("rope_theta", Json());
  config.set("rope_scaling", Json());
  Json parameters = rope_scaling(64.0, 32, 1);
  parameters.set("type", Json());
  parameters.set("rope_type", "yarn");
  parameters.set("rope_theta", 50000.0);
  config.set("rope_parameters", parameters);
  const auto c = parse_config(config, Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->rope_config.theta, 50000);
  ASSERT_TRUE(c->rope_config.yarn);
  EXPECT_EQ(c->rope_config.yarn->factor, 64);
}

TEST(Config, LayerTypesInsteadOfACount) {
  Json config = tiny_config();
  config.set("first_k_dense_replace", Json());
  config.set("mlp_layer_types", json(R"(["dense", "dense", "sparse"])"));
  const auto c = parse_config(config, Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->first_dense, 2);
  EXPECT_FALSE(c->is_moe(1));
  EXPECT_TRUE(c->is_moe(2));
  for (const char* bad : {R"(["dense"])", R"(["sparse", "dense", "sparse"])", R"(["dense", "dense", 1])", "3"}) {
    config.set("mlp_layer_types", json(bad));
    const auto wrong = parse_config(config, Json());
    ASSERT_FALSE(wrong.ok()) << bad;
    EXPECT_NE(wrong.error().message.find("mlp_layer_types"), std::string::npos) << wrong.error().message;
  }
}

TEST(Config, NestedTextConfig) {
  Json text = tiny_config();
  text.set("quantization_config", int4_quantization());
  Json config;
  config.set("architectures", Json(Json::Array{"KimiK25ForConditionalGeneration"}));
  config.set("text_config", text);
  config.set("eos_token_id", 7);
  Json generation;
  generation.set("eos_token_id", Json(Json::Array{Json(9), Json(7)}));
  const auto c = parse_config(config, generation);
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->prefix, "language_model.");
  EXPECT_EQ(c->architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(c->eos_ids, (std::vector<int32_t>{1, 7, 9}));
  EXPECT_EQ(c->quantization, Quantization::kInt4Group32);
}

TEST(Config, FamilyDefaults) {
  Json config = tiny_config();
  for (const char* key : {"scoring_func", "topk_method", "q_lora_rank"}) config.set(key, Json());
  auto c = parse_config(config, Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->score, RouterScore::kSigmoid);
  EXPECT_TRUE(c->correction_bias);
  EXPECT_EQ(c->q_lora, 0);
  config.set("architectures", Json(Json::Array{"DeepseekV2ForCausalLM"}));
  c = parse_config(config, Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->score, RouterScore::kSoftmax);
  EXPECT_FALSE(c->correction_bias);
  EXPECT_EQ(c->num_groups, 1);  // greedy: no groups
}

void expect_error(const Json& config, const std::vector<std::string>& parts) {
  const auto c = parse_config(config, Json());
  ASSERT_FALSE(c.ok()) << parts[0];
  for (const std::string& part : parts)
    EXPECT_NE(c.error().message.find(part), std::string::npos) << c.error().message << " lacks " << part;
}

TEST(Config, MissingKeysAreNamed) {
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
        "num_experts_per_tok", "rms_norm_eps", "max_position_embeddings", "rope_theta"}) {
    Json config = tiny_config();
    config.set(key, Json());
    expect_error(config, {key, "found nothing"});
  }
}

TEST(Config, BadValuesAreNamed) {
  const std::vector<std::tuple<const char*, Json, const char*>> table = {
      {"hidden_size", Json(-1), "-1"},
      {"hidden_size", Json(1.5), "1.5"},
      {"hidden_size", Json("64"), "\"64\""},
      {"vocab_size", Json(1e300), "1e+300"},
      {"qk_rope_head_dim", Json(7), "even"},
      {"num_key_value_heads", Json(1), "number of heads"},
      {"num_experts_per_tok", Json(9), "9"},
      {"num_experts_per_tok", Json(5), "2 groups"},
      {"n_routed_experts", Json(1 << 20), "1048576"},
      {"n_group", Json(3), "divisor of the 8"},
      {"n_group", Json(8), "at least two"},
      {"scoring_func", Json("tanh"), "tanh"},
      {"topk_method", Json("group_limited_greedy"), "group_limited_greedy"},
      {"hidden_act", Json("gelu"), "gelu"},
      {"attention_bias", Json(true), "true"},
      {"tie_word_embeddings", Json(true), "true"},
      {"rope_theta", Json(-1), "-1"},
      {"rope_scaling", Json("yarn"), "object"},
      {"rope_scaling", json(R"({"type": "linear", "factor": 2})"), "linear"},
      {"rope_scaling", json(R"({"type": "yarn", "original_max_position_embeddings": 64})"), "factor"},
      {"eos_token_id", Json(96), "96"},
      {"eos_token_id", Json("x"), "\"x\""},
      {"quantization_config", Json(1), "number"},
      {"quantization_config", json(R"({"quant_method": "gptq"})"), "gptq"},
      {"quantization_config", json(R"({"quant_method": "fp8", "weight_block_size": [64, 64]})"), "[64,64]"},
  };
  for (const auto& [key, value, found] : table) {
    Json config = tiny_config();
    config.set(key, value);
    expect_error(config, {key, found});
  }
}

TEST(Config, Int4GroupsOfAnotherKindAreNamed) {
  for (const auto& [key, value] : std::vector<std::pair<const char*, Json>>{{"num_bits", Json(8)},
                                                                            {"group_size", Json(128)},
                                                                            {"symmetric", Json(false)},
                                                                            {"actorder", Json("static")}}) {
    Json quantization = int4_quantization();
    quantization.find("config_groups")->find("group_0")->find("weights")->set(key, value);
    Json config = tiny_config();
    config.set("quantization_config", quantization);
    expect_error(config, {"quantization_config", "group_0", key});
  }
}

// The lists of Kimi-Linear-48B: every fourth layer is latent, but the last group is shorter.
TEST(KimiLinearConfig, LayersAreWhatTheListsSay) {
  Json config = tiny_hybrid_config();
  config.set("num_hidden_layers", 27);
  config.find("linear_attn_config")
      ->set("kda_layers", json("[1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]"));
  config.find("linear_attn_config")->set("full_attn_layers", json("[4, 8, 12, 16, 20, 24, 27]"));
  const auto c = parse_config(config, Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->num_kda_layers(), 20);
  std::vector<int64_t> latent;
  for (int64_t i = 0; i < 27; ++i)
    if (!c->is_kda(i)) latent.push_back(i);
  EXPECT_EQ(latent, (std::vector<int64_t>{3, 7, 11, 15, 19, 23, 26}));
}

TEST(KimiLinearConfig, ReadsItsOwnKeyNames) {
  const auto c = parse_config(tiny_hybrid_config(), Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->num_experts, 8);
  EXPECT_EQ(c->top_k, 3);
  EXPECT_EQ(c->num_shared_experts, 1);
  EXPECT_EQ(c->max_positions, 512);
  EXPECT_EQ(c->kda.heads, 3);
  EXPECT_EQ(c->kda.width(), 384);
  EXPECT_TRUE(c->normalize_top_k);
  EXPECT_TRUE(c->correction_bias);
  EXPECT_FALSE(c->bias_in_weights);
  EXPECT_FALSE(c->rope_enabled);
  EXPECT_EQ(c->latent_norm_eps, 1e-5);
  EXPECT_NEAR(mla_softmax_scale(*c), 1 / std::sqrt(24.0), 1e-12);
}

// Without rotation its scaling must not touch the softmax; with rotation it is that of the other families.
TEST(KimiLinearConfig, RopeIsReadOnlyWhenUsed) {
  Json config = tiny_hybrid_config();
  config.set("rope_scaling", rope_scaling(40, 32, 1));
  auto c = parse_config(config, Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_FALSE(c->rope_config.yarn);
  config.set("mla_use_nope", false);
  config.set("rope_theta", 10000);
  c = parse_config(config, Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_TRUE(c->rope_enabled);
  EXPECT_TRUE(c->rope_config.yarn);
}

TEST(KimiLinearConfig, AsTransformers5WritesIt) {
  const auto old = parse_config(tiny_hybrid_config(), Json()),
             c = parse_config(tiny_hybrid_config_of_transformers_5(), Json());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_FALSE(c->rope_enabled);
  EXPECT_EQ(c->kda_layers, old->kda_layers);
  EXPECT_EQ(c->kda.heads, old->kda.heads);
  EXPECT_EQ(c->first_dense, old->first_dense);
  EXPECT_EQ(c->score, old->score);
  EXPECT_EQ(c->correction_bias, old->correction_bias);
  EXPECT_EQ(c->max_positions, old->max_positions);
  EXPECT_EQ(c->eos_ids, old->eos_ids);
}

TEST(KimiLinearConfig, BadLayerTypesAreNamed) {
  for (const char* types :
       {R"(["full_attention"])", R"("full_attention")", "[1, 2, 3, 4, 5]",
        R"(["linear_attention", "linear_attention", "sliding_attention", "linear_attention", "full_attention"])"}) {
    Json config = tiny_hybrid_config_of_transformers_5();
    config.set("layer_types", json(types));
    expect_error(config, {"layer_types", "5 words", "linear_attention", "full_attention"});
  }
  Json config = tiny_hybrid_config_of_transformers_5();
  config.set("linear_head_dim", 64);
  expect_error(config, {"linear_head_dim", "[128, 128]", "64"});
  config = tiny_hybrid_config();  // which has lists, too
  const Json types = *tiny_hybrid_config_of_transformers_5().find("layer_types");
  config.set("layer_types", types);
  EXPECT_TRUE(parse_config(config, Json()).ok());
  config.find("linear_attn_config")->set("kda_layers", json("[1, 2, 3]"));
  config.find("linear_attn_config")->set("full_attn_layers", json("[4, 5]"));
  expect_error(config, {"layer_types", "what linear_attn_config says"});
}

TEST(Config, RopeOfHalvesIsRefused) {
  Json config = tiny_config();
  config.set("rope_interleave", true);
  EXPECT_TRUE(parse_config(config, Json()).ok());
  config.set("rope_interleave", false);
  expect_error(config, {"rope_interleave", "true", "false"});
}

TEST(KimiLinearConfig, UngroupedChoiceIgnoresGroups) {
  Json config = tiny_hybrid_config();
  config.set("num_expert_group", 4);
  config.set("topk_group", 2);
  EXPECT_EQ(parse_config(config, Json())->num_groups, 4);
  config.set("use_grouped_topk", false);
  EXPECT_EQ(parse_config(config, Json())->num_groups, 1);
}

TEST(KimiLinearConfig, BadLayerListsNameTheLayer) {
  const std::vector<std::tuple<const char*, const char*, std::vector<std::string>>> table = {
      {"kda_layers", "[1, 2, 3, 4]", {"full_attn_layers", "layer 3", "in kda_layers already"}},
      {"kda_layers", "[1, 2]", {"layer 4 in neither"}},
      {"kda_layers", "[1, 2, 2, 4]", {"kda_layers", "layer 2", "already"}},
      {"kda_layers", "[0, 1, 2, 4]", {"kda_layers", "[1, 5]", "found 0"}},
      {"full_attn_layers", "[3, 5, 6]", {"full_attn_layers", "[1, 5]", "found 6"}},
      {"full_attn_layers", "[3, 1.5]", {"full_attn_layers", "found 1.5"}},
      {"full_attn_layers", "[3]", {"layer 5 in neither"}},
      {"full_attn_layers", "null", {"full_attn_layers", "found nothing"}},
      {"kda_layers", "3", {"kda_layers", "a list"}},
      {"num_heads", "0", {"num_heads", "found 0"}},
      {"head_dim", "64", {"head_dim", "[128, 128]", "found 64"}},
      {"short_conv_kernel_size", "3", {"short_conv_kernel_size", "found 3"}},
  };
  for (const auto& [key, value, parts] : table) {
    Json config = tiny_hybrid_config();
    config.find("linear_attn_config")->set(key, json(value));
    expect_error(config, parts);
  }
  Json config = tiny_hybrid_config();
  config.set("linear_attn_config", Json());
  expect_error(config, {"linear_attn_config", "found nothing"});
  config = tiny_hybrid_config();
  config.set("mla_use_nope", 1);
  expect_error(config, {"mla_use_nope", "true or false", "found 1"});
}

constexpr ShapeLimits kLimits = {
    .unit = 8, .latent_unit = 16, .max_latent = 64, .max_rope = 16, .max_experts = 8, .max_groups = 4, .max_top_k = 3};

Status limits_of(Json config, const ShapeLimits& limits) {
  const auto parsed = parse_config(config, Json());
  CHECK(parsed.ok(), parsed.error().message);
  return check_limits(*parsed, limits, "toy");
}

Status within(Json config, const char* key, int64_t value) {
  config.set("v_head_dim", 16);  // both tiny models have 12
  config.set(key, value);
  return limits_of(config, kLimits);
}

void expect_beyond(const Json& config, const char* key, int64_t value, const std::string& need) {
  const Status status = within(config, key, value);
  ASSERT_FALSE(status.ok()) << key;
  EXPECT_EQ(status.error().code, Code::kBadInput);
  EXPECT_EQ(status.error().field, key);
  EXPECT_EQ(
      status.error().message,
      fmt::format("config.json: {}: --device toy expects {}, found {}; --device cpu takes any", key, need, value));
}

TEST(Limits, AModelBeyondThemIsToldTheField) {
  const std::string eight = "a multiple of 8";
  for (const char* key :
       {"hidden_size", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size"}) {
    EXPECT_TRUE(within(tiny_config(), key, 72).ok()) << key;
    expect_beyond(tiny_config(), key, 68, eight);
  }
  for (const int64_t latent : {40, 80})
    expect_beyond(tiny_config(), "kv_lora_rank", latent, "a multiple of 16, at most 64");
  for (const int64_t rope : {12, 24}) expect_beyond(tiny_config(), "qk_rope_head_dim", rope, eight + ", at most 16");
  expect_beyond(tiny_config(), "n_routed_experts", 16, "at most 8");
  expect_beyond(tiny_config(), "num_experts_per_tok", 4, "at most 3");
  Json many = tiny_config();
  many.set("n_routed_experts", 16);
  ShapeLimits groups = kLimits;
  groups.unit = 1, groups.max_experts = 16, groups.max_groups = 3;
  const Status status = limits_of(many, groups);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().field, "n_group");
}

TEST(Limits, KimiLinearHasItsOwnNames) {
  expect_beyond(tiny_hybrid_config(), "num_experts", 16, "at most 8");
  expect_beyond(tiny_hybrid_config(), "num_experts_per_token", 4, "at most 3");
}

TEST(Limits, OnlyWhatTheModelHasCounts) {
  EXPECT_TRUE(limits_of(tiny_config(), ShapeLimits()).ok());
  EXPECT_TRUE(within(tiny_config(), "vocab_size", 97).ok());
  Json dense = tiny_config();
  dense.set("first_k_dense_replace", 3);
  EXPECT_TRUE(within(dense, "moe_intermediate_size", 33).ok());
  Json sparse = tiny_config();
  sparse.set("first_k_dense_replace", 0);
  EXPECT_TRUE(within(sparse, "intermediate_size", 33).ok());
}

TEST(Config, UnsupportedArchitectureListsTheSupported) {
  Json config = tiny_config();
  config.set("architectures", Json(Json::Array{"LlamaForCausalLM"}));
  expect_error(config, {"LlamaForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"});
  config.set("architectures", Json());
  expect_error(config, {"nothing", "DeepseekV3ForCausalLM"});
}

TEST(Config, FilesAreReadFromTheFolder) {
  const TempFolder folder;
  EXPECT_FALSE(read_config(folder.path()).ok());
  folder.write("config.json", "{\"architectures\": [");
  const auto broken = read_config(folder.path());
  ASSERT_FALSE(broken.ok());
  EXPECT_NE(broken.error().message.find("config.json"), std::string::npos);
  folder.write("config.json", dump_json(tiny_config()));
  folder.write("generation_config.json", R"({"eos_token_id": [2, 3]})");
  const auto c = read_config(folder.path());
  ASSERT_TRUE(c.ok()) << c.error().message;
  EXPECT_EQ(c->eos_ids, (std::vector<int32_t>{1, 2, 3}));
}

}  // namespace
}  // namespace perigee
