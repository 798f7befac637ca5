// Shards of tensors: put together they are the whole, in every format; what cannot be cut is refused by name; each byte
// is read by one rank.
#include "model/shard.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <map>

#include "model/dummy.h"
#include "model/registry.h"
#include "model/test_weights.h"
#include "ops/ref/ref_ops.h"

namespace perigee {
namespace {

Json with(Json config, const char* key, Json value) {
  config.set(key, std::move(value));
  return config;
}

ModelConfig parsed(const Json& json) {
  const auto config = parse_config(json, Json());
  CHECK(config.ok(), config.error().message);
  return *config;
}

std::vector<TensorSpec> tensors_of(const ModelConfig& config) {
  return find_family(config.architecture)->tensors(config);
}

// Every storage format and both kinds of attention.
std::vector<Json> configs() {
  return {tiny_config(), with(tiny_config(), "quantization_config", int4_quantization()),
          with(tiny_config(), "quantization_config", fp8_quantization()), with(tiny_config(), "q_lora_rank", Json()),
          with(tiny_hybrid_config(), "linear_attn_config",
               json(R"({"head_dim": 128, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 4],
                        "full_attn_layers": [3, 5]})"))};
}

// A tensor of each kind of cut in one storage format, both dummy and in a file.
class Tensors {
 public:
  Tensors(Quantization quantization, size_t pad) : dummy_(make_dummy_source(2)) {
    ModelConfig config;
    config.quantization = quantization;
    CHECK(dummy_->verify(specs, config).ok());
    folder_.write("model.safetensors", safetensors_bytes(stored_tensors(*dummy_, specs), pad));
    auto file = open_file_source(folder_.path(), false);
    CHECK(file.ok(), file.error().message);
    file_ = std::move(*file);
    const Status status = file_->verify(specs, config);
    CHECK(status.ok(), status.error().message);
  }
  std::vector<const TensorSource*> sources() const { return {dummy_.get(), file_.get()}; }

  // 12 divides all that is cut; 288 = 2 * 144 = 3 * 96 = 4 * 72 columns: 144 and 72 lie inside groups and blocks.
  const std::vector<TensorSpec> specs = {
      {"whole", TensorRole::kRoutedExpert, Shard::whole(), 24, 96},
      {"rows", TensorRole::kRoutedExpert, Shard::rows(), 300, 96},
      {"columns", TensorRole::kRoutedExpert, Shard::columns(), 150, 288},
      {"heads", TensorRole::kProjection, Shard::heads(12), 12 * 20, 96},
      {"vocabulary", TensorRole::kMatrix, Shard::vocabulary(), 36, 40},
      {"taps", TensorRole::kConv, Shard::heads(12), 24, 4},
      {"norm", TensorRole::kNorm, Shard::whole(), 1, 40},
      {"decay", TensorRole::kLogDecay, Shard::heads(12), 1, 12},
      {"time", TensorRole::kTimeBias, Shard::heads(12), 1, 48},
  };

 private:
  TempFolder folder_;
  std::unique_ptr<TensorSource> dummy_, file_;
};

constexpr Quantization kQuantizations[] = {Quantization::kNone, Quantization::kFp8Block128, Quantization::kInt4Group32};

// The element of the whole tensor that (r, c) of a rank's shard must be, from the definition of each cut alone.
std::pair<int64_t, int64_t> place_in_whole(const TensorSpec& spec, const TensorParallel& ranks, int64_t r, int64_t c) {
  switch (spec.shard.kind()) {
    case ShardKind::kWhole: return {r, c};
    case ShardKind::kColumns: return {r, ranks.rank * (spec.in / ranks.size) + c};
    default:
      if (is_vector(spec.role)) return {r, ranks.rank * (spec.in / ranks.size) + c};
      return {ranks.rank * (spec.out / ranks.size) + r, c};
  }
}

void expect_shard(const TensorSource& source, const TensorSpec& spec, const TensorParallel& ranks) {
  SCOPED_TRACE(fmt::format("{} rank {} of {}", spec.name, ranks.rank, ranks.size));
  const MatrixPart part = part_of(spec, ranks);
  ASSERT_EQ(part.rows * part.columns * (spec.shard.kind() == ShardKind::kWhole ? 1 : ranks.size), spec.out * spec.in);
  const RawWeight weight = source.matrix(spec, part), whole = source.matrix(spec);
  const std::vector<float> vector = is_vector(spec.role) ? source.vector(spec, part) : std::vector<float>(),
                           all = is_vector(spec.role) ? source.vector(spec) : std::vector<float>();
  for (int64_t r = 0; r < part.rows; ++r)
    for (int64_t c = 0; c < part.columns; ++c) {
      const auto [row, column] = place_in_whole(spec, ranks, r, c);
      if (is_vector(spec.role)) {
        ASSERT_EQ(vector.at(static_cast<size_t>(c)), all.at(static_cast<size_t>(column))) << c;
      } else {
        ASSERT_EQ(raw_element(weight.matrix, r, c), raw_element(whole.matrix, row, column)) << r << ", " << c;
      }
    }
}

TEST(Shards, PutTogetherAreTheWhole) {
  for (const Quantization quantization : kQuantizations)
    for (const size_t pad : {0, 1}) {  // 1: nothing in the file is aligned
      const Tensors tensors(quantization, pad);
      for (const TensorSource* source : tensors.sources())
        for (const int64_t size : {1, 2, 3, 4}) {
          ASSERT_TRUE(check_shards(tensors.specs, *source, size).ok()) << size;
          for (const TensorSpec& spec : tensors.specs)
            for (int64_t rank = 0; rank < size; ++rank) expect_shard(*source, spec, {.rank = rank, .size = size});
        }
    }
}

// What a backend computes from the keys of a shard is the shard: element i of the formula at the shard's own indices.
TEST(Shards, KeysOfAShardCountFromTheWholeTensor) {
  const Tensors tensors(Quantization::kNone, 0);
  const TensorSource& dummy = *tensors.sources()[0];
  const TensorSpec& spec = tensors.specs[2];
  for (int64_t rank = 0; rank < 4; ++rank) {
    const MatrixPart part = part_of(spec, {.rank = rank, .size = 4});
    const RawMatrix keys = dummy.matrix_or_keys(spec, part).matrix;
    const RawWeight made = dummy.matrix(spec, part);
    ASSERT_EQ(keys.data, nullptr);
    for (int64_t r = 0; r < part.rows; r += 7)
      for (int64_t c = 0; c < part.columns; ++c) {
        uint16_t element = 0;
        dummy_matrix("columns.weight", keys.stride(), keys.origin() + keys.index(r, c), std::span(&element, 1));
        ASSERT_EQ(bf16_to_f32(element), raw_element(made.matrix, r, c)) << rank << ": " << r << ", " << c;
      }
  }
}

std::vector<float> product(const RawMatrix& matrix, const std::vector<float>& x) {
  RefOps ops;
  const LinearWeight w = ops.pack_linear(matrix);
  const Tensor in = ops.arena().tensor(DType::kF32, 1, matrix.in);
  std::copy(x.begin(), x.end(), in.row<float>(0));
  const Tensor y = ops.linear(in, w, DType::kF32);
  return {y.row<float>(0), y.row<float>(0) + y.cols};
}

TEST(Shards, ProductsOfRowsJoinAndProductsOfColumnsAddUp) {
  for (const Quantization quantization : kQuantizations) {
    const Tensors tensors(quantization, 0);
    const TensorSource& source = *tensors.sources()[1];
    const TensorSpec& rows = tensors.specs[1];
    const TensorSpec& columns = tensors.specs[2];
    std::vector<float> x(288);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i * 7 % 31) - 15);
    const std::vector<float> few(x.begin(), x.begin() + 96);
    const std::vector<float> joined = product(source.matrix(rows).matrix, few);
    const std::vector<float> summed = product(source.matrix(columns).matrix, x);
    for (const int64_t size : {2, 3, 4}) {
      std::vector<float> join;
      std::vector<double> sum(summed.size());
      for (int64_t rank = 0; rank < size; ++rank) {
        const TensorParallel ranks{.rank = rank, .size = size};
        const std::vector<float> part = product(source.matrix(rows, part_of(rows, ranks)).matrix, few);
        join.insert(join.end(), part.begin(), part.end());
        const int64_t first = rank * 288 / size;
        const std::vector<float> partial = product(source.matrix(columns, part_of(columns, ranks)).matrix,
                                                   {x.begin() + first, x.begin() + first + 288 / size});
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
      }
      EXPECT_EQ(join, joined) << size;
      for (size_t i = 0; i < sum.size(); ++i) ASSERT_NEAR(sum[i], summed[i], 2e-4) << size << " at " << i;
    }
  }
}

// Integers have no rounding: partial products add up exactly.
TEST(Shards, ProductsOfIntegerColumnsAddUpExactly) {
  constexpr int64_t kOut = 20, kIn = 48;
  std::vector<uint16_t> values(kOut * kIn);
  for (size_t i = 0; i < values.size(); ++i) values[i] = f32_to_bf16(static_cast<float>(static_cast<int>(i % 17) - 8));
  const RawMatrix m{.format = WeightFormat::kBF16, .out = kOut, .in = kIn, .data = values.data()};
  std::vector<float> x(kIn);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i % 11) - 5);
  const std::vector<float> whole = product(m, x);
  for (const int64_t size : {2, 3, 4}) {
    std::vector<float> sum(kOut);
    for (int64_t rank = 0; rank < size; ++rank) {
      const int64_t count = kIn / size, first = rank * count;
      const std::vector<float> partial =
          product(window(m, 0, kOut, first, count), {x.begin() + first, x.begin() + first + count});
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
    }
    EXPECT_EQ(sum, whole) << size;
  }
}

