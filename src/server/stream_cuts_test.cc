// A streamed reply says what the whole one says, however the engine groups its tokens into chunks: random streams of
// markers, calls, text and broken characters, cut at random places.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "base/rng.h"
#include "base/soak.h"
#include "server/reply_format.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

constexpr int32_t kEnd = 263;  // <|im_end|>, after seven merges

const std::shared_ptr<const Tokenizer>& tokenizer() {
  static const auto kTokenizer = test_tokenizer({"func", "tion", "\"}", "\n\n", "  ", "\xE4\xBD", "\xA0\xE5"});
  return kTokenizer;
}

std::vector<int32_t> encoded(std::string_view text) {
  return tokenizer()->encode(text, SpecialsIn::kRecognised);
}

std::vector<int32_t> random_reply(Rng& rng) {
  // Whole calls, some with odd ids, and single markers in any order.
  static const std::string kPieces[] = {
      "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>",
      "<|tool_call_begin|> functions.g-h:12 \n<|tool_call_argument_begin|> {} <|tool_call_end|>",
      "<|tool_call_begin|>f:1<|tool_call_argument_begin|><|tool_call_end|>",
      "<|tool_call_begin|>functions.a.b:c:3<|tool_call_argument_begin|>[",
      "<|tool_call_begin|>nonsense<|tool_call_argument_begin|>{}<|tool_call_end|>",
      "<think>",
      "</think>",
      "<|tool_calls_section_begin|>",
      "<|tool_calls_section_end|>",
      "<|tool_call_begin|>",
      "<|tool_call_argument_begin|>",
      "<|tool_call_end|>",
      "<|im_middle|>"};
  static const std::string kLetters = "a:0 \n{}\"\xE4\xBD\xA0\xFF\xC3";
  std::vector<int32_t> ids;
  for (uint64_t n = rng.below(32); n > 0; --n) {
    if (rng.chance(0.3)) {
      const std::vector<int32_t> piece = encoded(kPieces[rng.below(std::size(kPieces))]);
      ids.insert(ids.end(), piece.begin(), piece.end());
    } else if (rng.chance(0.7)) {
      ids.push_back(static_cast<uint8_t>(kLetters[rng.below(kLetters.size())]));
    } else {
      ids.push_back(256 + static_cast<int32_t>(rng.below(7)));
    }
  }
  return ids;
}

// What a client has when it has read all of a reply.
struct Message {
  std::string reasoning, content, calls, finish;
  bool operator==(const Message&) const = default;
};

std::string text_at(const Json& object, std::string_view name) {
  const Json* value = object.find(name);
  return value != nullptr && value->is_string() ? value->as_string() : "";
}

std::string shown(const std::vector<Json>& calls) {
  std::string out;
  for (const Json& call : calls)
    out += fmt::format("[{}|{}|{}]", text_at(call, "id"), text_at(*call.find("function"), "name"),
                       text_at(*call.find("function"), "arguments"));
  return out;
}

Message whole_message(const Json& choice) {
  const Json& message = *choice.find("message");
  const Json* calls = message.find("tool_calls");
  return {text_at(message, "reasoning"), text_at(message, "content"), calls == nullptr ? "" : shown(calls->as_array()),
          text_at(choice, "finish_reason")};
}

// Puts a stream together as clients do: by each call's index, pieces of arguments appended.
class Client {
 public:
  void read(const Json& choice) {
    const Json& delta = *choice.find("delta");
    message_.reasoning += text_at(delta, "reasoning");
    message_.content += text_at(delta, "content");
    message_.finish += text_at(choice, "finish_reason");
    const Json* calls = delta.find("tool_calls");
    if (calls == nullptr) return;
    for (const Json& piece : calls->as_array()) {
      const auto index = static_cast<size_t>(piece.find("index")->as_int());
      ASSERT_LE(index, calls_.size()) << "a call's first piece comes after those of the calls before it";
      const std::string more = text_at(*piece.find("function"), "arguments");
      if (index == calls_.size())
        calls_.push_back(piece);
      else
        calls_[index].find("function")->find("arguments")->as_string() += more;
    }
  }
  Message message() {
    message_.calls = shown(calls_);
    return message_;
  }

