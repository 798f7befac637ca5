#include "router/worker_table.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

namespace perigee {

const char* role_name(Role role) {
  return role == Role::kPlain ? "plain" : role == Role::kPrefill ? "prefill" : "decode";
}

namespace {

constexpr std::string_view kScheme = "http://";

bool is_port(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value > 0 && value < 65536;
}

bool is_host_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
}

bool is_path_char(char c) {
  return c > 0x20 && c < 0x7F && c != '?' && c != '#' && c != '"' && c != '\\';
}

Error bad_url(const std::string& text, const char* why) {
  return bad_input(fmt::format("'{}' is not the URL of a worker: {}; write http://HOST:PORT", text.substr(0, 256), why),
                   "url");
}

}  // namespace

Result<WorkerUrl> parse_worker_url(const std::string& text) {
  std::string_view rest = text;
  if (rest.starts_with("https://")) return bad_url(text, "TLS is not spoken here, put a proxy before the worker");
  if (!rest.starts_with(kScheme)) return bad_url(text, "it does not begin with http://");
  rest.remove_prefix(kScheme.size());
  while (rest.ends_with('/')) rest.remove_suffix(1);
  WorkerUrl url;
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string_view authority = rest.substr(0, slash);
  url.path = rest.substr(slash);
  const bool v6 = authority.starts_with('[');
  const size_t host_end = v6 ? authority.find(']') : std::min(authority.find(':'), authority.size());
  if (host_end == std::string_view::npos) return bad_url(text, "an IPv6 address without its closing bracket");
  url.host = authority.substr(v6 ? 1 : 0, host_end - (v6 ? 1 : 0));
  const std::string_view port = authority.substr(host_end + (v6 ? 1 : 0));
  url.port = port.empty() ? "80" : port.substr(1);
  if (!port.empty() && (port.front() != ':' || !is_port(url.port))) return bad_url(text, "its port is not a number");
  const bool host_ok =
      std::all_of(url.host.begin(), url.host.end(), [&](char c) { return is_host_char(c) || (v6 && c == ':'); });
  if (url.host.empty() || !host_ok) return bad_url(text, "it has no valid host");
  if (!std::all_of(url.path.begin(), url.path.end(), is_path_char)) return bad_url(text, "its path is not valid");
  url.authority = authority;
  url.text = str_cat(kScheme, rest);
  return url;
}

struct WorkerTable::Worker {
  Worker(uint64_t id_in, WorkerUrl url_in, Role role_in, const BreakerConfig& breaker_in)
      : id(id_in), url(std::move(url_in)), role(role_in), breaker(breaker_in) {}

  bool takes_requests(double now_s) const { return ready && !draining && address.size > 0 && breaker.admits(now_s); }
  const char* state() const {
    return draining ? "draining" : ready ? "ready" : lost ? "lost" : probed ? "not_ready" : "starting";
  }

  const uint64_t id;
  const WorkerUrl url;
  const Role role;
  SocketAddress address;
  CircuitBreaker breaker;
  bool probed = false, ready = false, lost = false;
  bool draining = false, removing = false;
  int32_t unanswered = 0, answered = 0;  // probes in a row
  int64_t open_requests = 0, requests = 0, failures = 0;
};

WorkerTable::WorkerTable(const TableConfig& config, const Clock& clock) : config_(config), clock_(clock) {
  for (const PolicyConfig& policy : {config.plain, config.prefill, config.decode})
    pools_.push_back({Policy(policy), {}});
}

std::shared_ptr<WorkerTable::Worker> WorkerTable::find(const std::string& url) const {
  const auto parsed = parse_worker_url(url);
  for (const Pool& pool : pools_)
    for (const auto& worker : pool.workers)
      if (parsed.ok() && worker->url.text == parsed->text) return worker;
  return nullptr;
}

Status WorkerTable::add(const std::string& url, Role role) {
  ASSIGN_OR_RETURN(WorkerUrl parsed, parse_worker_url(url));
  const std::lock_guard lock(mutex_);
  if (find(url) != nullptr) return bad_input(fmt::format("the worker {} is there already", parsed.text), "url");
  pool(role).workers.push_back(std::make_shared<Worker>(++last_id_, std::move(parsed), role, config_.breaker));
  return {};
}

bool WorkerTable::drain(const std::string& url) {
  const std::lock_guard lock(mutex_);
  const auto worker = find(url);
  if (worker) worker->draining = true;
  return worker != nullptr;
}

