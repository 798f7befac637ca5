#include "text/detokenizer.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

std::string repaired(std::string_view bytes) {
  std::string out;
  Utf8Repair repair;
  repair.push(bytes, out);
  repair.finish(out);
  return out;
}

// Expected values: bytes.decode("utf-8", errors="replace") of Python 3.
TEST(Detokenizer, ReplacesMaximalSubparts) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(repaired("a\xFF"
                     "b"),
            "a" + r + "b");
  EXPECT_EQ(repaired("\xE4\xBD"
                     "a"),
            r + "a");
  EXPECT_EQ(repaired("\xE4\xBD"), r);
  EXPECT_EQ(repaired("\xF0\x9F\x99"), r);
  EXPECT_EQ(repaired("\xC0\xAF"), r + r);                  // over-long
  EXPECT_EQ(repaired("\xED\xA0\x80"), r + r + r);          // a surrogate
  EXPECT_EQ(repaired("\xF4\x90\x80\x80"), r + r + r + r);  // beyond U+10FFFF
  EXPECT_EQ(repaired("\xF0\x80\x80\x41"), r + r + r + "A");
  EXPECT_EQ(repaired("\x80\x80"), r + r);
  EXPECT_EQ(repaired("\xF0\x9F\x99\x82"), "\xF0\x9F\x99\x82");
}

TEST(Detokenizer, HoldsBackOnlyIncompleteCharacters) {
  const auto tokenizer = test_tokenizer({"a\xE4",
                                         "\xBD\xA0"
                                         "b"});
  Detokenizer detokenizer(*tokenizer, true);
  EXPECT_EQ(detokenizer.push(256), "a");
  EXPECT_EQ(detokenizer.push(257),
            "\xE4\xBD\xA0"
            "b");
  EXPECT_EQ(detokenizer.push(0xF0), "");
  EXPECT_EQ(detokenizer.push(0x9F), "");
  EXPECT_EQ(detokenizer.push(260), "");  // a skipped special between the bytes changes nothing
  EXPECT_EQ(detokenizer.push(0x99), "");
  EXPECT_EQ(detokenizer.push(0x82), "\xF0\x9F\x99\x82");
  EXPECT_EQ(detokenizer.push(0xE4), "");
  EXPECT_EQ(detokenizer.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(detokenizer.finish(), "");
  EXPECT_EQ(detokenizer.push(-1), "");
  EXPECT_EQ(detokenizer.push(99'999), "");
}

TEST(Detokenizer, SkipsByFlag) {
  const auto tokenizer = test_tokenizer();
  const std::vector<int32_t> ids = {'a', 258, 278, 'b'};
  EXPECT_EQ(decode(*tokenizer, ids, true), "a<think>b");
  EXPECT_EQ(decode(*tokenizer, ids, false), "a<|im_end|><think>b");
}

TEST(Detokenizer, PushesJoinToTheWhole) {
  const auto tokenizer = test_tokenizer({"\xE4\xBD", "\xBD\xA0", "\xF0\x9F", "ab", "\x99\x82\xE4"});
  const std::vector<int32_t> likely = {0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99, 0x82, 0xFF,
                                       'a',  256,  258,  259,  260,  261,  262,  264};
  Rng rng(11);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<int32_t> ids(rng.below(12));
    for (int32_t& id : ids) id = likely[rng.below(likely.size())];
    const bool skip = rng.chance(0.5);
    Detokenizer detokenizer(*tokenizer, skip);
    std::string joined;
    for (const int32_t id : ids) {
      const std::string piece = detokenizer.push(id);
      ASSERT_EQ(repaired(piece), piece);  // every piece is valid UTF-8 by itself
      joined += piece;
    }
    joined += detokenizer.finish();
    ASSERT_EQ(joined, decode(*tokenizer, ids, skip));
  }
}

}  // namespace
}  // namespace perigee
