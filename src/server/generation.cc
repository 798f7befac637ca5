#include "server/generation.h"

#include <fmt/core.h>

#include <algorithm>
#include <new>
#include <optional>

#include "base/clock.h"
#include "base/log.h"
#include "server/api_error.h"

namespace perigee {

namespace {

constexpr const char* kNoMemory = "the server has no memory for this request; try again later, or ask for less";

}  // namespace

void LiveGenerations::add(const std::shared_ptr<Generation>& generation) {
  const std::lock_guard lock(mutex_);
  live_.emplace(generation.get(), generation);
}

void LiveGenerations::remove(const Generation* generation) {
  const std::lock_guard lock(mutex_);
  live_.erase(generation);
}

size_t LiveGenerations::count() const {
  const std::lock_guard lock(mutex_);
  return live_.size() + num_tickets_;
}

void LiveGenerations::end_all(const std::string& message) {
  std::vector<std::shared_ptr<Generation>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, weak] : live_)
      if (auto generation = weak.lock()) all.push_back(std::move(generation));
  }
  for (const auto& generation : all)
    generation->exchange().post([generation, message] { generation->fail(503, message); });
}

Generation::Generation(GenerationSpec spec, std::shared_ptr<Exchange> exchange)
    : spec_(std::move(spec)),
      exchange_(std::move(exchange)),
      requests_(spec_.prompts.size()),
      cached_(spec_.prompts.size(), 0),
      last_chunk_s_(spec_.prompts.size() * spec_.fields.n, 0),
      tokens_of_(last_chunk_s_.size(), 0),
      created_(static_cast<int64_t>(wall_time_s())) {
  for (size_t prompt = 0; prompt < spec_.prompts.size(); ++prompt)
    for (int32_t i = 0; i < spec_.fields.n; ++i) {
      ChoiceState state;
      state.index = static_cast<int32_t>(choices_.size());
      state.prompt_index = prompt;
      state.fold = spec_.format->make_fold(*spec_.prompts[prompt]);
      choices_.push_back(std::move(state));
    }
}

void Generation::start(GenerationSpec spec, std::shared_ptr<Exchange> exchange) {
  const std::shared_ptr<Generation> self(new Generation(std::move(spec), std::move(exchange)));
  try {
    self->begin();
  } catch (const std::bad_alloc&) {
    self->give_up();
    throw;
  }
}

void Generation::begin() {
  spec_.live->add(shared_from_this());
  if (!submit_all()) return;
  exchange_->on_disconnect([weak = weak_from_this()] {
    if (const auto generation = weak.lock()) generation->on_disconnect();
  });
  streaming_ = spec_.fields.stream && !ended_;
  if (streaming_) exchange_->begin_stream({{"X-Request-Id", spec_.id}});
}

// Without memory to begin: what was submitted is cancelled, and the caller answers unless a stream has begun.
void Generation::give_up() {
  const bool was_ended = std::exchange(ended_, true);
  spec_.live->remove(this);
  if (streaming_) exchange_->abandon();
  if (!was_ended) cancel_all();
}

int64_t Generation::max_tokens_of(size_t prompt_index) const {
  if (spec_.format->discards_output()) return 1;
  const int64_t room = spec_.max_model_len - static_cast<int64_t>(spec_.prompts[prompt_index]->size());
  return std::min(spec_.fields.max_tokens.value_or(room), room);
}

// A reply must have room for the shortest text of its form: one that is cut is of no form at all.
Status Generation::check_room(size_t prompt_index) const {
  const int64_t room = max_tokens_of(prompt_index);
  if (spec_.constraint == nullptr || spec_.constraint->shortest() <= room) return {};
  return bad_input(fmt::format("the shortest reply that {} allows has {} tokens, and max_tokens and the context leave "
                               "{}; raise max_tokens, shorten the prompt or ask for a smaller form",
                               spec_.constraint_field, spec_.constraint->shortest(), room),
                   "max_tokens");
}

Result<RequestId> Generation::submit(size_t prompt_index) {
  RETURN_IF_ERROR(check_room(prompt_index));
  EngineRequest request;
  request.prompt = spec_.prompts[prompt_index];
  request.sampling = spec_.fields.sampling;
  request.sampling.max_tokens = static_cast<int32_t>(max_tokens_of(prompt_index));
  request.sampling.min_tokens = std::min(request.sampling.min_tokens, request.sampling.max_tokens);
  request.sampling.seed = spec_.fields.seed.value_or(0);
  request.n = spec_.fields.n;
  request.priority = spec_.fields.priority;
  request.timeout_s = spec_.fields.timeout_s;
  request.cache_salt = spec_.fields.cache_salt;
  request.lease = spec_.fields.transfer.lease;
  request.remote = spec_.fields.transfer.remote;
  spec_.lease.handed_over();
  request.constraint = spec_.constraint;
  request.speculation_max_context = spec_.fields.speculation_max_context;
  return spec_.backend->submit(std::move(request), [self = shared_from_this(), prompt_index](OutputChunk&& chunk) {
    self->deliver(prompt_index, std::move(chunk));
  });
}

