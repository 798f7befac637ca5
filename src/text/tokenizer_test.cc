#include "text/tokenizer.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "base/rng.h"
#include "base/temp_folder.h"
#include "base/utf8.h"
#include "text/detokenizer.h"
#include "text/pretokenizer.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

using Ids = std::vector<int32_t>;

// Pieces chosen so that every alternative of the pattern, all byte lengths, specials and parts of them meet.
const std::vector<std::string>& fragments() {
  static const std::vector<std::string> kFragments = {"a",
                                                      "B",
                                                      "ab",
                                                      "The",
                                                      " ",
                                                      "  ",
                                                      "\n",
                                                      "\r\n",
                                                      "\t",
                                                      "1",
                                                      "23",
                                                      "4567",
                                                      "'s",
                                                      "'LL",
                                                      "'\xC5\xBF",
                                                      "don't",
                                                      "_",
                                                      "!?",
                                                      "=",
                                                      "\xE4\xBD\xA0",
                                                      "\xE5\xA5\xBD",
                                                      "\xE3\x80\x85",
                                                      "\xE3\x80\x87",
                                                      "\xE2\xBA\x80",
                                                      "\xCC\x81",
                                                      "\xCA\xB0",
                                                      "\xC7\x85",
                                                      "\xC3\xA9",
                                                      "\xEA\xB0\x80",
                                                      "\xE3\x81\x82",
                                                      "\xF0\x9F\x99\x82",
                                                      "\xF0\xA0\xAE\xB7",
                                                      "\xC2\xA0",
                                                      "\xE3\x80\x80",
                                                      "\xE2\x80\x83",
                                                      "\x1C",
                                                      "\xEF\xBC\x91",
                                                      "<",
                                                      "<|",
                                                      "<|im_end|>",
                                                      "<think>",
                                                      "</think>",
                                                      "[BOS]",
                                                      "[",
                                                      "]",
                                                      "|>",
                                                      "im_end|>",
                                                      "<|reserved_token_"};
  return kFragments;
}

std::string random_text(Rng& rng, bool valid) {
  std::string out;
  for (uint64_t n = rng.below(24); n > 0; --n) {
    if (!valid && rng.chance(0.2)) {
      out += static_cast<char>(rng.below(256));
    } else {
      out += fragments()[rng.below(fragments().size())];
    }
  }
  return out;
}

std::string joined_bytes(const Tokenizer& tokenizer, const Ids& ids) {
  std::string out;
  for (const int32_t id : ids) out += tokenizer.bytes(id);
  return out;
}

std::vector<std::string> pieces(std::string_view text) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = next_piece_end(text, begin);
    out.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  return out;
}

TEST(Pretokenizer, CutsAsThePatternDoes) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces("Hello, world!"), (Pieces{"Hello", ",", " world", "!"}));
  EXPECT_EQ(pieces("  x"), (Pieces{" ", " x"}));
  EXPECT_EQ(pieces("x  "), (Pieces{"x", "  "}));
  EXPECT_EQ(pieces("a \n\n  b"), (Pieces{"a", " \n\n", " ", " b"}));
  EXPECT_EQ(pieces("I'll DON'Ts"), (Pieces{"I'll", " DON'T", "s"}));
  for (const char* end : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'D"})
    EXPECT_EQ(pieces(fmt::format("he{}x", end)), (Pieces{fmt::format("he{}", end), "x"}));
  EXPECT_EQ(pieces("he'x"), (Pieces{"he", "'x"}));
  EXPECT_EQ(pieces("12345"), (Pieces{"123", "45"}));
  EXPECT_EQ(pieces("camelCaseHTTPServer"), (Pieces{"camel", "Case", "HTTPServer"}));
  EXPECT_EQ(pieces("ab你好cd"), (Pieces{"ab", "你好", "cd"}));
  EXPECT_EQ(pieces("1〇2"), (Pieces{"1〇2"}));                // numbers come before a Han run that has begun
  EXPECT_EQ(pieces("AªBC"), (Pieces{"Aª", "BC"}));            // backs up to the last caseless letter
  EXPECT_EQ(pieces("!!\r\n\nx"), (Pieces{"!!\r\n\n", "x"}));  // symbols take the newlines
  EXPECT_EQ(pieces("?a"), (Pieces{"?a"}));                    // any symbol may prefix a word
  EXPECT_EQ(pieces("\xCC\x81"
                   "abc"),
            (Pieces{"\xCC\x81"
                    "abc"}));  // so may a combining mark
  EXPECT_EQ(pieces("it'\xC5\xBF"), (Pieces{"it'\xC5\xBF"}));
  EXPECT_EQ(pieces("it'"), (Pieces{"it", "'"}));
  EXPECT_EQ(pieces("\x1C\x1C a"), (Pieces{"\x1C\x1C", " a"}));  // U+001C is not white space here
}

