// Generation: one request from validated prompts to the last byte of its answer.
//
// It hands the prompts to the backend, folds what comes back, and answers whole or streamed. Everything but the
// backend's sink runs on the exchange's executor, except that large JSON is written in the pool; chunks that arrive
// meanwhile wait. It ends exactly once: complete, failed, or abandoned by the client.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/backend.h"
#include "server/http_types.h"
#include "server/metrics.h"
#include "server/remote_lease.h"
#include "server/reply_format.h"
#include "server/work_pool.h"

namespace perigee {

class Generation;

// The requests under way, so that a drain can wait for them and, at its limit, end them.
class LiveGenerations {
 public:
  // Held by a request that is accepted and not yet a Generation.
  class Ticket {
   public:
    explicit Ticket(std::shared_ptr<LiveGenerations> live) : live_(std::move(live)) { ++live_->num_tickets_; }
    ~Ticket() { --live_->num_tickets_; }
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;

   private:
    const std::shared_ptr<LiveGenerations> live_;
  };

  void add(const std::shared_ptr<Generation>& generation);
  void remove(const Generation* generation);
  size_t count() const;                      // tickets included
  void end_all(const std::string& message);  // each is told on its own executor

 private:
  std::atomic<size_t> num_tickets_{0};
  mutable std::mutex mutex_;  // guards the map
  std::map<const Generation*, std::weak_ptr<Generation>> live_;
};

struct GenerationSpec {
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Metrics> metrics;
  std::shared_ptr<LiveGenerations> live;
  WorkPool* pool = nullptr;  // outlives every executor
  std::unique_ptr<ReplyFormat> format;
  std::vector<TokenIds> prompts;
  RequestFields fields;                          // max_tokens and seed decided
  std::shared_ptr<const Constraint> constraint;  // that every choice obeys, or null
  std::string constraint_field;                  // of the request, that asks for it
  std::string model;                             // the name that the reply carries
  std::string id;                                // without the format's prefix
  std::string path;                              // for the access log
  int64_t max_model_len = 0;
  double arrival_s = 0;  // system_clock()
  RemoteLease lease;     // of the one prompt, where another server has computed it
};

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  // Submits everything; a refusal of any prompt ends the request with that error, before a byte of a stream.
  // Throws std::bad_alloc, and then nothing of it goes on.
  static void start(GenerationSpec spec, std::shared_ptr<Exchange> exchange);

  // Ends it with an error reply or event. No effect on one that has ended.
  void fail(int status, const std::string& message);

  Exchange& exchange() { return *exchange_; }

 private:
  Generation(GenerationSpec spec, std::shared_ptr<Exchange> exchange);
  void begin();
  void give_up();
  bool submit_all();
  Result<RequestId> submit(size_t prompt_index);
  int64_t max_tokens_of(size_t prompt_index) const;
  Status check_room(size_t prompt_index) const;
  void deliver(size_t prompt_index, OutputChunk&& chunk);  // on the backend's thread
  void post(std::function<void()> work);                   // on_executor, failing the request when memory runs out
  void on_chunk(size_t prompt_index, OutputChunk&& chunk);
  void take_waiting();
  void take_chunk(size_t prompt_index, OutputChunk&& chunk);
  void on_disconnect();
  void note_times(const OutputChunk& chunk, double now_s);
  void announce_lease();
  bool take_failure(const ChoiceDelta& delta);
  void stream_delta(ChoiceState& state, ChoiceDelta&& delta);
  int64_t entries(const ChoiceState& state, const ChoiceDelta& delta) const;
  void write_out(int64_t num_entries, std::function<std::string()> write, void (Generation::*send)(std::string&&));
  std::string events(ChoiceState& state, const ChoiceDelta& delta, const Json& usage) const;
  std::string event(Json choices, const Json& usage) const;
  std::string whole_reply();
  void send_events(std::string&& text) { exchange_->write(std::move(text)); }
  void send_whole(std::string&& body);
  void complete_when_done();
  void end(const char* reason, int status);
  void refuse(const Error& error);
  void cancel_all();
  Json envelope(bool streamed) const;
  Usage usage() const;

  GenerationSpec spec_;
  std::shared_ptr<Exchange> exchange_;
  std::vector<ChoiceState> choices_;
  std::vector<RequestId> requests_;    // one per prompt
  std::vector<int64_t> cached_;        // prompt tokens from the prefix cache, per prompt
  std::vector<double> last_chunk_s_;   // per choice
  std::vector<int64_t> tokens_of_;     // per choice
  std::optional<RemotePrefix> lease_;  // of the prompt, for another server
  size_t num_finished_ = 0;
  int64_t completion_tokens_ = 0;
  int64_t num_drafts_ = 0, num_accepted_ = 0;
  bool length_ended_ = false;
  bool streaming_ = false;
  bool announced_ = false;  // the lease: what follows is an event of a stream, too
  bool ended_ = false;
  bool writing_ = false;  // in the pool; choices_ are the pool's meanwhile
  std::deque<std::pair<size_t, OutputChunk>> waiting_;
  std::atomic<bool> lost_chunk_{false};
  double submitted_s_ = 0, scheduled_s_ = 0, first_token_s_ = 0, last_token_s_ = 0;  // clock times; 0: not yet
  int64_t created_ = 0;
};

}  // namespace perigee