// An exception here would end the engine's thread. When there is no memory for a chunk the request fails instead: at
// once, or with its next chunk, or by losing its connection if there is none for a post at all.
void Generation::deliver(size_t prompt_index, OutputChunk&& chunk) {
  try {
    const auto held = std::make_shared<OutputChunk>(std::move(chunk));
    post([this, prompt_index, held] { on_chunk(prompt_index, std::move(*held)); });
  } catch (const std::bad_alloc&) {
    lost_chunk_ = true;
    try {
      post([this] { fail(503, kNoMemory); });
    } catch (const std::bad_alloc&) {
      exchange_->abandon();
    }
  }
}

void Generation::post(std::function<void()> work) {
  exchange_->post([self = shared_from_this(), work = std::move(work)] {
    try {
      work();
    } catch (const std::bad_alloc&) {
      if (self->ended_) return self->exchange_->abandon();  // it may have ended without its answer
      self->fail(503, kNoMemory);
    }
  });
}

bool Generation::submit_all() {
  submitted_s_ = system_clock().now_s();
  for (size_t i = 0; i < requests_.size(); ++i) {
    Result<RequestId> id = submit(i);
    if (id.ok()) {
      requests_[i] = *id;
      continue;
    }
    cancel_all();
    refuse(id.error());
    return false;
  }
  return true;
}

// It never ran: no record of it goes into the latencies.
void Generation::refuse(const Error& error) {
  ended_ = true;
  HttpReply reply = error_reply(error);
  spec_.metrics->refused(reply.status);
  spec_.live->remove(this);
  spec_.backend = nullptr;
  log_info("POST ", spec_.path, " ", reply.status, " ", spec_.id);
  exchange_->respond(std::move(reply));
}

void Generation::cancel_all() {
  for (const RequestId id : requests_)
    if (id.valid()) spec_.backend->cancel(id, -1, FinishReason::kCancelled);
}

void Generation::on_disconnect() {
  if (ended_) return;
  cancel_all();
  end("abort", 499);
}

void Generation::note_times(const OutputChunk& chunk, double now_s) {
  if (chunk.ids.empty()) return;
  const auto choice = static_cast<size_t>(chunk.choice);
  if (first_token_s_ == 0) {
    first_token_s_ = now_s;
    spec_.metrics->first_token(now_s - spec_.arrival_s);
  } else if (last_chunk_s_[choice] > 0) {
    spec_.metrics->inter_token(now_s - last_chunk_s_[choice]);
  }
  last_chunk_s_[choice] = now_s;
  last_token_s_ = now_s;
}

void Generation::on_chunk(size_t prompt_index, OutputChunk&& chunk) {
  if (lost_chunk_) return fail(503, kNoMemory);
  waiting_.emplace_back(prompt_index, std::move(chunk));
  take_waiting();
}

void Generation::take_waiting() {
  while (!ended_ && !writing_ && !waiting_.empty()) {
    auto [prompt_index, chunk] = std::move(waiting_.front());
    waiting_.pop_front();
    take_chunk(prompt_index, std::move(chunk));
  }
}

