#include "server/choice_fold.h"

#include <gtest/gtest.h>

#include "text/test_vocabulary.h"

namespace perigee {
namespace {

// Ids of test_tokenizer() without merges: bytes are themselves, specials from 256.
constexpr int32_t kEnd = 258, kSectionBegin = 267, kCallBegin = 269, kArgumentBegin = 270, kThink = 278,
                  kEndThink = 279;

std::vector<int32_t> ids_of(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  return ids;
}

RequestFields fields_with_stop(const std::string& stop) {
  RequestFields fields;
  fields.stops = {stop};
  return fields;
}

OutputChunk chunk_of(std::vector<int32_t> ids, std::optional<FinishReason> finish = std::nullopt) {
  OutputChunk chunk;
  chunk.ids = std::move(ids);
  chunk.finish = finish;
  return chunk;
}

// Pushes the parts one by one and joins what comes out.
ChoiceDelta fold_all(ChoiceFold& fold, const std::vector<std::vector<int32_t>>& parts) {
  ChoiceDelta total;
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool last = i + 1 == parts.size();
    total.append(fold.push(chunk_of(parts[i], last ? std::optional(FinishReason::kLength) : std::nullopt)));
  }
  return total;
}

// Kinds and texts in their order: r reasoning, c content, t a call, a arguments.
std::string shown(const std::vector<OutputEvent>& events) {
  std::string out;
  for (const OutputEvent& event : events) {
    out += "rcta"[static_cast<size_t>(event.kind)];
    out += event.kind == OutputEvent::Kind::kToolCall ? event.name : event.text;
    out += ' ';
  }
  return out;
}

TEST(TextFold, StopStringsActAfterMinTokens) {
  const auto tokenizer = test_tokenizer();
  RequestFields fields = fields_with_stop("b");
  fields.sampling.min_tokens = 2;
  const auto fold = make_text_fold(tokenizer.get(), fields, {kEnd});
  EXPECT_EQ(fold->push(chunk_of({'a', 'b'})).text, "ab") << "two tokens are the least";
  EXPECT_FALSE(fold->ended());
  const ChoiceDelta third = fold->push(chunk_of({'b', 'c'}));
  EXPECT_EQ(third.text, "");
  EXPECT_EQ(third.stop_string, "b");
  EXPECT_TRUE(third.ended_by_text);
  EXPECT_TRUE(fold->ended());
}

TEST(TextFold, AnIncompleteCharacterAtTheEndIsReplaced) {
  const auto tokenizer = test_tokenizer();
  const auto fold = make_text_fold(tokenizer.get(), RequestFields(), {kEnd});
  EXPECT_EQ(fold_all(*fold, {ids_of("a\xC3")}).text, "a\xEF\xBF\xBD");
}

OutputParserOptions with_tools() {
  OutputParserOptions options;
  options.thinking = true;
  options.parse_tools = true;
  return options;
}

TEST(ChatFold, ContentHeldForAStopStringComesBeforeTheCallThatFollows) {
  const auto tokenizer = test_tokenizer();
  const auto fold = make_chat_fold(*tokenizer, with_tools(), fields_with_stop("Cat"), {kEnd});
  const ChoiceDelta total = fold_all(
      *fold, {ids_of("Ca"), {kSectionBegin, kCallBegin}, ids_of("functions.add:0"), {kArgumentBegin}, ids_of("{}")});
  EXPECT_EQ(shown(total.events).substr(0, 9), "cCa tadd ");
  EXPECT_TRUE(total.made_tool_call);
  EXPECT_FALSE(total.stop_string);
}

TEST(ChatFold, AStopStringIsNotPutTogetherAcrossReasoning) {
  const auto tokenizer = test_tokenizer();
  const auto fold = make_chat_fold(*tokenizer, with_tools(), fields_with_stop("xy"), {kEnd});
  const ChoiceDelta total = fold_all(*fold, {ids_of("x"), {kThink}, ids_of("r"), {kEndThink}, ids_of("y."), {}});
  EXPECT_FALSE(total.stop_string);
  EXPECT_EQ(shown(total.events), "cx rr cy c. ");
}

}  // namespace
}  // namespace perigee
