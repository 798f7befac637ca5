#include "router/forward.h"

#include <fmt/core.h>

#include <algorithm>
#include <coroutine>

#include "base/clock.h"
#include "base/log.h"
#include "server/api_error.h"

namespace perigee {

namespace {

using Headers = HttpHeaders;

// Headers of one connection (RFC 9110, section 7.6.1), and those that the router writes itself.
bool stays_here(const std::string& name, const std::vector<std::string_view>& named) {
  static constexpr std::string_view kOwn[] = {
      "connection", "keep-alive", "proxy-connection", "te",   "trailer",     "transfer-encoding",
      "upgrade",    "expect",     "content-length",   "host", "x-request-id"};
  const auto is = [&](std::string_view other) { return same_ignoring_case(name, other); };
  return std::any_of(std::begin(kOwn), std::end(kOwn), is) || std::any_of(named.begin(), named.end(), is);
}

std::vector<std::string_view> named_by_connection(const Headers& headers) {
  std::vector<std::string_view> named;
  for (const auto& [name, value] : headers)
    if (same_ignoring_case(name, "connection"))
      for (const std::string_view option : elements_of(value)) named.push_back(option);
  return named;
}

// Of a worker's reply, for the client: without what the router's own server writes.
Headers passed_on(const ResponseHead& head) {
  static constexpr std::string_view kOwn[] = {"content-type", "server", "date", "cache-control", "x-accel-buffering"};
  const auto named = named_by_connection(head.headers);
  Headers out;
  for (const auto& [name, value] : head.headers) {
    const bool own = std::any_of(std::begin(kOwn), std::end(kOwn),
                                 [&name = name](std::string_view other) { return same_ignoring_case(name, other); });
    if (!own && !stays_here(name, named)) out.emplace_back(name, value);
  }
  return out;
}

bool is_event_stream(const ResponseHead& head) {
  const std::string* type = head.header("Content-Type");
  return head.status == 200 && type != nullptr && type->starts_with("text/event-stream");
}

// A worker that has no room, is not ready, or stands before one that is not: another may take the request.
bool asks_another(int status) {
  return status == 429 || status == 502 || status == 503 || status == 504;
}

}  // namespace

std::string worker_head(const HttpRequest& request, const WorkerUrl& worker, size_t body_bytes,
                        const std::string& request_id) {
  const std::string_view method = request.method == "HEAD" ? "GET" : std::string_view(request.method);
  std::string out =
      fmt::format("{} {}{}{}{} HTTP/1.1\r\nHost: {}\r\nX-Request-Id: {}\r\n", method, worker.path, request.path,
                  request.query.empty() ? "" : "?", request.query, worker.authority, request_id);
  const auto named = named_by_connection(request.headers);
  for (const auto& [name, value] : request.headers)
    if (!stays_here(name, named)) out.append(name).append(": ").append(value).append("\r\n");
  if (body_bytes > 0 || request.method == "POST") out += fmt::format("Content-Length: {}\r\n", body_bytes);
  return out + "\r\n";
}

namespace {

constexpr std::string_view kDone = "data: [DONE]";
constexpr std::string_view kEndOfEvent = "\n\n";
constexpr size_t kMaxFirstEvent = 1u << 20;
constexpr double kLateNewsS = 0.5;  // of a prefill worker, once its decode worker is done

// Whose lease is announced while it computes: the decode worker is asked at once.
struct EarlyPrefill {
  std::shared_ptr<UpstreamCall> call;
  std::shared_ptr<WorkerTable::Lease> worker;
  double begin_s = 0;
  std::string last_bytes;
  bool ended = false, failed = false;  // neither well nor given up here
  std::coroutine_handle<> waits = {};  // for its end
};

struct PrefillEnd {
  EarlyPrefill& prefill;
  bool await_ready() const noexcept { return prefill.ended; }
  void await_suspend(std::coroutine_handle<> waits) const noexcept { prefill.waits = waits; }
  void await_resume() const noexcept {}
};

// Reads the rest of its stream, by itself.
Task<> finish_prefill(std::shared_ptr<EarlyPrefill> prefill, std::shared_ptr<ForwardShared> shared) {
  try {
    std::string& last = prefill->last_bytes;
    for (;;) {
      last.erase(0, last.size() - std::min(last.size(), 2 * kDone.size()));
      const std::string piece = co_await prefill->call->read();
      if (piece.empty()) break;
      last += piece;
    }
    const bool well = prefill->call->whole() && last.find(kDone) != std::string::npos;
    prefill->failed = !well && !prefill->call->cancelled();
    if (well) shared->metrics.prefilled(system_clock().now_s() - prefill->begin_s);
    prefill->worker->end(prefill->call->whole()       ? Outcome::kGood
                         : prefill->call->cancelled() ? Outcome::kUnknown
                                                      : Outcome::kBad);
  } catch (const std::bad_alloc&) {
    prefill->call->cancel();
  }
  prefill->ended = true;
  if (prefill->waits) prefill->waits.resume();
}

// Where a stream's first event begins: after comments, by which a worker says that it lives. npos: none has begun.
size_t first_event(std::string_view text) {
  size_t at = 0;
  while (at < text.size() && (text[at] == ':' || text[at] == '\n')) {
    const size_t end = text.find('\n', at);
    if (end == std::string_view::npos) return end;
    at = end + 1;
  }
  return at < text.size() ? at : std::string_view::npos;
}

// Of a worker's request that has failed, as the first event of its stream.
bool is_failure(std::string_view text) {
  const size_t begin = first_event(text);
  if (begin == std::string_view::npos) return false;
  text.remove_prefix(begin);
  return text.starts_with(R"(data: {"error":)") && text.find(R"("code":500)") != std::string_view::npos;
}

class Forward : public std::enable_shared_from_this<Forward> {
 public:
  Forward(std::shared_ptr<ForwardShared> shared, IdleSockets& idle, std::shared_ptr<Exchange> exchange,
          HttpRequest request, std::string request_id)
      : shared_(std::move(shared)),
        idle_(idle),
        exchange_(std::move(exchange)),
        request_(std::move(request)),
        id_(std::move(request_id)) {}