bool WorkerTable::remove(const std::string& url) {
  const std::lock_guard lock(mutex_);
  const auto worker = find(url);
  if (!worker) return false;
  worker->draining = worker->removing = true;
  if (worker->open_requests == 0) forget(*worker);
  return true;
}

void WorkerTable::forget(const Worker& worker) {
  std::erase_if(pool(worker.role).workers, [&](const auto& each) { return each->id == worker.id; });
}

std::vector<std::shared_ptr<WorkerTable::Worker>> WorkerTable::candidates(Role role,
                                                                          const std::vector<uint64_t>& tried) const {
  std::vector<std::shared_ptr<Worker>> out;
  for (const auto& worker : pool(role).workers)
    if (worker->takes_requests(clock_.now_s()) && std::count(tried.begin(), tried.end(), worker->id) == 0)
      out.push_back(worker);
  return out;
}

std::shared_ptr<WorkerTable::Lease> WorkerTable::pick(Role role, const PrefixBlocks& prompt,
                                                      const std::vector<uint64_t>& tried) {
  const std::lock_guard lock(mutex_);
  const auto workers = candidates(role, tried);
  if (workers.empty()) return nullptr;
  std::vector<Candidate> shown;
  for (const auto& worker : workers) shown.push_back({worker->id, worker->open_requests});
  const auto& worker = workers[pool(role).policy.choose(shown, prompt)];
  ++worker->open_requests;
  ++worker->requests;
  return std::make_shared<Lease>(shared_from_this(), worker, worker->breaker.begin());
}

bool WorkerTable::reads_prompts(Role role) const {
  return pool(role).policy.reads_prompts();
}

bool WorkerTable::takes_requests(Role role, const std::vector<uint64_t>& tried) const {
  const std::lock_guard lock(mutex_);
  return !candidates(role, tried).empty();
}

void WorkerTable::end(Worker& worker, bool on_trial, Outcome outcome) {
  const std::lock_guard lock(mutex_);
  worker.breaker.end(on_trial, outcome, clock_.now_s());
  if (outcome == Outcome::kBad) ++worker.failures;
  if (--worker.open_requests == 0 && worker.removing) forget(worker);
}

void WorkerTable::set_address(uint64_t id, const SocketAddress& address) {
  const std::lock_guard lock(mutex_);
  for (Pool& pool : pools_)
    for (const auto& worker : pool.workers)
      if (worker->id == id) worker->address = address;
}

void WorkerTable::report(uint64_t id, ProbeResult result) {
  const std::lock_guard lock(mutex_);
  for (Pool& pool : pools_)
    for (const auto& worker : pool.workers) {
      if (worker->id != id) continue;
      worker->probed = true;
      worker->unanswered = result == ProbeResult::kNoAnswer ? worker->unanswered + 1 : 0;
      worker->answered = result == ProbeResult::kReady ? worker->answered + 1 : 0;
      if (worker->unanswered >= config_.lost_after_failures) worker->lost = true;
      if (worker->lost && worker->answered >= config_.back_after_successes) worker->lost = false;
      if (result == ProbeResult::kNotReady || worker->lost) worker->ready = false;
      if (result == ProbeResult::kReady && !worker->lost) worker->ready = true;
    }
}

std::vector<WorkerView> WorkerTable::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<WorkerView> views;
  for (const Pool& pool : pools_)
    for (const auto& worker : pool.workers)
      views.push_back({.id = worker->id,
                       .url = worker->url,
                       .role = worker->role,
                       .address = worker->address,
                       .state = worker->state(),
                       .breaker = worker->breaker.state(clock_.now_s()),
                       .open_requests = worker->open_requests,
                       .requests = worker->requests,
                       .failures = worker->failures});
  return views;
}

WorkerTable::Lease::Lease(std::shared_ptr<WorkerTable> table, std::shared_ptr<Worker> worker, bool on_trial)
    : table_(std::move(table)), worker_(std::move(worker)), address_(worker_->address), on_trial_(on_trial) {}

uint64_t WorkerTable::Lease::worker() const {
  return worker_->id;
}
const WorkerUrl& WorkerTable::Lease::url() const {
  return worker_->url;
}

void WorkerTable::Lease::end(Outcome outcome) {
  if (!std::exchange(ended_, true)) table_->end(*worker_, on_trial_, outcome);
}

}  // namespace perigee