// --- What does not divide. ---

std::string refusal(const std::vector<TensorSpec>& specs, Quantization quantization, int64_t size) {
  const auto source = make_dummy_source(1);
  ModelConfig config;
  config.quantization = quantization;
  CHECK(source->verify(specs, config).ok());
  const Status status = check_shards(specs, *source, size);
  return status.ok() ? "" : status.error().message;
}

TEST(ShardsThatDoNotDivide, NameTensorDimensionAndSizes) {
  const auto expert = [](Shard shard, int64_t out, int64_t in) {
    return std::vector<TensorSpec>{{"e", TensorRole::kRoutedExpert, shard, out, in}};
  };
  EXPECT_EQ(refusal(expert(Shard::rows(), 90, 96), Quantization::kNone, 4),
            "--tensor-parallel-size 4: tensor e: 90 rows do not divide among 4 ranks; every tensor of this model "
            "divides among 1, 2, 3, 5, 6, 9, "
            "10, 15, 18, 30, 45, 90");
  EXPECT_EQ(refusal(expert(Shard::columns(), 8, 14), Quantization::kNone, 4),
            "--tensor-parallel-size 4: tensor e: 14 columns do not divide among 4 ranks; every tensor of this model "
            "divides among 1, 2, 7, 14");
  EXPECT_EQ(refusal(expert(Shard::heads(6), 96, 32), Quantization::kNone, 4),
            "--tensor-parallel-size 4: tensor e: 6 heads do not divide among 4 ranks; every tensor of this model "
            "divides among 1, 2, 3, 6");
  // 96 / 8 = 12 columns: not whole words of 8.
  EXPECT_EQ(refusal(expert(Shard::columns(), 8, 96), Quantization::kInt4Group32, 8),
            "--tensor-parallel-size 8: tensor e: 12 words of 8 INT4 columns do not divide among 8 ranks; every tensor "
            "of this model divides among "
            "1, 2, 3, 4, 6, 12");
  EXPECT_EQ(refusal(expert(Shard::columns(), 8, 96), Quantization::kFp8Block128, 8), "");
  EXPECT_EQ(refusal({{"embed", TensorRole::kMatrix, Shard::vocabulary(), 1001, 8}}, Quantization::kNone, 2),
            "--tensor-parallel-size 2: tensor embed: 1001 rows of the vocabulary do not divide among 2 ranks; every "
            "tensor of this model divides "
            "among 1, 7, 11, 13, 77, 91, 143, 1001");
  EXPECT_EQ(refusal({{"a", TensorRole::kLogDecay, Shard::heads(3), 1, 3}}, Quantization::kNone, 2),
            "--tensor-parallel-size 2: tensor a: 3 heads do not divide among 2 ranks; every tensor of this model "
            "divides among 1, 3");
  EXPECT_EQ(refusal(expert(Shard::whole(), 7, 32), Quantization::kNone, 64), "");
}

