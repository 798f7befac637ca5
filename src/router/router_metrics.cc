#include "router/router_metrics.h"

#include <fmt/core.h>
#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <sstream>

#include "server/process_metrics.h"

namespace perigee {

namespace {

const prometheus::Histogram::BucketBoundaries kSeconds = {.001, .002, .005, .01, .02, .05, .1, .2,
                                                          .5,   1,    2,    5,   10,  20,  60, 300};

// One family of what the table knows of each worker: URLs hold no character that a label would have to escape.
template <typename Value>
void append_family(std::string& out, const char* name, const char* type, const char* help,
                   const std::vector<WorkerView>& workers, Value value) {
  out += fmt::format("# HELP perigee_router_{} {}\n# TYPE perigee_router_{} {}\n", name, help, name, type);
  for (const WorkerView& worker : workers)
    out += fmt::format("perigee_router_{}{{worker=\"{}\",role=\"{}\"}} {}\n", name, worker.url.text,
                       role_name(worker.role), value(worker));
}

}  // namespace

struct RouterMetrics::Impl {
  prometheus::Counter& counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
  }
  prometheus::Histogram& histogram(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, kSeconds);
  }

  prometheus::Registry registry;
  prometheus::Family<prometheus::Counter>& requests = prometheus::BuildCounter()
                                                          .Name("perigee_router_requests_total")
                                                          .Help("Requests answered, by status.")
                                                          .Register(registry);
  prometheus::Counter& retries = counter("perigee_router_retries_total", "Requests asked again of another worker.");
  prometheus::Counter& cuts =
      counter("perigee_router_cut_streams_total", "Streams that their worker did not end: they ended with an error.");
  prometheus::Counter& left =
      counter("perigee_router_client_disconnects_total", "Clients that left before their answer was complete.");
  prometheus::Histogram& first_byte =
      histogram("perigee_router_first_byte_seconds", "From a request's arrival to the first byte of its reply.");
  prometheus::Histogram& prefill = histogram("perigee_router_prefill_seconds", "What a prefill worker took.");
  ProcessMetrics process{registry};
};

RouterMetrics::RouterMetrics() : impl_(std::make_unique<Impl>()) {}
RouterMetrics::~RouterMetrics() = default;

void RouterMetrics::answered(int status) {
  impl_->requests.Add({{"status", std::to_string(status)}}).Increment();
}
void RouterMetrics::retried() {
  impl_->retries.Increment();
}
void RouterMetrics::cut() {
  impl_->cuts.Increment();
}
void RouterMetrics::client_left() {
  impl_->left.Increment();
}
void RouterMetrics::first_byte(double seconds) {
  impl_->first_byte.Observe(seconds);
}
void RouterMetrics::prefilled(double seconds) {
  impl_->prefill.Observe(seconds);
}

std::string RouterMetrics::render(const std::vector<WorkerView>& workers) {
  impl_->process.read();
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, impl_->registry.Collect());
  std::string out = text.str();
  append_family(out, "worker_ready", "gauge", "1 while a worker takes requests.", workers, [](const WorkerView& w) {
    return std::string_view(w.state) == "ready" && std::string_view(w.breaker) != "open" ? 1 : 0;
  });
  append_family(out, "worker_open_requests", "gauge", "Requests that a worker has.", workers,
                [](const WorkerView& w) { return w.open_requests; });
  append_family(out, "worker_requests_total", "counter", "Requests sent to a worker.", workers,
                [](const WorkerView& w) { return w.requests; });
  append_family(out, "worker_failures_total", "counter", "Requests that a worker did not answer as HTTP asks.", workers,
                [](const WorkerView& w) { return w.failures; });
  return out;
}

}  // namespace perigee
