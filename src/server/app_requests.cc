// The requests of App that read bodies and text: prepared in the pool, answered or begun on the executor.
//
// Checks go from cheap to dear: what can be refused by its fields is refused before anything is tokenised, and what is
// tokenised is so up to the model's context only.
#include "server/app_requests.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <new>

#include "base/clock.h"
#include "base/log.h"
#include "server/api_error.h"
#include "server/long_strings.h"
#include "server/reply_format.h"
#include "server/text_endpoints.h"

namespace perigee {

namespace {

constexpr size_t kShortBody = 32u << 10;  // read within about a millisecond

bool is_json(const HttpRequest& request) {
  const std::string* type = request.header("Content-Type");
  if (type == nullptr) return true;
  std::string lower = *type;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower.starts_with("application/json");
}

// What not even an empty queue has room for: to try again would not help.
Status check_choices(int64_t num_prompts, int64_t n, int64_t limit) {
  if (num_prompts * n <= limit) return {};
  const char* field = num_prompts > 1 ? "prompt" : "n";
  return bad_input(fmt::format("{}{} with n {} are {} sequences; this server runs and queues at most {}{}, or raise "
                               "--max-waiting-seqs where it is started",
                               num_prompts, num_prompts > 1 ? " prompts" : " prompt", n, num_prompts * n, limit,
                               num_prompts > 1 ? ": send several requests" : ": lower n"),
                   field);
}

Error too_long(const RequestContext& context, const char* field) {
  return bad_input(fmt::format("this model's context is {} tokens; the text of {} has more than that; shorten it",
                               context.max_model_len, field),
                   field);
}

// Prompts that cannot fit, however they are tokenised.
Status check_text(const std::vector<PromptInput>& prompts, const RequestContext& context, const ModelText& text) {
  for (const PromptInput& prompt : prompts) {
    const auto* words = std::get_if<std::string>(&prompt);
    if (words == nullptr) continue;
    if (text.tokenizer()->bound().is_over(*words, static_cast<uint64_t>(context.max_model_len)))
      return too_long(context, "prompt");
  }
  return {};
}

Status check_text(const Json& messages, const RequestContext& context, const ModelText& text) {
  const TokenBound& bound = text.tokenizer()->bound();
  const uint64_t limit = static_cast<uint64_t>(context.max_model_len) * TokenBound::kOneToken;
  uint64_t weight = 0;
  for (const Json& message : messages.as_array()) {
    const Json* content = message.find("content");
    if (content == nullptr || !content->is_string()) continue;
    if (content->as_string().find(kNeutral) != std::string::npos) continue;  // the prompt has less than this text
    weight += bound.weight(content->as_string());
    if (weight > limit) return too_long(context, "messages");
  }
  return {};
}

// Memory that scores of prompt tokens take as JSON is some 60 bytes an entry.
Status check_scores(const std::vector<TokenIds>& prompts, const RequestFields& fields) {
  constexpr int64_t kMaxEntries = 1 << 20;
  if (fields.sampling.prompt_logprobs < 0) return {};
  int64_t tokens = 0;
  for (const TokenIds& prompt : prompts) tokens += std::ssize(*prompt);
  const int64_t entries = tokens * (1 + fields.sampling.prompt_logprobs) * fields.n;
  if (entries <= kMaxEntries) return {};
  return bad_input(fmt::format("prompt_logprobs for {} prompt tokens with {} alternatives and n {} are {} entries, "
                               "more than the limit of {}; ask for fewer",
                               tokens, fields.sampling.prompt_logprobs, fields.n, entries, kMaxEntries),
                   "prompt_logprobs");
}

}  // namespace

void App::prepare_in_pool(ExchangePtr exchange, HttpRequest request,
                          Result<Prepared> (App::*prepare)(PendingRequest&)) {
  const auto pending = std::make_shared<PendingRequest>(std::move(request), live_, system_clock().now_s());
  exchange->on_disconnect([pending] { pending->gone = true; });
  const auto work = [this, exchange = exchange, pending, prepare] {
    if (pending->gone) return;
    answer_or_abandon(exchange, pending, [&] {
      Result<Prepared> prepared = (this->*prepare)(*pending);
      if (prepared.ok() && prepared->format) return compile(exchange, pending, std::move(*prepared));
      deliver(exchange, pending, std::move(prepared));
    });
  };
  const auto lane = pending->request.body.size() > kShortBody ? WorkPool::Lane::kLong : WorkPool::Lane::kShort;
  if (!pool_.try_submit(lane, work))
    refuse(exchange, pending->request, Error(Code::kExhausted, "too many requests wait to be read; try again later"));
}

void App::deliver(ExchangePtr exchange, const PendingPtr& pending, Result<Prepared> result) {
  const auto prepared = std::make_shared<Result<Prepared>>(std::move(result));
  exchange->post([this, exchange, pending, prepared] { finish(exchange, *pending, *prepared); });
}

// Work that ends in deliver(), in the pool or on a compiler's thread.
template <typename Work>
void App::answer_or_abandon(ExchangePtr exchange, const PendingPtr& pending, const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    pending->request.body = {};
  }
  try {
    deliver(exchange, pending,
            Error(Code::kUnavailable, "the server has no memory for this request; try again, or send less"));
  } catch (const std::bad_alloc&) {
    exchange->abandon();
  }
}

