// The real Kimi vocabulary: ids published for K2 (facts of the official tokenizer) and properties over all of it.
#include <gtest/gtest.h>

#include "text/detokenizer.h"
#include "text/test_vocabulary.h"
#include "text/tokenizer.h"

namespace perigee {
namespace {

using Ids = std::vector<int32_t>;

class RealVocabulary : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string dir = real_vocabulary_dir();
    // A failure followed by a skip would count as skipped, so under CI only the failure.
    if (dir.empty() && std::getenv("CI") != nullptr) FAIL() << "PERIGEE_TEST_DATA has no kimi-tokenizer";
    if (dir.empty()) GTEST_SKIP() << "set PERIGEE_TEST_DATA to a folder with kimi-tokenizer";
    auto loaded = Tokenizer::load(dir);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    tokenizer_ = *loaded;
  }
  std::shared_ptr<const Tokenizer> tokenizer_;
};

struct Golden {
  const char* text;
  Ids ids;
};

const std::vector<Golden>& goldens() {
  static const std::vector<Golden> kGoldens = {
      {"Hello, world!", {19180, 11, 2695, 0}},
      {"你好，世界", {33845, 378, 2243}},
      {"北京今天天气怎么样？", {3372, 3108, 8597, 13171, 864}},
      {"abc你好def", {8497, 33845, 1166}},
      {"  leading", {220, 8134}},
      {"trailing  ", {523, 16627, 256}},
      {"a\n\nb", {64, 382, 65}},
      {"\r\n\r\n x", {2298, 1288}},
      {"12345678", {6694, 12972, 4447}},
      {"3.14159", {18, 13, 18702, 6276}},
      {"don't DON'T I'll", {88709, 92629, 64833, 17916}},
      {"naïve café", {4768, 44187, 367, 70591}},
      {"日本語のテキスト", {4546, 63011, 4663, 25875, 32045, 33360}},
      {"한국어", {17079, 54078, 28763}},
      {"🙂🙂", {5885, 46813, 5885, 46813}},
      {"foo_bar(x)[0] += 1;", {10570, 30242, 3940, 13319, 15, 60, 3484, 220, 16, 26}},
      {"\tif x:\n\t\treturn", {1281, 1288, 777, 197, 1616}},
      {"<|im_end|>", {163586}},
      {"々〇〻", {106101, 91894, 272, 119}},
      {"１２３４", {320, 239, 320, 240, 320, 241, 320, 242}},
      {"a  b   c", {64, 220, 291, 256, 275}},
      {"don’t", {22676, 1639}},
      {"'S", {34480}},
      {"\xCC\x81"
       "abc",
       {37484, 8497}},
      {"The quick brown fox jumps over the lazy dog.", {1008, 5072, 16331, 69275, 60062, 1312, 276, 29292, 7751, 13}},
      {"def f(x):\n    return x**2\n", {1166, 285, 3940, 2360, 274, 745, 1288, 381, 17, 198}},
      {"1,234,567.89", {16, 11, 18697, 11, 31344, 13, 7173}},
      {"https://example.com/a?b=c&d=1", {1927, 1316, 17480, 1304, 18825, 30, 65, 23789, 5, 67, 28, 16}},
      {"a\xC2\xA0"
       "b\xE2\x80\x83"
       "c",
       {64, 5406, 65, 64731, 66}},
      {"I'M HE'LL", {40, 103645, 19697, 6, 5847}},
      {"𠮷野家", {172, 254, 106, 115, 4694, 583}},
      {"\n", {198}},
      {"\n\n", {382}},
      {" ", {220}},
      {"<|reserved_token_163600|>", {163600}},
      {"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
       "{\"city\": \"Paris\"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
       {163595, 163597, 41937, 1150, 21055, 2800, 25, 15, 163598, 8264, 37666, 1289, 414, 113476, 16934, 163599, 163596,
        163586}},
      {"<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
       {163587, 2482, 163601, 18699, 163586, 163588, 69702, 163601, 163606}},
      {"<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
       "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>",
       {163594, 14062, 163601, 3900, 554,    24980,  72,   11,     519,   22572,  26626,  5232,  673,
        30218,  10065, 22572,  13,   163586, 163587, 2482, 163601, 18699, 163586, 163588, 69702, 163601}},
  };
  return kGoldens;
}

TEST_F(RealVocabulary, PublishedIds) {
  EXPECT_EQ(tokenizer_->vocab_size(), 163840);
  for (const Golden& golden : goldens()) {
    EXPECT_EQ(tokenizer_->encode(golden.text, SpecialsIn::kRecognised), golden.ids) << golden.text;
    EXPECT_EQ(tokenizer_->encode_rendered(golden.text), golden.ids) << golden.text;
    EXPECT_EQ(decode(*tokenizer_, golden.ids, false), golden.text);
  }
  EXPECT_EQ(tokenizer_->encode("<|im_end|>", SpecialsIn::kPlainText), (Ids{27, 91, 348, 11129, 91, 29}));
}

TEST_F(RealVocabulary, SpecialsHaveTheirNamesAndFlags) {
  EXPECT_EQ(tokenizer_->special_id("[EOS]"), 163585);
  EXPECT_EQ(tokenizer_->special_id("<think>"), 163606);
  EXPECT_FALSE(tokenizer_->is_skipped(163606));
  EXPECT_FALSE(tokenizer_->is_skipped(163595));
  EXPECT_TRUE(tokenizer_->is_skipped(163586));
  EXPECT_EQ(tokenizer_->bytes(163589), "<|reserved_token_163589|>");
}

// The bundled tiny model's files, which every machine has.
TEST(BundledVocabulary, Loads) {
  const auto loaded = Tokenizer::load("models/tiny-k2");
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  const Tokenizer& tokenizer = **loaded;
  EXPECT_EQ(tokenizer.vocab_size(), 2304);
  EXPECT_EQ(tokenizer.special_id("<|im_end|>"), 2050);
  EXPECT_EQ(tokenizer.special_id("<think>"), 2070);
  const std::string text = "Hello, 世界! 12345 \n\t🙂 don't";
  const Ids ids = tokenizer.encode(text, SpecialsIn::kRecognised);
  EXPECT_LT(ids.size(), text.size());
  EXPECT_EQ(decode(tokenizer, ids, true), text);
}

// Every token's own bytes, taken as one piece, are that token.
TEST_F(RealVocabulary, EveryTokenIsFound) {
  std::string file;
  for (int32_t id = 0; id < 163584; ++id) file += to_base64(tokenizer_->bytes(id)) + " " + std::to_string(id) + "\n";
  const auto vocabulary = Vocabulary::parse(file);
  ASSERT_TRUE(vocabulary.ok());
  for (int32_t id = 0; id < vocabulary->size(); ++id) ASSERT_EQ(vocabulary->find(tokenizer_->bytes(id)), id);
}

}  // namespace
}  // namespace perigee
