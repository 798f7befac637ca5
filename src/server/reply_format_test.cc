// The JSON of choices from deltas: which members there are and what they hold.
#include "server/reply_format.h"

#include <gtest/gtest.h>

#include "text/test_vocabulary.h"

namespace perigee {
namespace {

constexpr int32_t kEnd = 258, kSectionBegin = 267, kCallBegin = 269, kEndThink = 279;

ReplyContext context_of(const std::string& reasoning_field = "both", const std::vector<std::string>& merges = {}) {
  return {.text = ModelText::make(test_tokenizer(merges), nullptr, true, {}),
          .eos_ids = {kEnd},
          .reasoning_field = reasoning_field};
}

TokenIds prompt_of(std::vector<int32_t> ids) {
  return std::make_shared<const std::vector<int32_t>>(std::move(ids));
}

OutputEvent event_of(OutputEvent::Kind kind, const std::string& text) {
  OutputEvent event;
  event.kind = kind;
  event.text = text;
  return event;
}

ChoiceState ended_with(std::vector<OutputEvent> events) {
  ChoiceState state;
  state.total.events = std::move(events);
  state.total.finish = FinishReason::kStop;
  return state;
}

Json message_of(const ReplyFormat& format, std::vector<OutputEvent> events) {
  ChoiceState state = ended_with(std::move(events));
  return *format.whole(state).find("message");
}

TEST(Usage, CountsOfDraftsAreThereWhereSomeWereVerified) {
  Usage usage{.prompt_tokens = 5, .completion_tokens = 7, .cached_tokens = 2};
  EXPECT_EQ(usage_json(usage).find("completion_tokens_details"), nullptr);
  usage.rejected_drafts = 4;
  EXPECT_EQ(dump_json(*usage_json(usage).find("completion_tokens_details")),
            R"({"accepted_prediction_tokens":0,"rejected_prediction_tokens":4})");
  usage.reasoning_tokens = 3;
  EXPECT_EQ(dump_json(*usage_json(usage).find("completion_tokens_details")),
            R"({"reasoning_tokens":3,"accepted_prediction_tokens":0,"rejected_prediction_tokens":4})");
  usage.rejected_drafts = 0;
  EXPECT_EQ(dump_json(*usage_json(usage).find("completion_tokens_details")), R"({"reasoning_tokens":3})");
}

TEST(ChatFormat, ContentIsNullBesideCallsAloneAndEmptyWhereThereIsNothing) {
  const auto format = make_chat_format(context_of(), ChatRequest(), prompt_of({1}));
  EXPECT_EQ(dump_json(*message_of(*format, {}).find("content")), R"("")");
  OutputEvent call = event_of(OutputEvent::Kind::kToolCall, "");
  call.call_index = 0;
  call.call_id = "functions.add:0";
  call.name = "add";
  EXPECT_TRUE(message_of(*format, {call}).find("content")->is_null());
  EXPECT_EQ(*message_of(*format, {event_of(OutputEvent::Kind::kContent, "Sure."), call}).find("content"),
            Json("Sure."));
}

TEST(ChatFormat, ReasoningGoesUnderTheNamesThatTheServerWasGiven) {
  for (const std::string field : {"reasoning", "reasoning_content", "both"}) {
    const auto format = make_chat_format(context_of(field), ChatRequest(), prompt_of({1}));
    const Json message = message_of(*format, {event_of(OutputEvent::Kind::kReasoning, "hmm")});
    EXPECT_EQ(message.find("reasoning") != nullptr, field != "reasoning_content") << field;
    EXPECT_EQ(message.find("reasoning_content") != nullptr, field != "reasoning") << field;
  }
}

// A model may write calls that nobody asked for: they are dropped, and their markers are not text.
TEST(ChatFormat, WithoutToolsCallsAreDropped) {
  ChatRequest request;
  ASSERT_TRUE(request.conversation.declared.empty());
  const auto format = make_chat_format(context_of(), request, prompt_of({1}));
  ChoiceState state;
  state.fold = format->make_fold({1});
  OutputChunk chunk;
  chunk.ids = {kEndThink, 'H', 'i', kSectionBegin, kCallBegin, 'f', kEnd};
  chunk.finish = FinishReason::kStop;
  chunk.stop_id = kEnd;
  state.total.append(state.fold->push(std::move(chunk)));
  const Json message = *format->whole(state).find("message");
  EXPECT_EQ(*message.find("content"), Json("Hi"));
  EXPECT_EQ(message.find("tool_calls"), nullptr);
}

TEST(CompletionFormat, OnlyTheFirstChunkEchoesThePrompt) {
  CompletionRequest request;
  request.echo = true;
  const auto format = make_completion_format(context_of(), request, {prompt_of({'a', 'b'})});
  ChoiceState state;
  std::string text;
  for (const char* part : {"c", "d"}) {
    ChoiceDelta delta;
    delta.text = part;
    delta.ids = {part[0]};
    for (const Json& chunk : format->stream(state, delta)) text += chunk.find("text")->as_string();
  }
  EXPECT_EQ(text, "abcd");
}

TEST(CompletionLogprobs, OffsetsCountCharacters) {
  const ReplyContext context = context_of("both", {"\xC3\xB6"});  // token 256 is one character of two bytes
  int64_t offset = 0;
  CompletionLogprobs logprobs(*context.text, false, 0, offset);
  for (const int32_t id : {256, 97, 256, 98}) logprobs.add({.id = id, .logprob = -1, .rank = 1, .top = {}});
  EXPECT_EQ(dump_json(*std::move(logprobs).json().find("text_offset")), "[0,1,2,3]");
  EXPECT_EQ(offset, 4);
}

// Two pieces of characters read the same.
TEST(CompletionLogprobs, TheMoreLikelyOfTokensThatReadTheSameIsShown) {
  const ReplyContext context = context_of();
  for (const auto& [own, other] : {std::pair{-0.5f, -1.0f}, {-1.0f, -0.5f}}) {
    int64_t offset = 0;
    CompletionLogprobs logprobs(*context.text, false, 1, offset);
    logprobs.add({.id = 0xC3, .logprob = own, .rank = 1, .top = {{0xC4, other}}});
    const Json top = std::move(logprobs).json().find("top_logprobs")->as_array()[0];
    ASSERT_EQ(top.as_object().size(), 1u);
    EXPECT_EQ(top.as_object()[0].second, Json(-0.5));
  }
}

TEST(PromptLogprobs, RanksCountFromOne) {
  const ReplyContext context = context_of();
  const Json list = prompt_logprobs_json(*context.text, false, 2,
                                         {{.id = 97, .logprob = -3, .rank = 17, .top = {{98, -1.0f}, {99, -2.0f}}}});
  ASSERT_EQ(list.as_array().size(), 2u);
  EXPECT_TRUE(list.as_array()[0].is_null()) << "nothing predicts the first token";
  const Json& entry = list.as_array()[1];
  EXPECT_EQ(*entry.find("97")->find("rank"), Json(17));
  EXPECT_EQ(*entry.find("98")->find("rank"), Json(1));
  EXPECT_EQ(*entry.find("99")->find("rank"), Json(2));
}

}  // namespace
}  // namespace perigee