// In the pool, and goes on where the compiler is done. Calls that nobody forces go without what cannot be followed of
// their tools' schemas: an agent's other tools still work.
void App::compile(ExchangePtr exchange, const PendingPtr& pending, Prepared prepared) {
  const auto held = std::make_shared<Prepared>(std::move(prepared));
  const auto done = [this, exchange, pending, held](Result<std::shared_ptr<const Constraint>> made) {
    answer_or_abandon(exchange, pending, [&] {
      OutputFormat& format = *held->format;
      if (!made.ok() && made.error().code == Code::kBadInput) {
        const std::vector<std::string> reasons = relax(format);
        for (const std::string& reason : reasons) log_once(reason);
        if (!reasons.empty()) return compile(exchange, pending, std::move(*held));
        if (format.may_lapse()) {
          log_once("calls are not held to their tools: " + fault_of(format, made.error()).message);
          return deliver(exchange, pending, std::move(*held));
        }
      }
      if (!made.ok()) return deliver(exchange, pending, fault_of(format, made.error()));
      held->generation->constraint = std::move(*made);
      held->generation->constraint_field = format.field;
      deliver(exchange, pending, std::move(*held));
    });
  };
  if (compiler_ == nullptr)
    return done(bad_input("needs a tokenizer and an end-of-sequence id, which this model lacks"));
  compiler_->compile(held->format->spec, done);
}

// On the executor.
void App::finish(ExchangePtr exchange, const PendingRequest& pending, Result<Prepared>& prepared) {
  const HttpRequest& request = pending.request;
  if (pending.gone) {
    metrics_->refused(499);
    log_info(request.method, " ", request.path.substr(0, 128), " 499, the client left before it began");
    return;
  }
  if (!prepared.ok()) return refuse(exchange, request, prepared.error());
  if (prepared->reply) return answer(exchange, request, std::move(*prepared->reply));
  if (ended_) return refuse(exchange, request, Error(Code::kUnavailable, "the server is shutting down"));
  try {
    Generation::start(std::move(*prepared->generation), exchange);
  } catch (const std::bad_alloc&) {
    refuse(exchange, request, Error(Code::kUnavailable, "the server has no memory for this request; try again later"));
  }
}

// `max_tokens`: of the longest text that can be part of an answerable request. Frees the body: what is read from it is
// all that is needed.
Result<Json> App::body_of(PendingRequest& pending, size_t max_tokens) const {
  if (!is_json(pending.request))
    return bad_input("Content-Type must be application/json (curl: -H 'Content-Type: application/json')");
  const std::string body = std::exchange(pending.request.body, {});
  if (text_->tokenizer() != nullptr) RETURN_IF_ERROR(check_long_strings(body, text_->tokenizer()->bound(), max_tokens));
  return parse_body(body, serving()->context.caps);
}

