#include "server/choice_fold.h"

#include <algorithm>

namespace perigee {

void ChoiceDelta::append(ChoiceDelta&& next) {
  text += next.text;
  std::move(next.events.begin(), next.events.end(), std::back_inserter(events));
  ids.insert(ids.end(), next.ids.begin(), next.ids.end());
  std::move(next.logprobs.begin(), next.logprobs.end(), std::back_inserter(logprobs));
  if (!next.finish) return;
  finish = next.finish;
  made_tool_call = next.made_tool_call;
  stop_id = next.stop_id;
  stop_string = std::move(next.stop_string);
  error = std::move(next.error);
}

ChoiceFold::ChoiceFold(const RequestFields& fields, std::vector<int32_t> eos_ids)
    : stop_list_(fields.stops),
      stops_(fields.stops, fields.include_stop),
      eos_ids_(std::move(eos_ids)),
      min_tokens_(fields.sampling.min_tokens),
      include_stop_(fields.include_stop) {}

void ChoiceFold::filter(const std::string& text, std::string& emit) {
  if (stop_list_.empty() || num_tokens_ <= min_tokens_) {
    emit += text;
    return;
  }
  if (const auto found = stops_.push(text, emit)) found_ = found->stop_index;
}

void ChoiceFold::flush(std::string& emit) {
  const size_t before = emit.size();
  stops_.finish(emit);
  if (emit.size() > before && !found_) stops_ = StopStrings(stop_list_, include_stop_);
}

bool ChoiceFold::stopped(ChoiceDelta& delta) {
  if (!found_ && !complete_) return false;
  ended_ = true;
  delta.finish = FinishReason::kStop;
  if (found_) delta.stop_string = stop_list_[*found_];
  return true;
}

ChoiceDelta ChoiceFold::push(OutputChunk&& chunk) {
  ChoiceDelta delta;
  if (ended_) return delta;
  const bool by_stop_id = chunk.finish == FinishReason::kStop && chunk.stop_id >= 0;
  for (size_t i = 0; i < chunk.ids.size(); ++i) {
    ++num_tokens_;
    delta.ids.push_back(chunk.ids[i]);
    if (i < chunk.logprobs.size()) delta.logprobs.push_back(std::move(chunk.logprobs[i]));
    const bool hidden = by_stop_id && i + 1 == chunk.ids.size() && !include_stop_;
    if (!hidden) feed(chunk.ids[i], delta);
    if (!stopped(delta)) continue;
    delta.ended_by_text = !chunk.finish;
    close(delta);
    return delta;
  }
  if (!chunk.finish) return delta;
  ended_ = true;
  delta.finish = chunk.finish;
  delta.error = std::move(chunk.error);
  const bool is_eos = std::find(eos_ids_.begin(), eos_ids_.end(), chunk.stop_id) != eos_ids_.end();
  if (by_stop_id && !is_eos) delta.stop_id = chunk.stop_id;
  close(delta);
  stopped(delta);  // the last bytes may complete a stop string
  return delta;
}

namespace {

class TextFold : public ChoiceFold {
 public:
  TextFold(const Tokenizer* tokenizer, const RequestFields& fields, std::vector<int32_t> eos_ids)
      : ChoiceFold(fields, std::move(eos_ids)) {
    if (tokenizer != nullptr) detokenizer_.emplace(*tokenizer, fields.skip_special_tokens);
  }

 private:
  void feed(int32_t id, ChoiceDelta& delta) override {
    if (detokenizer_) filter(detokenizer_->push(id), delta.text);
  }
  void close(ChoiceDelta& delta) override {
    if (detokenizer_) filter(detokenizer_->finish(), delta.text);
    flush(delta.text);
  }
  std::optional<Detokenizer> detokenizer_;
};

class ChatFold : public ChoiceFold {
 public:
  ChatFold(const Tokenizer& tokenizer, const OutputParserOptions& options, const RequestFields& fields,
           std::vector<int32_t> eos_ids)
      : ChoiceFold(fields, std::move(eos_ids)), parser_(tokenizer, options) {}
  std::optional<int64_t> num_reasoning_ids() const override { return parser_.num_reasoning_ids(); }

 private:
  void feed(int32_t id, ChoiceDelta& delta) override {
    std::vector<OutputEvent> events;
    parser_.push(id, events);
    take(std::move(events), delta);
    if (parser_.done()) end_here();
  }
  void close(ChoiceDelta& delta) override {
    std::vector<OutputEvent> events;
    if (!delta.stop_string) parser_.finish(events);  // after a stop string nothing held back belongs to the reply
    take(std::move(events), delta);
    emit_held(delta);
    delta.made_tool_call = parser_.saw_tool_call();
  }
  // Content held back by the stop strings comes before whatever follows it.
  void take(std::vector<OutputEvent> events, ChoiceDelta& delta) {
    for (OutputEvent& event : events) {
      if (event.kind == OutputEvent::Kind::kContent) {
        std::string text;
        filter(event.text, text);
        event.text = std::move(text);
        if (event.text.empty()) continue;
      } else {
        emit_held(delta);
      }
      delta.events.push_back(std::move(event));
    }
  }
  void emit_held(ChoiceDelta& delta) {
    std::string text;
    flush(text);
    if (text.empty()) return;
    OutputEvent event;
    event.kind = OutputEvent::Kind::kContent;
    event.text = std::move(text);
    delta.events.push_back(std::move(event));
  }
  OutputParser parser_;
};

}  // namespace

std::unique_ptr<ChoiceFold> make_text_fold(const Tokenizer* tokenizer, const RequestFields& fields,
                                           std::vector<int32_t> eos_ids) {
  return std::make_unique<TextFold>(tokenizer, fields, std::move(eos_ids));
}

std::unique_ptr<ChoiceFold> make_chat_fold(const Tokenizer& tokenizer, const OutputParserOptions& options,
                                           const RequestFields& fields, std::vector<int32_t> eos_ids) {
  return std::make_unique<ChatFold>(tokenizer, options, fields, std::move(eos_ids));
}

}  // namespace perigee