std::vector<size_t> reference_cuts(std::string_view text, std::string_view ignored) {
  std::vector<size_t> all;
  ReferenceCuts cuts(text, ignored);
  while (const auto cut = cuts.next()) all.push_back(*cut);
  return all;
}

TEST(Pretokenizer, ReferenceCuts) {
  EXPECT_TRUE(reference_cuts(std::string(25'000, 'x'), "").empty());
  EXPECT_EQ(reference_cuts(std::string(25'001, 'x'), ""), std::vector<size_t>{25'000});
  EXPECT_EQ(reference_cuts(std::string(60'000, ' '), ""), (std::vector<size_t>{25'000, 50'000}));
  std::string words;
  while (words.size() < 400'005) words += "word ";
  EXPECT_EQ(reference_cuts(words, ""), std::vector<size_t>{400'000});
  words.resize(390'000);
  EXPECT_EQ(reference_cuts(words + std::string(35'001, 'x'), ""), (std::vector<size_t>{400'000, 425'000}))
      << "a run begins anew in a slice";
  std::string wide;
  for (int i = 0; i < 25'001; ++i) wide += "\xE4\xBD\xA0";  // characters count, not bytes
  EXPECT_EQ(reference_cuts(wide, ""), std::vector<size_t>{75'000});
  EXPECT_EQ(reference_cuts(std::string(20'000, 'x') + "\x1C" + std::string(20'000, 'x'), "").size(), 0u);
  EXPECT_EQ(reference_cuts(fmt::format("x{}{}", kNeutral, std::string(25'000, 'x')), kNeutral),
            std::vector<size_t>{25'003});
}

TEST(Vocabulary, RefusesBadFiles) {
  const std::string good = tiktoken_file({"ab", "abc"});
  ASSERT_TRUE(Vocabulary::parse(good).ok());
  EXPECT_TRUE(Vocabulary::parse(good.substr(0, good.size() - 1)).ok());  // no newline at the end
  const auto fails = [&](const std::string& more, const std::string& why) {
    const auto got = Vocabulary::parse(good + more);
    ASSERT_FALSE(got.ok()) << more.substr(0, 80);
    EXPECT_NE(got.error().message.find(why), std::string::npos) << got.error().message;
  };
  fails("a 258\n", "base64");
  fails("eHg 258\n", "base64");
  fails("eH!= 258\n", "base64");
  fails("eHh=eHg= 258\n", "base64");
  fails("==== 258\n", "base64");
  fails("eHh=\n", "expected");
  fails(" 258\n", "base64");
  fails("eHg=  258\n", "rank");
  fails("eHg= 258 \n", "rank");
  fails("eHg= -1\n", "rank");
  fails("eHg= 0258\n", "rank");
  fails("eHg= 2147483648\n", "rank");
  fails("eHg= 18446744073709551874\n", "rank");
  fails("eHg= 4194304\n", "rank");
  fails("eHg= 257\n", "twice");
  fails("eHg= 259\n", "rank 258 is missing");
  fails("YWI= 258\n", "are one token");
  fails(to_base64(std::string(1 << 20, 'x')) + " 258\n", "4096");
  EXPECT_FALSE(Vocabulary::parse("").ok());
  EXPECT_FALSE(Vocabulary::parse("YQ== 0\n").ok());
  const auto huge = Vocabulary::parse(std::string(Vocabulary::kMaxFileBytes + 1, '\n'));
  ASSERT_FALSE(huge.ok());
  EXPECT_EQ(huge.error().code, Code::kTooLarge);
}

// Every cut of a good file is refused or is the whole; none may crash.
TEST(Vocabulary, TruncatedFiles) {
  const std::string good = tiktoken_file();
  for (size_t size = 0; size + 1 < good.size(); size += 7) EXPECT_FALSE(Vocabulary::parse(good.substr(0, size)).ok());
}

std::vector<std::string> random_merges(Rng& rng, int count) {
  std::vector<std::string> tokens = {"a", "b", "c"};
  std::vector<std::string> merges;
  while (static_cast<int>(merges.size()) < count) {
    std::string token = tokens[rng.below(tokens.size())] + tokens[rng.below(tokens.size())];
    if (token.size() > 12 || std::find(tokens.begin(), tokens.end(), token) != tokens.end()) continue;
    tokens.push_back(token);
    merges.push_back(std::move(token));
  }
  return merges;
}

// The definition, word by word: merge the lowest-ranked adjacent pair until none is a token.
Ids merge_by_definition(const Vocabulary& vocabulary, const std::string& piece) {
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  while (true) {
    int32_t lowest = -1;
    size_t at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const int32_t rank = vocabulary.find(parts[i] + parts[i + 1]);
      if (rank < 0 || (lowest >= 0 && rank >= lowest)) continue;
      lowest = rank;
      at = i;
    }
    if (lowest < 0) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
  Ids out;
  for (const std::string& part : parts) out.push_back(vocabulary.find(part));
  return out;
}

TEST(Vocabulary, BothMergesFollowTheDefinition) {
  Rng rng(7);
  for (int round = 0; round < 40; ++round) {
    const auto vocabulary = Vocabulary::parse(tiktoken_file(random_merges(rng, 60)));
    ASSERT_TRUE(vocabulary.ok()) << vocabulary.error().message;
    for (int i = 0; i < 50; ++i) {
      std::string piece;
      for (uint64_t n = 2 + rng.below(90); n > 0; --n) piece += static_cast<char>('a' + rng.below(3));
      Ids by_scan, by_heap;
      vocabulary->merge_short(piece, by_scan);
      vocabulary->merge_long(piece, by_heap);
      const Ids want = merge_by_definition(*vocabulary, piece);
      ASSERT_EQ(by_scan, want) << piece;
      ASSERT_EQ(by_heap, want) << piece;
    }
  }
}

TEST(Vocabulary, FindsTokensOfEveryLength) {
  std::vector<std::string> merges;
  for (size_t n = 2; n <= 40; ++n) {
    merges.push_back(std::string(n, 'x'));
    merges.push_back(std::string(n - 1, 'x') + "y");
  }
  const auto vocabulary = Vocabulary::parse(tiktoken_file(merges));
  ASSERT_TRUE(vocabulary.ok());
  for (size_t i = 0; i < merges.size(); ++i) EXPECT_EQ(vocabulary->find(merges[i]), static_cast<int32_t>(256 + i));
  EXPECT_EQ(vocabulary->find(""), -1);
  EXPECT_EQ(vocabulary->find("yx"), -1);
  EXPECT_EQ(vocabulary->find(std::string(41, 'x')), -1);
}

// Two strings of 20 bytes that the table's hash cannot tell apart (found by a birthday search over the first word, then
// the tail makes up the difference): only comparing the bytes can.
TEST(Vocabulary, HashCollisionsAreNotMatches) {
  const std::string middle = "bbbbbbbb";
  uint64_t middle_word;
  std::memcpy(&middle_word, middle.data(), 8);
  std::unordered_map<uint32_t, std::pair<uint64_t, uint64_t>> seen;  // low half of the hash -> first word, hash
  for (uint64_t first = 0x6161616161616161ull;; ++first) {
    const uint64_t hash = mix64(mix64(20 ^ first) ^ middle_word);
    const auto [other, is_new] = seen.try_emplace(static_cast<uint32_t>(hash), first, hash);
    if (is_new) continue;
    const auto text = [&](uint64_t word, uint32_t tail) {
      std::string out(8, '\0');
      std::memcpy(out.data(), &word, 8);
      out += middle + "....";
      std::memcpy(out.data() + 16, &tail, 4);
      return out;
    };
    const std::string token = text(first, 0x63636363);
    const std::string twin =
        text(other->second.first, 0x63636363 ^ static_cast<uint32_t>((hash ^ other->second.second) >> 32));
    const auto vocabulary = Vocabulary::parse(tiktoken_file({token}));
    ASSERT_TRUE(vocabulary.ok());
    EXPECT_EQ(vocabulary->find(token), 256);
    EXPECT_EQ(vocabulary->find(twin), -1);
    return;
  }
}

TEST(Tokenizer, Specials) {
  const auto tokenizer = test_tokenizer();
  EXPECT_EQ(tokenizer->vocab_size(), 512);
  EXPECT_EQ(tokenizer->bytes(258), "<|im_end|>");
  EXPECT_EQ(tokenizer->bytes(261), "<|reserved_token_261|>");
  EXPECT_EQ(tokenizer->bytes(-1), "");
  EXPECT_EQ(tokenizer->bytes(512), "");
  EXPECT_EQ(tokenizer->special_id("<|im_end|>"), 258);
  EXPECT_EQ(tokenizer->special_id("<|im_end|>x"), std::nullopt);
  EXPECT_EQ(tokenizer->special_id("<|im_end|"), std::nullopt);
  EXPECT_EQ(tokenizer->special_id(""), std::nullopt);
  EXPECT_TRUE(tokenizer->is_skipped(258));
  EXPECT_TRUE(tokenizer->is_skipped(261));
  EXPECT_FALSE(tokenizer->is_skipped(278));  // <think>
  EXPECT_TRUE(tokenizer->is_named_special(278));
  EXPECT_FALSE(tokenizer->is_named_special(255));
  EXPECT_FALSE(tokenizer->is_named_special(512));
  EXPECT_EQ(tokenizer->specials().size(), 256u);
  EXPECT_EQ(tokenizer->encode("a<|im_end|>b", SpecialsIn::kRecognised), (Ids{'a', 258, 'b'}));
  EXPECT_EQ(tokenizer->encode("<|im_end|>", SpecialsIn::kPlainText).size(), 10u);
}

TEST(Tokenizer, RefusesBadSpecials) {
  const std::string file = tiktoken_file();
  EXPECT_FALSE(Tokenizer::create(file, {{255, "x", true}}).ok());
  const auto past_the_last = Tokenizer::create(file, {{512, "x", true}});
  ASSERT_FALSE(past_the_last.ok());
  EXPECT_NE(past_the_last.error().message.find("is not one of 256 to 511"), std::string::npos);
  EXPECT_TRUE(Tokenizer::create(file, {{511, "x", true}}).ok());
  EXPECT_FALSE(Tokenizer::create(file, {{-1, "x", true}}).ok());
  EXPECT_FALSE(Tokenizer::create(file, {{256, "", true}}).ok());
  EXPECT_FALSE(Tokenizer::create(file, {{256, std::string(2000, 'x'), true}}).ok());
  EXPECT_FALSE(Tokenizer::create(file, {{256, "x", true}, {256, "y", true}}).ok());
  EXPECT_FALSE(Tokenizer::create(file, {{256, "x", true}, {257, "x", true}}).ok());
  EXPECT_FALSE(Tokenizer::create(file, {{256, "<|reserved_token_300|>", true}}).ok());
  EXPECT_TRUE(Tokenizer::create(file, {{256, "x", true}}).ok());
  EXPECT_FALSE(Tokenizer::create(file, {{256, fmt::format("x{}", kNeutral), true}}).ok());
}

TEST(Tokenizer, DecodeOfEncodeIsTheText) {
  const auto tokenizer = test_tokenizer({"ab", " a", "th", "\xE4\xBD", "\xE4\xBD\xA0"});
  Rng rng(1);
  for (int i = 0; i < 20'000; ++i) {
    const std::string text = random_text(rng, true);
    const SpecialsIn specials = rng.chance(0.5) ? SpecialsIn::kRecognised : SpecialsIn::kPlainText;
    ASSERT_EQ(decode(*tokenizer, tokenizer->encode(text, specials), false), text);
    const std::string bad = random_text(rng, false);
    ASSERT_EQ(joined_bytes(*tokenizer, tokenizer->encode(bad, specials)), bad);
  }
}

TEST(Tokenizer, NeutralisedTextGivesNoSpecials) {
  const auto tokenizer = test_tokenizer({"<|", "im", "end"});
  Rng rng(2);
  for (int i = 0; i < 20'000; ++i) {
    const std::string text = random_text(rng, i % 2 == 0);
    const std::string safe = tokenizer->neutralise(text);
    ASSERT_EQ(tokenizer->encode_rendered(safe), tokenizer->encode(text, SpecialsIn::kPlainText)) << text;
  }
  for (const SpecialToken& token : tokenizer->specials()) {
    const Ids ids = tokenizer->encode_rendered(tokenizer->neutralise("x" + token.text + token.text));
    EXPECT_EQ(std::count(ids.begin(), ids.end(), token.id), 0) << token.text;
    EXPECT_EQ(joined_bytes(*tokenizer, ids), "x" + token.text + token.text);
  }
}

// Such a special has no room inside for what keeps an untrusted one from being recognised.
TEST(Tokenizer, NeutralisedSpecialsOfOneCharacter) {
  const auto tokenizer = Tokenizer::create(tiktoken_file(), {{256, "x", true}, {257, "é", true}, {258, "xy", true}});
  ASSERT_TRUE(tokenizer.ok());
  for (const std::string text : {"x", "axb", "xx", "éxé", "xy", "axyx"}) {
    const Ids plain = (*tokenizer)->encode(text, SpecialsIn::kPlainText);
    EXPECT_EQ((*tokenizer)->encode_rendered((*tokenizer)->neutralise(text)), plain) << text;
    const std::string around = fmt::format("x{}é", (*tokenizer)->neutralise(text));
    Ids expected = plain;
    expected.insert(expected.begin(), 256);
    expected.push_back(257);
    EXPECT_EQ((*tokenizer)->encode_rendered(around), expected) << text;
  }
}

// Text parts are joined by the template after each was neutralised; the joint must not make a special either.
TEST(Tokenizer, NeutralisedPartsStaySafeWhenJoined) {
  const auto tokenizer = test_tokenizer();
  for (const SpecialToken& token : tokenizer->specials()) {
    for (size_t cut = 1; cut < token.text.size(); ++cut) {
      const std::string joined =
          tokenizer->neutralise(token.text.substr(0, cut)) + tokenizer->neutralise(token.text.substr(cut));
      const Ids ids = tokenizer->encode_rendered(joined);
      ASSERT_EQ(std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id >= 256; }), 0) << token.text << cut;
      ASSERT_EQ(joined_bytes(*tokenizer, ids), token.text);
    }
  }
}

TEST(Tokenizer, NeutralCharactersOfTheUserVanish) {
  const auto tokenizer = test_tokenizer();
  const std::string n(kNeutral);
  const std::string tricky = "<" + n + "|im_" + n + "end|>";
  const Ids ids = tokenizer->encode_rendered(tokenizer->neutralise(tricky));
  EXPECT_EQ(ids, tokenizer->encode("<|im_end|>", SpecialsIn::kPlainText));
  const std::string nested = "\xEF\xB7" + n + "\x90";  // the removal puts another one together
  EXPECT_EQ(tokenizer->neutralise("a" + nested + "b"), "ab");
  EXPECT_EQ(tokenizer->encode_rendered("a" + n + "<|im_end|>" + n), (Ids{'a', 258}));
}

TEST(Tokenizer, LongTexts) {
  const auto tokenizer = test_tokenizer({"xx", "xxxx"});
  const std::string run(25'001, 'x');
  const Ids ids = tokenizer->encode(run, SpecialsIn::kRecognised);  // 25,000 = 6,250 tokens, then one x
  EXPECT_EQ(ids.size(), 6251u);
  EXPECT_EQ(ids.back(), 'x');
  // The cut at 25,000 goes through the marker: the reference loses it, a rendered prompt does not.
  const std::string prompt = std::string(24'996, 'x') + "<|im_end|>" + std::string(30'000, 'y');
  const Ids exact = tokenizer->encode(prompt, SpecialsIn::kRecognised);
  EXPECT_EQ(std::count(exact.begin(), exact.end(), *tokenizer->special_id("<|im_end|>")), 0);
  const Ids rendered = tokenizer->encode_rendered(prompt);
  EXPECT_EQ(std::count(rendered.begin(), rendered.end(), *tokenizer->special_id("<|im_end|>")), 1);
  EXPECT_EQ(joined_bytes(*tokenizer, rendered), prompt);
  std::string many = std::string(90'000, '<') + "[BOS]" + std::string(70'000, '!') + prompt;
  EXPECT_EQ(tokenizer->encode_rendered(tokenizer->neutralise(many)), tokenizer->encode(many, SpecialsIn::kPlainText));
}

TEST(Tokenizer, LoadReportsBadFolders) {
  const auto missing = Tokenizer::load("/nonexistent");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  const TempFolder folder;
  const auto load_with = [&](const std::string& config) {
    folder.write("tiktoken.model", tiktoken_file());
    folder.write("tokenizer_config.json", config);
    return Tokenizer::load(folder.path());
  };
  const auto good = load_with(R"({"added_tokens_decoder": {"300": {"content": "<x>", "special": false}}})");
  ASSERT_TRUE(good.ok()) << good.error().message;
  EXPECT_EQ((*good)->special_id("<x>"), 300);
  EXPECT_FALSE((*good)->is_skipped(300));
  for (const char* bad : {"", "[]", "{", R"({"added_tokens_decoder": []})", R"({"added_tokens_decoder": {"x": {}}})",
                          R"({"added_tokens_decoder": {"300": {}}})", R"({"added_tokens_decoder": {"300": 1}})",
                          R"({"added_tokens_decoder": {"300": {"content": 1}}})",
                          R"({"added_tokens_decoder": {"99999999999": {"content": "x"}}})",
                          R"({"added_tokens_decoder": {"300 ": {"content": "x"}}})",
                          R"({"added_tokens_decoder": {"300": {"content": "x", "special": 1}}})"})
    EXPECT_FALSE(load_with(bad).ok()) << bad;
}

// What an over-long prompt costs depends on the limit, not on the prompt: the ids up to the limit are those of the
// whole encoding, and little more than them is made.
TEST(Tokenizer, EncodingStopsOverALimit) {
  const auto tokenizer = test_tokenizer();
  std::string text;
  for (int i = 0; i < 300'000; ++i) text += i % 50 == 0 ? "<|im_end|>" : "ab ";
  const Ids all = tokenizer->encode(text, SpecialsIn::kRecognised);
  ASSERT_EQ(tokenizer->encode_rendered(text), all);
  for (const size_t limit : {size_t{0}, size_t{1}, size_t{1000}, all.size() - 1}) {
    for (const Ids& some :
         {tokenizer->encode(text, SpecialsIn::kRecognised, limit), tokenizer->encode_rendered(text, limit)}) {
      EXPECT_GT(some.size(), limit);
      EXPECT_LE(some.size(), limit + 200);
      EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()));
    }
  }
  EXPECT_EQ(tokenizer->encode(text, SpecialsIn::kRecognised, all.size()), all);
  EXPECT_EQ(tokenizer->encode_rendered(text, all.size()), all);
}

TEST(Tokenizer, NoTokenIsLongerThanTheLongest) {
  const auto tokenizer = test_tokenizer();
  size_t longest = 0;
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) longest = std::max(longest, tokenizer->bytes(id).size());
  EXPECT_EQ(tokenizer->longest_token_bytes(), longest);
}

}  // namespace
}  // namespace perigee