// A hint, a step old at most: the engine decides. It spares a full server the reading of what it will refuse.
Status App::check_room(const Serving& serving) const {
  const SchedulerGauges gauges = serving.backend->stats().scheduler;
  if (gauges.running + gauges.waiting + gauges.awaiting < serving.context.max_choices) return {};
  return Error(Code::kExhausted,
               fmt::format("the queue is full ({} sequences): try again later", serving.context.max_choices));
}

// Of a request to generate. Where another server holds its prompt, that must be known before the request is refused.
Result<Json> App::generation_body_of(PendingRequest& pending, const Serving& serving) const {
  const Status room = check_room(serving);
  if (!room.ok() && !serving.takes_leases) return room.error();
  ASSIGN_OR_RETURN(Json body, body_of(pending, static_cast<size_t>(serving.context.max_model_len)));
  if (serving.takes_leases) {
    if (auto remote = remote_prefix_of(body)) pending.lease = RemoteLease(serving.backend, std::move(*remote));
  }
  if (!room.ok()) return room.error();
  return body;
}

App::Prepared App::reply_with(const Json& body) {
  Prepared prepared;
  prepared.reply = json_reply(body);
  return prepared;
}

Result<App::Prepared> App::prepare_tokenize(PendingRequest& pending) {
  const auto now_serving = serving();
  ASSIGN_OR_RETURN(const Json body, body_of(pending, max_tokenized(now_serving->context)));
  ASSIGN_OR_RETURN(const Json reply, tokenize(body, now_serving->context, *text_));
  return reply_with(reply);
}

Result<App::Prepared> App::prepare_detokenize(PendingRequest& pending) {
  const auto now_serving = serving();
  ASSIGN_OR_RETURN(const Json body, body_of(pending, max_tokenized(now_serving->context)));
  ASSIGN_OR_RETURN(const Json reply, detokenize(body, now_serving->context, *text_));
  return reply_with(reply);
}

Result<App::Prepared> App::prepare_tokenizer_info(PendingRequest&) {
  ASSIGN_OR_RETURN(const Json reply, tokenizer_info(*text_));
  return reply_with(reply);
}

Status App::check_fields(const RequestFields& fields, int64_t num_prompts, const RequestContext& context) const {
  ASSIGN_OR_RETURN(const std::string model, model_name(fields.model));
  if (fields.max_tokens && fields.sampling.min_tokens > *fields.max_tokens)
    return bad_input(fmt::format("min_tokens {} is over max_tokens {}", fields.sampling.min_tokens, *fields.max_tokens),
                     "min_tokens");
  if (num_prompts > 1 && (fields.transfer.leases() || fields.transfer.remote))
    return bad_input(
        fmt::format("kv_transfer_params are of one prompt, here are {}: send a request for each", num_prompts),
        "kv_transfer_params");
  return check_choices(num_prompts, fields.n, context.max_choices);
}

Result<std::unique_ptr<GenerationSpec>> App::make_spec(PendingRequest& pending, const Serving& serving,
                                                       const RequestFields& fields, std::vector<TokenIds> prompts) {
  const int64_t limit = serving.context.max_model_len;
  for (const TokenIds& prompt : prompts) {
    const int64_t length = std::ssize(*prompt);
    if (length == 0) return bad_input("the prompt has no tokens", "prompt");
    if (length > limit)
      return bad_input(
          fmt::format("this model's context is {} tokens; the prompt has more than that; shorten the prompt", limit),
          "input_tokens");
    // echo with max_tokens 0 still needs one place, which the engine fills and nobody sees.
    const int64_t wanted = std::max<int64_t>(1, fields.max_tokens.value_or(1));
    if (length + wanted > limit)
      return bad_input(fmt::format("this model's context is {} tokens; the prompt has {} and {} are wanted; shorten "
                                   "the prompt or lower max_tokens",
                                   limit, length, wanted),
                       "input_tokens");
  }
  RETURN_IF_ERROR(check_scores(prompts, fields));
  ASSIGN_OR_RETURN(std::string model, model_name(fields.model));
  log_unknown_fields(fields.unknown);
  auto spec = std::make_unique<GenerationSpec>();
  spec->backend = serving.backend;
  spec->metrics = metrics_;
  spec->live = live_;
  spec->pool = &pool_;
  spec->prompts = std::move(prompts);
  spec->fields = fields;
  spec->fields.cache_salt = keys_.salt(pending.request, fields.cache_salt);
  if (config_.ignore_priority) spec->fields.priority = 0;
  if (!spec->fields.seed) spec->fields.seed = ids_.seed();
  spec->model = std::move(model);
  spec->id = ids_.of(pending.request);
  spec->path = pending.request.path;
  spec->max_model_len = limit;
  spec->arrival_s = pending.arrival_s;
  spec->lease = std::move(pending.lease);
  return spec;
}

