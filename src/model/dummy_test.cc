#include "model/dummy.h"

#include <gtest/gtest.h>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"

namespace perigee {
namespace {

// What tools/goldens computed in Python: the first bytes of tensors and their FNV-1a hash.
Json vectors() {
  const auto text = read_file("tests/golden/dummy_weights.json", 1u << 20);
  CHECK(text.ok(), text.error().message);
  auto json = parse_json(*text);
  CHECK(json.ok(), json.error().message);
  return std::move(*json);
}

std::string hex(uint64_t value) {
  char out[17];
  std::snprintf(out, sizeof(out), "%016llx", static_cast<unsigned long long>(value));
  return out;
}

template <typename T, typename Fill>
std::string made(size_t bytes, const Fill& fill) {
  std::vector<T> values(bytes / sizeof(T));
  fill(std::span<T>(values));
  return std::string(reinterpret_cast<const char*>(values.data()), bytes);
}

// The first `bytes` bytes of a tensor by one rule; empty for rules of other families.
std::string first_bytes(const std::string& rule, const std::string& name, int64_t fan_in, size_t bytes) {
  if (rule == "weight") return made<uint16_t>(bytes, [&](auto out) { dummy_matrix(name, fan_in, 0, out); });
  if (rule == "norm") return made<uint16_t>(bytes, [&](auto out) { dummy_norm(name, 0, out); });
  if (rule == "e_score_correction_bias") return made<float>(bytes, [&](auto out) { dummy_bias(name, 0, out); });
  if (rule == "A_log") return made<float>(bytes, [&](auto out) { dummy_log_decay(name, 0, out); });
  if (rule == "dt_bias") return made<float>(bytes, [&](auto out) { dummy_time_bias(name, 0, out); });
  if (rule == "int4_packed") return made<uint32_t>(bytes, [&](auto out) { dummy_int4(name, 0, out); });
  if (rule == "int4_scale") return made<uint16_t>(bytes, [&](auto out) { dummy_int4_scale(name, fan_in, 0, out); });
  if (rule == "fp8") return made<uint8_t>(bytes, [&](auto out) { dummy_fp8(name, 0, out); });
  if (rule == "fp8_scale_inv") return made<float>(bytes, [&](auto out) { dummy_fp8_scale(name, fan_in, 0, out); });
  return "";
}

// Columns of the projection that a tensor belongs to: the vectors give the stored shape.
int64_t fan_in(const std::string& rule, const Json& shape) {
  int64_t in = 1;
  for (size_t i = 1; i < shape.as_array().size(); ++i) in *= shape.as_array()[i].as_int();
  if (rule == "int4_scale") return in * 32;
  return rule == "fp8_scale_inv" ? in * 128 : in;
}

TEST(Dummy, RandomNumbersEqualPython) {
  const Json golden = vectors();
  for (const Json& stream : golden.find("u64")->as_array()) {
    const uint64_t key = fnv1a(stream.find("name")->as_string());
    EXPECT_EQ(hex(key), stream.find("fnv1a64")->as_string());
    uint64_t i = 0;
    for (const Json& value : stream.find("first")->as_array()) EXPECT_EQ(hex(random_u64(key, i++)), value.as_string());
  }
}

TEST(Dummy, TensorsEqualPythonBitForBit) {
  const Json golden = vectors();
  int compared = 0;
  for (const Json& t : golden.find("tensors")->as_array()) {
    const std::string rule = t.find("rule")->as_string(), name = t.find("name")->as_string();
    const std::string bytes =
        first_bytes(rule, name, fan_in(rule, *t.find("shape")), static_cast<size_t>(t.find("bytes")->as_int()));
    if (bytes.empty()) continue;
    EXPECT_EQ(hex(fnv1a(bytes)), t.find("fnv1a64")->as_string()) << name;
    ++compared;
  }
  EXPECT_GE(compared, 11);
}

TEST(Dummy, ThreadsDoNotChangeTheValues) {
  const TensorSpec spec{"x", TensorRole::kProjection, Shard::columns(), 1001, 400};
  for (const MatrixPart& part : {part_of(spec, {}), part_of(spec, {.rank = 1, .size = 2})}) {
    const RawWeight one = make_dummy_source(1)->matrix(spec, part), four = make_dummy_source(4)->matrix(spec, part);
    for (int64_t r = 0; r < part.rows; ++r)
      for (int64_t c = 0; c < part.columns; ++c)
        ASSERT_EQ(raw_element(one.matrix, r, c), raw_element(four.matrix, r, c)) << r << " " << c;
  }
}

TEST(Dummy, RefusesInt4GroupsThatDoNotFit) {
  ModelConfig config;
  config.quantization = Quantization::kInt4Group32;
  const std::vector<TensorSpec> specs = {{"e", TensorRole::kRoutedExpert, Shard::whole(), 8, 48}};
  const auto total = make_dummy_source(1)->verify(specs, config);
  ASSERT_FALSE(total.ok());
  EXPECT_NE(total.error().message.find("tensor e: INT4 groups of 32"), std::string::npos);
}

}  // namespace
}  // namespace perigee