  Task<> run();

 private:
  using Lease = std::shared_ptr<WorkerTable::Lease>;
  using Call = std::shared_ptr<UpstreamCall>;

  void lost_client();
  Task<bool> attempt();
  Task<bool> attempt_split(const PrefixBlocks& blocks);
  Task<Result<std::string>> read_event(EarlyPrefill& prefill);
  Task<bool> lost_prefill();
  void stop_prefill();
  void served(WorkerTable::Lease& lease);
  Task<bool> ask_and_answer(Lease lease, std::string_view body);
  Task<bool> begin(Lease lease, std::string_view body);
  Task<bool> answer_whole(Lease lease);
  Task<bool> answer_stream(Lease lease);
  Task<std::string> read_first();
  Task<> pass_over(Lease lease);
  bool failed(WorkerTable::Lease& lease, const std::string& why);
  void end_stream(WorkerTable::Lease& lease, std::string_view last_bytes);
  void answer(HttpReply reply);
  void give_up();
  void release_request();

  const std::shared_ptr<ForwardShared> shared_;
  IdleSockets& idle_;
  const std::shared_ptr<Exchange> exchange_;
  HttpRequest request_;
  std::string decode_body_;
  const std::string id_;
  const double begin_s_ = system_clock().now_s();
  Call call_;  // the one under way, which the client's end cancels
  bool client_left_ = false;
  bool answered_ = false;
  std::shared_ptr<EarlyPrefill> prefill_;
  std::vector<uint64_t> tried_;
  std::optional<HttpReply> refusal_;  // the last one
};

void Forward::lost_client() {
  client_left_ = true;
  if (call_) call_->cancel();
  stop_prefill();
}

// Nobody wants the rest of the prompt. The next request need not wait until its end has been read, if it is on trial.
void Forward::stop_prefill() {
  if (!prefill_) return;
  prefill_->worker->end(Outcome::kUnknown);
  prefill_->call->cancel();
}

// The prefill worker has served too, though news of its end may come a moment later.
void Forward::served(WorkerTable::Lease& lease) {
  lease.end(Outcome::kGood);
  if (prefill_) prefill_->worker->end(Outcome::kGood);
}

void Forward::answer(HttpReply reply) {
  answered_ = true;
  shared_->metrics.answered(reply.status);
  log_info(request_.method, " ", request_.path.substr(0, 128), " ", reply.status, " ", id_);
  reply.headers.emplace_back("X-Request-Id", id_);
  exchange_->respond(std::move(reply));
}

void Forward::give_up() {
  if (client_left_ || answered_) return;
  if (!refusal_) refusal_ = error_reply(503, "no worker takes requests now; see /readyz and /workers");
  answer(std::move(*refusal_));
}

// A stream of hours needs no prompt of megabytes.
void Forward::release_request() {
  std::string().swap(request_.body);
  std::string().swap(decode_body_);
  request_.body_share = nullptr;
}

// Nothing of an answer has come. False: another worker may be asked.
bool Forward::failed(WorkerTable::Lease& lease, const std::string& why) {
  if (client_left_) return true;
  lease.end(Outcome::kBad);
  tried_.push_back(lease.worker());
  log_warning("worker ", lease.url().text, ": ", why, " (", id_, ")");
  refusal_ = error_reply(502, fmt::format("no worker has answered; of the last one: {}", why));
  return false;
}

Task<bool> Forward::begin(Lease lease, std::string_view body) {
  call_ = std::make_shared<UpstreamCall>(exchange_->loop(), idle_, shared_->config.times);
  const std::string head = worker_head(request_, lease->url(), body.size(), id_);
  const bool begun = co_await call_->begin({lease->worker(), lease->address()}, head, body);
  co_return begun;
}

// The worker's refusal is kept, in case that all refuse.
Task<> Forward::pass_over(Lease lease) {
  constexpr size_t kMaxRefusalBytes = 1u << 20;
  const int status = call_->head().status;
  std::optional<std::string> body = co_await call_->read_all(kMaxRefusalBytes);
  // 504: the request's own `timeout` has passed. Clients that set short ones must not take a worker out of use.
  lease->end(status == 502 ? Outcome::kBad : Outcome::kUnknown);
  tried_.push_back(status == 500 ? prefill_->worker->worker() : lease->worker());
  const std::string* type = call_->head().header("Content-Type");
  refusal_ = HttpReply{.status = status,
                       .content_type = type == nullptr ? "" : *type,
                       .body = std::move(body).value_or(""),
                       .headers = passed_on(call_->head())};
}

Task<bool> Forward::answer_whole(Lease lease) {
  std::string first = co_await call_->read();
  if (first.empty() && !call_->whole()) co_return failed(*lease, call_->fault());
  shared_->metrics.first_byte(system_clock().now_s() - begin_s_);
  release_request();
  std::optional<std::string> rest = co_await call_->read_all(shared_->config.max_reply_bytes);
  if (rest)
    served(*lease);
  else
    lease->end(client_left_ ? Outcome::kUnknown : Outcome::kBad);
  if (client_left_) co_return true;
  if (!rest) {
    log_warning("worker ", lease->url().text, ": ", call_->fault(), " (", id_, ")");
    answer(error_reply(502, fmt::format("the worker's reply broke off: {}", call_->fault())));
    co_return true;
  }
  const std::string* type = call_->head().header("Content-Type");
  answer(HttpReply{.status = call_->head().status,
                   .content_type = type == nullptr ? "" : *type,
                   .body = std::move(first) + *rest,
                   .headers = passed_on(call_->head())});
  co_return true;
}

// A stream that lasts until its connection ends is whole only if it says so itself.
void Forward::end_stream(WorkerTable::Lease& lease, std::string_view last_bytes) {
  const bool whole = call_->whole() && (!call_->head().to_end || last_bytes.find(kDone) != std::string_view::npos);
  if (whole)
    served(lease);
  else
    lease.end(client_left_ ? Outcome::kUnknown : Outcome::kBad);
  if (client_left_) return;
  if (whole) return exchange_->finish(false);
  const std::string why = call_->fault().empty() ? "the connection ended without [DONE]" : call_->fault();
  log_warning("worker ", lease.url().text, ": ", why, " (", id_, "): its stream ends with an error");
  shared_->metrics.cut();
  const Json error = error_json(502, fmt::format("the worker's reply broke off: {}", why));
  exchange_->write(fmt::format("{}data: {}\n\n", last_bytes.ends_with("\n\n") ? "" : "\n\n", dump_json(error)));
  exchange_->finish(true);
}

// The first bytes of a stream for the client. While the prompt is computed comments do not count, as another prefill
// worker can be asked only before the client has a byte.
Task<std::string> Forward::read_first() {
  std::string text;
  for (;;) {
    const std::string piece = co_await call_->read();
    if (piece.empty()) co_return piece;
    text += piece;
    const bool may_be_lost = prefill_ && (!prefill_->ended || prefill_->failed);
    if (!may_be_lost || text.size() > kMaxFirstEvent || first_event(text) != std::string::npos) co_return text;
  }
}

Task<bool> Forward::answer_stream(Lease lease) {
  constexpr size_t kLastBytes = 64;
  std::string piece = co_await read_first();
  if (piece.empty() && !call_->whole()) co_return failed(*lease, call_->fault());
  if (client_left_) co_return true;
  bool lost = false;
  if (is_failure(piece)) lost = co_await lost_prefill();
  if (client_left_) co_return true;
  if (lost) {
    lease->end(Outcome::kUnknown);
    tried_.push_back(prefill_->worker->worker());
    refusal_ = error_reply(502, "the prefill worker did not finish the prompt");
    co_return false;
  }
  shared_->metrics.first_byte(system_clock().now_s() - begin_s_);
  shared_->metrics.answered(200);
  release_request();
  log_info(request_.method, " ", request_.path.substr(0, 128), " 200 ", id_);
  answered_ = true;
  Headers headers = passed_on(call_->head());
  headers.emplace_back("X-Request-Id", id_);
  exchange_->begin_stream(std::move(headers));
  std::string last_bytes;
  while (!piece.empty() && !client_left_) {
    last_bytes.append(piece, piece.size() - std::min(piece.size(), kLastBytes));
    last_bytes.erase(0, last_bytes.size() - std::min(last_bytes.size(), kLastBytes));
    exchange_->write(std::move(piece));
    piece = co_await call_->read();
  }
  end_stream(*lease, last_bytes);
  co_return true;
}

// False: another worker may be asked.
Task<bool> Forward::ask_and_answer(Lease lease, std::string_view body) {
  const bool begun = co_await begin(lease, body);
  if (!begun) co_return failed(*lease, call_->fault());
  const int status = call_->head().status;
  bool lost = false;
  if (status == 500) lost = co_await lost_prefill();
  if (asks_another(status) || lost) {
    co_await pass_over(lease);
    co_return client_left_;
  }
  bool done = false;
  if (is_event_stream(call_->head()))
    done = co_await answer_stream(lease);
  else
    done = co_await answer_whole(lease);
  co_return done;
}

// Of a decode worker's request that has failed, before the client has a byte: whether it could only fail, so that
// another prefill worker may be asked. News of the prefill worker's end may come a moment later than those of the other
// one. If there are none it is well, and computes for nobody.
Task<bool> Forward::lost_prefill() {
  if (!prefill_) co_return false;
  if (!prefill_->ended) prefill_->call->end_within(kLateNewsS);
  PrefillEnd end{*prefill_};
  co_await end;
  co_return prefill_->failed;
}

// The first one of its stream.
Task<Result<std::string>> Forward::read_event(EarlyPrefill& prefill) {
  constexpr std::string_view kData = "data: ";
  const auto odd = [](const std::string& why) { return Error(Code::kUnavailable, why); };
  std::string& text = prefill.last_bytes;
  size_t begin = 0, end = 0;
  for (;;) {
    begin = first_event(text);
    end = begin == std::string::npos ? begin : text.find(kEndOfEvent, begin);
    if (end != std::string::npos) break;
    const std::string piece = co_await prefill.call->read();
    const std::string& fault = prefill.call->fault();
    if (piece.empty()) co_return odd(fault.empty() ? "its stream ended before its first event" : fault);
    if (text.size() + piece.size() > kMaxFirstEvent) co_return odd("the first event of its stream is over 1 MiB");
    text += piece;
  }
  if (text.compare(begin, kData.size(), kData) != 0)
    co_return odd("the first event of its stream is not data: was it started as a prefill worker?");
  begin += kData.size();
  std::string event = text.substr(begin, end - begin);
  text.erase(0, end + kEndOfEvent.size());
  co_return event;
}

// The prefill worker computes the prompt and tells where its blocks are: at the end, or as soon as it begins; the
// decode worker fetches them and answers the client. The prompt is in the first one's prefix cache when a second
// attempt asks for it.
Task<bool> Forward::attempt_split(const PrefixBlocks& blocks) {
  constexpr size_t kMaxPrefillReply = 16u << 20;
  prefill_ = nullptr;
  const std::optional<std::string> body = prefill_body(request_.body);
  if (!body) {
    answer(error_reply(400, "the request body must be a JSON object"));
    co_return true;
  }
  const bool can_decode = shared_->table->takes_requests(Role::kDecode, tried_);
  const Lease prefill = can_decode ? shared_->table->pick(Role::kPrefill, blocks, tried_) : nullptr;
  if (!prefill) {
    give_up();
    co_return true;
  }
  const double begin_s = system_clock().now_s();
  const bool begun = co_await begin(prefill, *body);
  if (!begun) co_return failed(*prefill, call_->fault());
  if (asks_another(call_->head().status)) {
    co_await pass_over(prefill);
    co_return client_left_;
  }
  if (call_->head().status != 200) {
    const bool done = co_await answer_whole(prefill);
    co_return done;
  }
  std::optional<std::string> reply;
  if (is_event_stream(call_->head())) {
    prefill_ = std::make_shared<EarlyPrefill>(EarlyPrefill{.call = call_, .worker = prefill, .begin_s = begin_s});
    Result<std::string> event = co_await read_event(*prefill_);
    if (!event.ok()) co_return failed(*prefill, event.error().message);
    reply = *std::move(event);
  } else {
    reply = co_await call_->read_all(kMaxPrefillReply);
  }
  if (!reply) co_return failed(*prefill, call_->fault());
  if (prefill_) {
    spawn(finish_prefill(prefill_, shared_));
  } else {
    prefill->end(Outcome::kGood);
    shared_->metrics.prefilled(system_clock().now_s() - begin_s);
  }
  if (client_left_) co_return true;
  std::optional<std::string> with_transfer = decode_body(request_.body, *reply);
  if (!with_transfer) {
    stop_prefill();
    answer(error_reply(502, "the prefill worker's reply has no kv_transfer_params: was it started as one?"));
    co_return true;
  }
  const Lease decode = shared_->table->pick(Role::kDecode, blocks, tried_);
  if (!decode) {
    stop_prefill();
    give_up();
    co_return true;
  }
  decode_body_ = std::move(*with_transfer);
  const bool done = co_await ask_and_answer(decode, decode_body_);
  if (!done)
    stop_prefill();  // the next attempt asks anew
  else if (prefill_ && !prefill_->ended)
    prefill_->call->end_within(kLateNewsS);  // nobody wants its rest, and a silent worker counts as busy
  co_return done;
}

bool is_generation(const HttpRequest& request) {
  return request.method == "POST" && (request.path == "/v1/completions" || request.path == "/v1/chat/completions");
}

Task<bool> Forward::attempt() {
  const WorkerTable& table = *shared_->table;
  const bool split = shared_->config.split && is_generation(request_);
  const Role role = shared_->config.split ? Role::kDecode : Role::kPlain;
  const bool reads =
      is_generation(request_) && (table.reads_prompts(role) || (split && table.reads_prompts(Role::kPrefill)));
  const PrefixBlocks blocks = reads ? prefix_blocks(prompt_text(request_.body)) : PrefixBlocks();
  bool done = false;
  if (split) {
    done = co_await attempt_split(blocks);
    co_return done;
  }
  const Lease lease = shared_->table->pick(role, blocks, tried_);
  if (!lease) {
    give_up();
    co_return true;
  }
  done = co_await ask_and_answer(lease, request_.body);
  co_return done;
}

Task<> Forward::run() {
  const auto self = shared_from_this();
  exchange_->on_disconnect([self] { self->lost_client(); });
  try {
    for (int32_t attempts = 0;; ++attempts) {
      if (attempts > 0) shared_->metrics.retried();
      const bool done = co_await attempt();
      if (done || attempts >= shared_->config.max_retries) break;
    }
    give_up();
  } catch (const std::exception&) {
    log_error("a request ran out of memory and is given up: ", id_);
    if (call_) call_->cancel();
    stop_prefill();
    if (answered_) exchange_->finish(true);
    if (!answered_) exchange_->respond(error_reply(503, "the router is out of memory for this request"));
  }
  if (client_left_) shared_->metrics.client_left();
}

}  // namespace

void forward(std::shared_ptr<ForwardShared> shared, IdleSockets& idle, std::shared_ptr<Exchange> exchange,
             HttpRequest request, std::string request_id) {
  const auto made = std::make_shared<Forward>(std::move(shared), idle, std::move(exchange), std::move(request),
                                              std::move(request_id));
  spawn(made->run());
}

}  // namespace perigee