ReplyContext App::reply_context(const Serving& serving) const {
  return {.text = text_, .eos_ids = serving.context.eos_ids, .reasoning_field = config_.reasoning_field};
}

// Of a request that computes a prompt for another server nobody reads the one token.
bool reads_nothing(const RequestFields& fields) {
  return fields.transfer.leases() && fields.max_tokens.value_or(0) == 1;
}

Result<App::Prepared> App::prepare_completions(PendingRequest& pending) {
  constexpr int64_t kDefaultMaxTokens = 16;
  const auto now_serving = serving();
  const RequestContext& context = now_serving->context;
  ASSIGN_OR_RETURN(const Json body, generation_body_of(pending, *now_serving));
  ASSIGN_OR_RETURN(CompletionRequest request, parse_completion_request(body, context));
  RETURN_IF_ERROR(check_fields(request.fields, std::ssize(request.prompts), context));
  RETURN_IF_ERROR(check_text(request.prompts, context, *text_));
  std::vector<TokenIds> prompts;
  for (PromptInput& prompt : request.prompts) {
    auto* ids = std::get_if<std::vector<int32_t>>(&prompt);
    prompts.push_back(std::make_shared<const std::vector<int32_t>>(
        ids != nullptr ? std::move(*ids)
                       : text_->tokenizer()->encode(std::get<std::string>(prompt), SpecialsIn::kRecognised,
                                                    static_cast<size_t>(context.max_model_len))));
  }
  Prepared prepared;
  ASSIGN_OR_RETURN(prepared.generation, make_spec(pending, *now_serving, request.fields, prompts));
  GenerationSpec& spec = *prepared.generation;
  if (!spec.fields.max_tokens) spec.fields.max_tokens = kDefaultMaxTokens;
  spec.format = make_completion_format(reply_context(*now_serving), request, std::move(prompts));
  if (!reads_nothing(request.fields)) prepared.format = std::move(request.format);
  return prepared;
}

Result<App::Prepared> App::prepare_chat(PendingRequest& pending) {
  const auto now_serving = serving();
  const RequestContext& context = now_serving->context;
  ASSIGN_OR_RETURN(const Json body, generation_body_of(pending, *now_serving));
  ASSIGN_OR_RETURN(ChatRequest request, parse_chat_request(body, context));
  if (!text_->has_chat()) return bad_input("this model has no chat template; use /v1/completions", "messages");
  RETURN_IF_ERROR(check_fields(request.fields, 1, context));
  const Conversation& chat = request.conversation;
  RETURN_IF_ERROR(check_text(chat.messages, context, *text_));
  ASSIGN_OR_RETURN(std::vector<int32_t> ids, text_->encode_chat(chat.messages, chat.tools, request.template_kwargs,
                                                                chat.end, static_cast<size_t>(context.max_model_len)));
  const auto prompt = std::make_shared<const std::vector<int32_t>>(std::move(ids));
  Prepared prepared;
  ASSIGN_OR_RETURN(prepared.generation, make_spec(pending, *now_serving, request.fields, {prompt}));
  prepared.generation->format = make_chat_format(reply_context(*now_serving), request, prompt);
  if (!reads_nothing(request.fields)) prepared.format = std::move(request.format);
  if (prepared.format)
    prepared.format->spec.after_reasoning =
        text_->thinks() && prompt_leaves_reasoning_open(*text_->tokenizer(), *prompt);
  return prepared;
}

}  // namespace perigee
