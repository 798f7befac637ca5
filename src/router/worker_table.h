// WorkerTable: the workers that requests may go to, what is known of each, and the choice among them.
//
// A worker takes requests while its last probes were good, its circuit breaker admits them, and nobody drains it. A
// Lease is one request's hold on a worker: it counts among the worker's open requests until it ends. Thread-safe; it
// knows no sockets, and time is passed in.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "router/circuit_breaker.h"
#include "router/policy.h"

namespace perigee {

enum class Role { kPlain, kPrefill, kDecode };
const char* role_name(Role role);

// http://HOST[:PORT][/PATH]: HOST is a name, an IPv4 address, or an IPv6 address in brackets.
struct WorkerUrl {
  std::string text;  // as it is shown and compared: without a slash at its end
  std::string host, port;
  std::string authority;  // of the header Host
  std::string path;       // before that of every request; "" for none
};
Result<WorkerUrl> parse_worker_url(const std::string& text);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;  // 0: not known yet
};

struct TableConfig {
  PolicyConfig plain, prefill, decode;
  BreakerConfig breaker;
  int32_t lost_after_failures = 3;  // probes without an answer
  int32_t back_after_successes = 2;
};

enum class ProbeResult { kReady, kNotReady, kNoAnswer };  // kNotReady: it says so itself

struct WorkerView {
  uint64_t id = 0;
  WorkerUrl url;
  Role role = Role::kPlain;
  SocketAddress address;
  const char* state = "";    // starting, ready, not_ready, lost, draining
  const char* breaker = "";  // closed, open, half_open
  int64_t open_requests = 0, requests = 0, failures = 0;
};

class WorkerTable : public std::enable_shared_from_this<WorkerTable> {
 public:
  class Lease;

  WorkerTable(const TableConfig& config, const Clock& clock);

  // Errors: a URL that is not one, or that is there already.
  Status add(const std::string& url, Role role);
  bool drain(const std::string& url);   // it gets no more requests; false: there is none
  bool remove(const std::string& url);  // drained, and forgotten when its last request ends

  // nullptr: none of that role takes requests, or only those in `tried`.
  std::shared_ptr<Lease> pick(Role role, const PrefixBlocks& prompt, const std::vector<uint64_t>& tried);
  bool reads_prompts(Role role) const;
  bool takes_requests(Role role, const std::vector<uint64_t>& tried = {}) const;  // pick() would find one

  void set_address(uint64_t worker, const SocketAddress& address);
  void report(uint64_t worker, ProbeResult result);
  std::vector<WorkerView> list() const;

 private:
  struct Worker;
  struct Pool {  // of a role
    Policy policy;
    std::vector<std::shared_ptr<Worker>> workers;
  };
  Pool& pool(Role role) { return pools_[static_cast<size_t>(role)]; }
  const Pool& pool(Role role) const { return pools_[static_cast<size_t>(role)]; }
  std::shared_ptr<Worker> find(const std::string& url) const;
  std::vector<std::shared_ptr<Worker>> candidates(Role role, const std::vector<uint64_t>& tried) const;
  void forget(const Worker& worker);
  void end(Worker& worker, bool on_trial, Outcome outcome);

  const TableConfig config_;
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Pool> pools_;
  uint64_t last_id_ = 0;
};

class WorkerTable::Lease {
 public:
  Lease(std::shared_ptr<WorkerTable> table, std::shared_ptr<Worker> worker, bool on_trial);
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { end(Outcome::kUnknown); }

  uint64_t worker() const;
  const WorkerUrl& url() const;
  const SocketAddress& address() const { return address_; }
  void end(Outcome outcome);  // the first call counts

 private:
  const std::shared_ptr<WorkerTable> table_;
  std::shared_ptr<Worker> worker_;
  const SocketAddress address_;
  const bool on_trial_;
  bool ended_ = false;
};

}  // namespace perigee
