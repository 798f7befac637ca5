#include "server/reply_format.h"
#include "server/reply_json.h"
#include "text/detokenizer.h"

namespace perigee {

namespace {

class CompletionFormat : public ReplyFormat {
 public:
  CompletionFormat(ReplyContext context, const CompletionRequest& request, std::vector<TokenIds> prompts)
      : context_(std::move(context)),
        fields_(request.fields),
        prompts_(std::move(prompts)),
        echo_(request.echo),
        num_top_(request.logprobs) {}

  const char* id_prefix() const override { return "cmpl-"; }
  const char* object_name(bool) const override { return "text_completion"; }
  bool shows_prompt() const override { return echo_ || fields_.return_token_ids; }
  bool discards_output() const override { return echo_ && fields_.max_tokens == 0; }

  std::unique_ptr<ChoiceFold> make_fold(const std::vector<int32_t>&) const override {
    return make_text_fold(context_.text->tokenizer(), fields_, context_.eos_ids);
  }

  std::vector<Json> stream(ChoiceState& state, const ChoiceDelta& delta) const override {
    const bool first = !state.opened;
    const bool told = !delta.ids.empty() && (fields_.continuous_usage || fields_.return_token_ids || num_top_ >= 0);
    if (delta.empty() && !told) return {};
    state.opened = true;
    std::vector<Json> out;
    out.push_back(choice(state, delta, first));
    return out;
  }

  Json whole(ChoiceState& state) const override {
    Json out = choice(state, state.total, true);
    if (fields_.sampling.prompt_logprobs >= 0 && !(echo_ && num_top_ >= 0))
      out.set("prompt_logprobs", prompt_logprobs_json(*context_.text, fields_.tokens_as_ids,
                                                      fields_.sampling.prompt_logprobs, state.prompt_logprobs));
    return out;
  }

  void add_reply_members(const std::vector<ChoiceState>&, Json&) const override {}

 private:
  Json choice(ChoiceState& state, const ChoiceDelta& delta, bool first) const {
    const std::vector<int32_t>& prompt = *prompts_[state.prompt_index];
    std::string text;
    if (echo_ && first && context_.text->tokenizer() != nullptr)
      text = decode(*context_.text->tokenizer(), prompt, fields_.skip_special_tokens);
    text += delta.text;
    Json out(Json::Object{{"index", static_cast<int64_t>(state.index)},
                          {"text", std::move(text)},
                          {"logprobs", num_top_ >= 0 ? logprobs(state, delta, first) : Json()},
                          {"finish_reason", delta.finish ? Json(finish_name(delta)) : Json()},
                          {"stop_reason", stop_reason(delta)}});
    if (fields_.return_token_ids) {
      out.set("token_ids", ids_json(delta.ids));
      if (first) out.set("prompt_token_ids", ids_json(prompt));
    }
    return out;
  }

  Json logprobs(ChoiceState& state, const ChoiceDelta& delta, bool first) const {
    CompletionLogprobs out(*context_.text, fields_.tokens_as_ids, num_top_, state.text_offset);
    if (echo_ && first) {
      out.add_unscored(prompts_[state.prompt_index]->front());
      for (const TokenLogprobs& entry : state.prompt_logprobs) out.add(entry);
    }
    for (const TokenLogprobs& entry : delta.logprobs) out.add(entry);
    return std::move(out).json();
  }

  const ReplyContext context_;
  const RequestFields fields_;
  const std::vector<TokenIds> prompts_;
  const bool echo_;
  const int32_t num_top_;
};

}  // namespace

std::unique_ptr<ReplyFormat> make_completion_format(ReplyContext context, const CompletionRequest& request,
                                                    std::vector<TokenIds> prompts) {
  return std::make_unique<CompletionFormat>(std::move(context), request, std::move(prompts));
}

}  // namespace perigee