// GLM-4.7-Flash has 20 heads, and experts of 1,536: loading refuses 8 ranks and says which numbers work.
TEST(ShardsThatDoNotDivide, TwentyHeads) {
  const Json glm = json(R"({"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "norm_topk_prob": true, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "rope_scaling": null, "max_position_embeddings": 1024, "tie_word_embeddings": false, "eos_token_id": 1})");
  const TempFolder folder;
  folder.write("config.json", dump_json(glm));
  const auto ops = make_ref_ops();
  for (const int64_t size : {2, 4})
    for (int64_t rank = 0; rank < size; ++rank) {
      const auto model = load_model(
          {.path = folder.path(), .format = LoadFormat::kDummy, .ranks = {.rank = rank, .size = size}}, *ops);
      EXPECT_TRUE(model.ok()) << model.error().message;
    }
  const auto model =
      load_model({.path = folder.path(), .format = LoadFormat::kDummy, .ranks = {.rank = 0, .size = 8}}, *ops);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.error().message,
            "--tensor-parallel-size 8: tensor model.layers.0.self_attn.kv_b_proj: 20 heads do not divide among 8 "
            "ranks; every tensor of this "
            "model divides among 1, 2, 4");
}

// --- Whole experts, each of one rank. ---

TEST(WholeExperts, AreDealtOneMoreToTheFirstRanks) {
  const auto counts = [](int64_t count, int64_t size) {
    std::vector<int64_t> out;
    int64_t next = 0;
    for (int64_t rank = 0; rank < size; ++rank) {
      const Dealt mine = dealt(count, {.rank = rank, .size = size});
      EXPECT_EQ(mine.first, next);
      next += mine.count;
      out.push_back(mine.count);
    }
    EXPECT_EQ(next, count);
    return out;
  };
  EXPECT_EQ(counts(8, 1), (std::vector<int64_t>{8}));
  EXPECT_EQ(counts(8, 2), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(counts(8, 3), (std::vector<int64_t>{3, 3, 2}));
  EXPECT_EQ(counts(8, 8), (std::vector<int64_t>(8, 1)));
}

// In each storage format: an expert's three tensors are one rank's, in the order of the experts, all else is as
// without.
TEST(WholeExperts, AreOneRanksEach) {
  for (const Json& json : configs()) {
    ModelConfig config = parsed(json);
    const std::vector<TensorSpec> cut = tensors_of(config);
    config.ranks.whole_experts = true;
    const std::vector<TensorSpec> specs = tensors_of(config);
    ASSERT_EQ(specs.size(), cut.size());
    const auto source = make_dummy_source(1);
    ASSERT_TRUE(source->verify(specs, config).ok());
    for (const int64_t size : {2, 3, 8}) {
      int64_t expert_bytes = 0, read = 0;
      std::vector<int64_t> owners;
      for (size_t i = 0; i < specs.size(); ++i) {
        const TensorSpec& spec = specs[i];
        EXPECT_EQ(spec.name, cut[i].name);
        if (spec.role != TensorRole::kRoutedExpert) {
          EXPECT_EQ(spec.shard.kind(), cut[i].shard.kind()) << spec.name;
          continue;
        }
        expert_bytes += part_bytes(std::span(&spec, 1), *source, {});
        for (int64_t rank = 0; rank < size; ++rank) {
          const TensorParallel ranks{.rank = rank, .size = size, .whole_experts = true};
          read += part_bytes(std::span(&spec, 1), *source, ranks);
          const MatrixPart part = part_of(spec, ranks);
          if (part.rows == 0) continue;
          EXPECT_EQ(part.rows * part.columns, spec.out * spec.in);
          owners.push_back(rank);
        }
      }
      EXPECT_EQ(read, expert_bytes);
      constexpr size_t kOfALayer = 8 * 3;
      ASSERT_EQ(owners.size() % kOfALayer, 0u);
      for (size_t i = 0; i < owners.size(); ++i) {
        const auto expert = static_cast<int64_t>(i % kOfALayer / 3);
        const Dealt mine = dealt(8, {.rank = owners[i], .size = size});
        ASSERT_TRUE(expert >= mine.first && expert < mine.first + mine.count) << i;
      }
    }
  }
}

// Counts need not divide, nor an expert's columns; a rank without an expert is refused.
TEST(WholeExperts, AreNotCut) {
  const auto expert = [](int64_t index) {
    return TensorSpec{"e", TensorRole::kRoutedExpert, Shard::one_rank(index, 5), 7, 96};
  };
  const std::vector<TensorSpec> specs = {expert(0), expert(1), expert(2), expert(3), expert(4)};
  for (const int64_t size : {1, 2, 3, 5}) EXPECT_EQ(refusal(specs, Quantization::kInt4Group32, size), "");
  EXPECT_EQ(refusal(specs, Quantization::kNone, 6),
            "--enable-expert-parallel: 5 experts are too few for 6 ranks, which each take at least one; without it "
            "every rank takes a share of each expert");
}

// --- What each family cuts. ---

TEST(Families, CutEachTensorAsItsPlaceInTheNetworkWants) {
  const std::map<std::string, ShardKind> kinds = {
      {"embed_tokens", ShardKind::kVocabulary},
      {"lm_head", ShardKind::kVocabulary},
      {"norm", ShardKind::kWhole},
      {"input_layernorm", ShardKind::kWhole},
      {"post_attention_layernorm", ShardKind::kWhole},
      {"q_a_proj", ShardKind::kWhole},
      {"q_a_layernorm", ShardKind::kWhole},
      {"kv_a_proj_with_mqa", ShardKind::kWhole},
      {"kv_a_layernorm", ShardKind::kWhole},
      {"q_b_proj", ShardKind::kHeads},
      {"kv_b_proj", ShardKind::kHeads},
      {"q_proj", ShardKind::kHeads},
      {"o_proj", ShardKind::kColumns},
      {"gate", ShardKind::kWhole},
      {"e_score_correction_bias", ShardKind::kWhole},
      {"gate_proj", ShardKind::kRows},
      {"up_proj", ShardKind::kRows},
      {"down_proj", ShardKind::kColumns},
      {"w1", ShardKind::kRows},
      {"w3", ShardKind::kRows},
      {"w2", ShardKind::kColumns},
      {"k_proj", ShardKind::kHeads},
      {"v_proj", ShardKind::kHeads},
      {"q_conv1d", ShardKind::kHeads},
      {"k_conv1d", ShardKind::kHeads},
      {"v_conv1d", ShardKind::kHeads},
      {"A_log", ShardKind::kHeads},
      {"dt_bias", ShardKind::kHeads},
      {"f_a_proj", ShardKind::kWhole},
      {"g_a_proj", ShardKind::kWhole},
      {"f_b_proj", ShardKind::kHeads},
      {"g_b_proj", ShardKind::kHeads},
      {"b_proj", ShardKind::kHeads},
      {"o_norm", ShardKind::kWhole},
  };
  std::map<std::string, ShardKind> seen;
  for (const Json& json : configs()) {
    const ModelConfig config = parsed(json);
    for (const TensorSpec& spec : tensors_of(config)) {
      const std::string last = spec.name.substr(spec.name.rfind('.') + 1);
      ASSERT_TRUE(kinds.contains(last)) << spec.name;
      EXPECT_EQ(spec.shard.kind(), kinds.at(last)) << spec.name;
      const bool kda = last == "A_log" || last == "dt_bias" || last == "b_proj";
      if (last == "kv_b_proj" || kda) {
        EXPECT_EQ(spec.shard.num_heads(), kda ? config.kda.heads : config.heads) << spec.name;
      }
      seen.emplace(last, spec.shard.kind());
    }
  }
  EXPECT_EQ(seen, kinds);
}

// --- Who reads what. ---

// Every byte of mapped weight files, and how many ranks read it.
TEST(Reading, EachByteOfAShardIsReadByOneRank) {
  for (const Json& json : configs()) {
    const ModelConfig config = parsed(json);
    const std::vector<TensorSpec> specs = tensors_of(config);
    const auto dummy = make_dummy_source(1);
    ASSERT_TRUE(dummy->verify(specs, config).ok());
    const TempFolder folder;
    folder.write("model.safetensors", safetensors_bytes(stored_tensors(*dummy, specs)));
    const auto source = open_file_source(folder.path(), false);
    ASSERT_TRUE(source.ok() && (*source)->verify(specs, config).ok());
    constexpr int64_t kSize = 2;
    ASSERT_TRUE(check_shards(specs, **source, kSize).ok());
    for (const TensorSpec& spec : specs) {
      const RawMatrix whole = (*source)->matrix(spec).matrix;
      const auto* data = static_cast<const uint8_t*>(whole.data);
      std::vector<int> reads(static_cast<size_t>(data_bytes(whole).bytes()));
      for (int64_t rank = 0; rank < kSize; ++rank) {
        const RawWeight part = (*source)->matrix(spec, part_of(spec, {.rank = rank, .size = kSize}));
        EXPECT_TRUE(part.owners.empty()) << spec.name << " was copied";
        const ByteRows bytes = data_bytes(part.matrix);
        for (int64_t r = 0; r < bytes.rows; ++r)
          for (int64_t i = 0; i < bytes.row_bytes; ++i) ++reads.at(static_cast<size_t>(bytes.row(r) + i - data));
      }
      const int wanted = spec.shard.kind() == ShardKind::kWhole ? kSize : 1;
      EXPECT_EQ(std::count(reads.begin(), reads.end(), wanted), std::ssize(reads)) << spec.name;
    }
  }
}

// The scales that are read more than once, of the blocks or groups that a cut goes through.
int64_t shared_scale_bytes(const TensorSpec& spec, Quantization quantization, int64_t size) {
  const bool columns = spec.shard.kind() == ShardKind::kColumns;
  const bool int4 = quantization == Quantization::kInt4Group32;
  if (quantization == Quantization::kNone || spec.role == TensorRole::kMatrix) return 0;
  if (int4 && (!columns || spec.role != TensorRole::kRoutedExpert)) return 0;
  const int64_t unit = int4 ? 32 : 128;
  const auto scales = [&](int64_t first, int64_t count) { return (first + count - 1) / unit - first / unit + 1; };
  const int64_t cut = columns ? spec.in : spec.out, other = columns ? spec.out : spec.in;
  int64_t read = 0;
  for (int64_t rank = 0; rank < size; ++rank) read += scales(rank * cut / size, cut / size);
  return (read - scales(0, cut)) * (int4 ? other * 2 : scales(0, other) * 4);
}

// What the ranks read is the file's tensors, those that every rank keeps once more for each, and nothing else.
TEST(Reading, RanksTogetherReadTheFileOnce) {
  constexpr int64_t kSize = 2;
  for (const Json& json : configs()) {
    const ModelConfig config = parsed(json);
    const std::vector<TensorSpec> specs = tensors_of(config);
    const auto dummy = make_dummy_source(1);
    ASSERT_TRUE(dummy->verify(specs, config).ok());
    const std::vector<StoredTensor> tensors = stored_tensors(*dummy, specs);
    int64_t wanted = 0;
    for (const StoredTensor& tensor : tensors)
      if (!tensor.name.ends_with(".weight_shape")) wanted += std::ssize(tensor.bytes);
    for (const TensorSpec& spec : specs) {
      if (spec.shard.kind() != ShardKind::kWhole) {
        wanted += shared_scale_bytes(spec, config.quantization, kSize);
        continue;
      }
      for (const StoredTensor& tensor : tensors)
        if (tensor.name == spec.stored_name() || tensor.name == spec.name + ".weight_scale_inv")
          wanted += (kSize - 1) * std::ssize(tensor.bytes);
    }
    const TempFolder folder;
    folder.write("config.json", dump_json(json));
    folder.write("model.safetensors", safetensors_bytes(tensors));
    const auto ops = make_ref_ops();
    int64_t read = 0;
    for (int64_t rank = 0; rank < kSize; ++rank) {
      int64_t last = 0, total = 0;
      const auto progress = [&](const char*, int64_t done, int64_t of) { last = done, total = of; };
      const auto model =
          load_model({.path = folder.path(), .ranks = {.rank = rank, .size = kSize}, .progress = progress}, *ops);
      ASSERT_TRUE(model.ok()) << model.error().message;
      EXPECT_EQ(last, total);
      read += last;
    }
    EXPECT_EQ(read, wanted);
  }
}

}  // namespace
}  // namespace perigee