 private:
  Message message_;
  std::vector<Json> calls_;
};

class Cuts {
 public:
  explicit Cuts(Rng& rng) : rng_(rng) {
    if (rng_.chance(0.9)) request_.conversation.declared.push_back({"f", "", false, "tools[0]"});
    request_.parallel_tool_calls = rng_.chance(0.8);
    request_.fields.skip_special_tokens = rng_.chance(0.8);
    if (rng_.chance(0.2)) request_.fields.stops = {"00", "}a"};
    const auto text = ModelText::make(tokenizer(), nullptr, true, {});
    prompt_ = {rng_.chance(0.5) ? encoded("<think>") : encoded("<think></think>")};
    format_ = make_chat_format({.text = text, .eos_ids = {kEnd}, .reasoning_field = "reasoning"}, request_,
                               std::make_shared<const std::vector<int32_t>>(prompt_));
  }

  Message whole(const std::vector<int32_t>& ids) {
    ChoiceState state;
    state.fold = format_->make_fold(prompt_);
    state.total.append(state.fold->push(chunk(ids, 0, ids.size())));
    return whole_message(format_->whole(state));
  }

  Message streamed(const std::vector<int32_t>& ids) {
    ChoiceState state;
    state.fold = format_->make_fold(prompt_);
    Client client;
    const double chance = rng_.unit();
    for (size_t begin = 0, end = 1; begin < ids.size(); begin = end++) {
      while (end < ids.size() && !rng_.chance(chance)) ++end;
      num_cuts += end < ids.size();
      for (const Json& choice : format_->stream(state, state.fold->push(chunk(ids, begin, end)))) client.read(choice);
    }
    return client.message();
  }

  int64_t num_cuts = 0;

 private:
  static OutputChunk chunk(const std::vector<int32_t>& ids, size_t begin, size_t end) {
    OutputChunk out;
    out.ids.assign(ids.begin() + static_cast<ptrdiff_t>(begin), ids.begin() + static_cast<ptrdiff_t>(end));
    if (end < ids.size()) return out;
    out.finish = ids.back() == kEnd ? FinishReason::kStop : FinishReason::kLength;
    if (ids.back() == kEnd) out.stop_id = kEnd;
    return out;
  }
  Rng& rng_;
  ChatRequest request_;
  std::vector<int32_t> prompt_;
  std::unique_ptr<ReplyFormat> format_;
};

TEST(StreamCuts, AStreamSaysWhatTheWholeReplySays) {
  const int64_t wanted = kSanitized ? 10'000 : soak_requested() ? 3'000'000 : 100'000;
  Rng rng(18);
  int64_t num_cuts = 0, num_replies = 0, with_calls = 0;
  for (; num_cuts < wanted; ++num_replies) {
    std::vector<int32_t> ids = random_reply(rng);
    if (ids.empty() || rng.chance(0.7)) ids.push_back(kEnd);
    Cuts cuts(rng);
    const Message whole = cuts.whole(ids);
    const Message streamed = cuts.streamed(ids);
    ASSERT_EQ(streamed.reasoning, whole.reasoning) << num_replies;
    ASSERT_EQ(streamed.content, whole.content) << num_replies;
    ASSERT_EQ(streamed.calls, whole.calls) << num_replies;
    ASSERT_EQ(streamed.finish, whole.finish) << num_replies;
    for (const std::string& text : {whole.reasoning, whole.content, whole.calls})
      ASSERT_EQ(text.find("<|tool"), std::string::npos) << text;  // no ordinary token here has a '<'
    for (const std::string& text : {whole.reasoning, whole.content}) ASSERT_EQ(text.find("think>"), std::string::npos);
    with_calls += !whole.calls.empty();
    num_cuts += cuts.num_cuts;
  }
  fmt::print("{} cuts of {} replies, {} with calls\n", num_cuts, num_replies, with_calls);
  EXPECT_GT(with_calls, num_replies / 5);
}

}  // namespace
}  // namespace perigee