void Generation::take_chunk(size_t prompt_index, OutputChunk&& chunk) {
  const int32_t engine_choice = chunk.choice;
  chunk.choice += static_cast<int32_t>(prompt_index) * spec_.fields.n;
  ChoiceState& state = choices_[static_cast<size_t>(chunk.choice)];
  // A prompt counts once: what its other choices find in the cache is what the first has computed.
  if (engine_choice == 0) cached_[prompt_index] = std::max<int64_t>(cached_[prompt_index], chunk.num_cached_tokens);
  std::move(chunk.prompt_logprobs.begin(), chunk.prompt_logprobs.end(), std::back_inserter(state.prompt_logprobs));
  if (scheduled_s_ == 0) scheduled_s_ = chunk.scheduled_s;
  if (chunk.lease) {
    lease_ = std::move(chunk.lease);
    if (spec_.fields.transfer.lease == LeaseWish::kFromStart) return announce_lease();
  }
  if (state.fold->ended()) return;
  note_times(chunk, system_clock().now_s());
  num_drafts_ += chunk.num_drafts;
  num_accepted_ += chunk.num_accepted;
  if (spec_.format->discards_output()) {
    chunk.ids.clear();
    chunk.logprobs.clear();
    if (chunk.finish == FinishReason::kStop) chunk.finish = FinishReason::kLength;
  }
  ChoiceDelta delta = state.fold->push(std::move(chunk));
  if (delta.ended_by_text) spec_.backend->cancel(requests_[prompt_index], engine_choice, FinishReason::kStop);
  completion_tokens_ += static_cast<int64_t>(delta.ids.size());
  tokens_of_[static_cast<size_t>(state.index)] += static_cast<int64_t>(delta.ids.size());
  if (take_failure(delta)) return;
  length_ended_ = length_ended_ || delta.finish == FinishReason::kLength;
  num_finished_ += delta.finish.has_value();
  if (streaming_)
    stream_delta(state, std::move(delta));
  else
    state.total.append(std::move(delta));
  complete_when_done();
}

// The reply is a stream from here on; its second event is what the whole reply would have been.
void Generation::announce_lease() {
  announced_ = true;
  exchange_->begin_stream({{"X-Request-Id", spec_.id}});
  const Json event(Json::Object{{"kv_transfer_params", transfer_params_json(lease_)}});
  exchange_->write("data: " + dump_json(event) + "\n\n");
}

bool Generation::take_failure(const ChoiceDelta& delta) {
  if (!delta.finish) return false;
  switch (*delta.finish) {
    case FinishReason::kStop:
    case FinishReason::kLength: return false;
    case FinishReason::kDeadline: fail(504, "the request's timeout passed before its last token"); return true;
    case FinishReason::kCancelled: fail(503, "the request was cancelled by the server"); return true;
    case FinishReason::kError: fail(500, delta.error.empty() ? "the model failed on this request" : delta.error);
  }
  return true;
}

Json Generation::envelope(bool streamed) const {
  return Json(Json::Object{{"id", fmt::format("{}{}", spec_.format->id_prefix(), spec_.id)},
                           {"object", spec_.format->object_name(streamed)},
                           {"created", created_},
                           {"model", spec_.model}});
}

Usage Generation::usage() const {
  Usage usage;
  for (const TokenIds& prompt : spec_.prompts) usage.prompt_tokens += std::ssize(*prompt);
  for (const int64_t cached : cached_) usage.cached_tokens += cached;
  usage.completion_tokens = completion_tokens_;
  for (const ChoiceState& choice : choices_)
    if (const auto ids = choice.fold->num_reasoning_ids())
      usage.reasoning_tokens = usage.reasoning_tokens.value_or(0) + *ids;
  usage.accepted_drafts = num_accepted_;
  usage.rejected_drafts = num_drafts_ - num_accepted_;
  return usage;
}

// About how many JSON values it takes to write `delta`, at roughly a microsecond each.
int64_t Generation::entries(const ChoiceState& state, const ChoiceDelta& delta) const {
  const auto scores = [](const std::vector<TokenLogprobs>& list) {
    return list.empty() ? 0 : std::ssize(list) * (1 + std::ssize(list.back().top));
  };
  const int64_t prompt =
      state.opened || !spec_.format->shows_prompt() ? 0 : std::ssize(*spec_.prompts[state.prompt_index]);
  return std::ssize(delta.ids) + scores(delta.logprobs) + prompt + scores(state.prompt_logprobs);
}

// Sends what `write` gives, which is called here or, when that would hold up other streams, in the pool.
void Generation::write_out(int64_t num_entries, std::function<std::string()> write,
                           void (Generation::*send)(std::string&&)) {
  constexpr int64_t kWrittenAtOnce = 2048;
  if (num_entries <= kWrittenAtOnce) return (this->*send)(write());
  writing_ = true;
  const auto written = [this, send](std::optional<std::string> text) {
    writing_ = false;
    if (ended_) return;
    if (!text) return fail(503, kNoMemory);
    (this->*send)(std::move(*text));
    complete_when_done();
    take_waiting();
  };
  spec_.pool->submit(WorkPool::Lane::kLong, [self = shared_from_this(), write = std::move(write), written] {
    const auto text = std::make_shared<std::optional<std::string>>();
    try {
      *text = write();
    } catch (const std::bad_alloc&) {
    }
    try {
      self->post([written, text] { written(std::move(*text)); });
    } catch (const std::bad_alloc&) {
      self->exchange_->abandon();
    }
  });
}

std::string Generation::event(Json choices, const Json& usage) const {
  Json event = envelope(true);
  event.set("choices", std::move(choices));
  if (!usage.is_null()) event.set("usage", usage);
  return "data: " + dump_json(event) + "\n\n";
}

std::string Generation::events(ChoiceState& state, const ChoiceDelta& delta, const Json& usage) const {
  std::string text;
  for (Json& choice : spec_.format->stream(state, delta)) {
    Json::Array choices;
    choices.push_back(std::move(choice));
    text += event(Json(std::move(choices)), usage);
  }
  state.prompt_logprobs.clear();
  return text;
}

void Generation::stream_delta(ChoiceState& state, ChoiceDelta&& delta) {
  const int64_t num_entries = entries(state, delta);
  const Json shown = spec_.fields.continuous_usage ? usage_json(usage()) : Json();
  const auto held = std::make_shared<ChoiceDelta>(std::move(delta));
  write_out(
      num_entries, [this, &state, held, shown] { return events(state, *held, shown); }, &Generation::send_events);
}

// The executor changes nothing of what is read here while this runs in the pool.
std::string Generation::whole_reply() {
  Json reply = envelope(false);
  Json::Array choices;
  for (ChoiceState& state : choices_) choices.push_back(spec_.format->whole(state));
  reply.set("choices", Json(std::move(choices)));
  reply.set("usage", usage_json(usage()));
  if (spec_.fields.transfer.leases()) reply.set("kv_transfer_params", transfer_params_json(lease_));
  spec_.format->add_reply_members(choices_, reply);
  for (ChoiceState& state : choices_) {  // many small pieces: freed where they do not hold up others
    state.total = {};
    state.prompt_logprobs.clear();
  }
  return dump_json(reply);
}

void Generation::send_whole(std::string&& body) {
  if (announced_) {
    exchange_->write("data: " + body + "\n\ndata: [DONE]\n\n");
    end(length_ended_ ? "length" : "stop", 200);
    return exchange_->finish(false);
  }
  HttpReply http;
  http.body = std::move(body);
  http.headers.emplace_back("X-Request-Id", spec_.id);
  end(length_ended_ ? "length" : "stop", 200);
  exchange_->respond(std::move(http));
}

void Generation::complete_when_done() {
  if (ended_ || writing_ || num_finished_ < choices_.size()) return;
  if (streaming_) {
    if (spec_.fields.include_usage) exchange_->write(event(Json(Json::Array{}), usage_json(usage())));
    exchange_->write("data: [DONE]\n\n");
    end(length_ended_ ? "length" : "stop", 200);
    exchange_->finish(false);
    return;
  }
  int64_t num_entries = 0;
  for (const ChoiceState& state : choices_) num_entries += entries(state, state.total);
  write_out(
      num_entries, [this] { return whole_reply(); }, &Generation::send_whole);
}

void Generation::fail(int status, const std::string& message) {
  if (ended_) return;
  cancel_all();
  const bool was_streaming = streaming_ || announced_;
  end("error", status);
  if (!was_streaming) return exchange_->respond(error_reply(status, message));
  exchange_->write("data: " + dump_json(error_json(status, message)) + "\n\n");
  exchange_->finish(true);  // no [DONE]: the client must not take this for a whole answer
}

void Generation::end(const char* reason, int status) {
  ended_ = true;
  spec_.live->remove(this);  // first: what follows may run out of memory
  const double now_s = system_clock().now_s();
  const Usage total = usage();
  const auto since_arrival = [&](double time_s) { return time_s > 0 ? time_s - spec_.arrival_s : 0; };
  RequestRecord record;
  record.reason = reason;
  record.prompt_tokens = total.prompt_tokens;
  record.completion_tokens = total.completion_tokens;
  record.cached_tokens = total.cached_tokens;
  record.longest_output = *std::max_element(tokens_of_.begin(), tokens_of_.end());
  record.n = spec_.fields.n;
  record.max_tokens = max_tokens_of(0);
  record.submitted_s = since_arrival(submitted_s_);
  record.scheduled_s = since_arrival(scheduled_s_);
  record.first_token_s = since_arrival(first_token_s_);
  record.last_token_s = since_arrival(last_token_s_);
  record.end_s = since_arrival(now_s);
  spec_.metrics->request_done(record);
  spec_.backend = nullptr;  // its last sinks may outlive the request, and must not be what keeps it alive
  log_info("POST ", spec_.path, " ", status, " prompt ", total.prompt_tokens, " out ", total.completion_tokens,
           " cached ", total.cached_tokens, " ", static_cast<int64_t>(record.end_s * 1000), " ms ", spec_.id);
}

}  // namespace perigee
