#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <mutex>
#include <optional>
#include <sstream>

#include "control/plan.h"
#include "server/process_metrics.h"

namespace perigee {

namespace {

using Labels = std::map<std::string, std::string>;
using Buckets = prometheus::Histogram::BucketBoundaries;

constexpr std::array<const char*, 2> kPrefixes = {"perigee:", "vllm:"};

// The same metric under both prefixes.
struct GaugePair {
  std::array<prometheus::Gauge*, 2> each{};
  void set(double value) {
    for (auto* gauge : each) gauge->Set(value);
  }
};
struct CounterPair {
  std::array<prometheus::Counter*, 2> each{};
  void add(double value) {
    if (value > 0)
      for (auto* counter : each) counter->Increment(value);
  }
  // For totals counted elsewhere.
  void raise_to(double total) { add(total - each[0]->Value()); }
};
struct HistogramPair {
  std::array<prometheus::Histogram*, 2> each{};
  void observe(double value) {
    for (auto* histogram : each) histogram->Observe(value);
  }
  // For what is counted elsewhere: so many more in each bucket, and their sum.
  void add(const std::vector<double>& in_buckets, double sum) {
    for (auto* histogram : each) histogram->ObserveMultiple(in_buckets, sum);
  }
};

class Registrar {
 public:
  Registrar(prometheus::Registry& registry, Labels labels) : registry_(registry), labels_(std::move(labels)) {}

  GaugePair gauge(const std::string& name, const std::string& help, const Labels& extra = {}) {
    GaugePair pair;
    for (size_t i = 0; i < 2; ++i)
      pair.each[i] =
          &prometheus::BuildGauge().Name(kPrefixes[i] + name).Help(help).Register(registry_).Add(with(extra));
    return pair;
  }
  CounterPair counter(const std::string& name, const std::string& help, const Labels& extra = {}) {
    CounterPair pair;
    for (size_t i = 0; i < 2; ++i)
      pair.each[i] = &prometheus::BuildCounter()
                          .Name(kPrefixes[i] + name + "_total")
                          .Help(help)
                          .Register(registry_)
                          .Add(with(extra));
    return pair;
  }
  HistogramPair histogram(const std::string& name, const std::string& help, const Buckets& buckets) {
    HistogramPair pair;
    for (size_t i = 0; i < 2; ++i)
      pair.each[i] =
          &prometheus::BuildHistogram().Name(kPrefixes[i] + name).Help(help).Register(registry_).Add(labels_, buckets);
    return pair;
  }

 private:
  Labels with(const Labels& extra) const {
    Labels labels = labels_;
    labels.insert(extra.begin(), extra.end());
    return labels;
  }
  prometheus::Registry& registry_;
  Labels labels_;
};

const Buckets kFirstToken = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                             1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
const Buckets kPerToken = {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
const Buckets kRequest = {.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const Buckets kParallel = {1, 2, 5, 10, 20};
const Buckets kTokens = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5};

}  // namespace

struct Metrics::Impl {
  explicit Impl(const std::string& model_name)
      : labels{{"model_name", model_name}, {"engine", "0"}}, make(registry, labels) {}

  prometheus::Registry registry;
  Labels labels;
  Registrar make;
  std::mutex render_mutex;  // totals are raised by one scrape at a time

  GaugePair running = make.gauge("num_requests_running", "Sequences in the running batch.");
  GaugePair waiting = make.gauge("num_requests_waiting", "Sequences that wait to run.");
  GaugePair waiting_capacity =
      make.gauge("num_requests_waiting_by_reason", "Sequences that wait, by reason.", {{"reason", "capacity"}});
  GaugePair waiting_deferred =
      make.gauge("num_requests_waiting_by_reason", "Sequences that wait, by reason.", {{"reason", "deferred"}});
  GaugePair kv_usage = make.gauge("kv_cache_usage_perc", "Cache pages in use, 1 is all.");
  GaugePair host_step =
      make.gauge("host_step_microseconds", "Scheduler and batch building, host time of a step, mean of the last 64.");
  GaugePair sleep_state = make.gauge("engine_sleep_state", "1 while awake.", {{"sleep_state", "awake"}});
  CounterPair preemptions = make.counter("num_preemptions", "Sequences put back to wait.");
  CounterPair prefix_queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.");
  CounterPair prefix_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.");
  CounterPair prompt_tokens = make.counter("prompt_tokens", "Prompt tokens processed, once for each choice.");
  CounterPair generation_tokens = make.counter("generation_tokens", "Tokens generated.");
  CounterPair cached_tokens = make.counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.");
  CounterPair from_compute =
      make.counter("prompt_tokens_by_source", "Prompt tokens by where they came from.", {{"source", "local_compute"}});
  CounterPair from_cache = make.counter("prompt_tokens_by_source", "Prompt tokens by where they came from.",
                                        {{"source", "local_cache_hit"}});
  GaugePair latent_pages = pages("latent"), state_pages = pages("state"), checkpoint_pages = pages("checkpoint");
  GaugePair checkpoints = make.gauge("state_checkpoints", "Saved recurrent states that a prompt can start from.");
  CounterPair checkpoint_writes = make.counter("state_checkpoint_writes", "Recurrent states saved.");
  CounterPair checkpoint_hits = make.counter("state_checkpoint_hits", "Sequences that began from a saved state.");
  CounterPair checkpoint_evictions = make.counter("state_checkpoint_evictions", "Saved states that gave up pages.");
  CounterPair checkpoint_skips = make.counter("state_checkpoint_skips", "States not saved for lack of pages.");
  CounterPair corrupted = make.counter("corrupted_requests", "Sequences ended because a logit was not finite.");
  // Of speculation; where there is none they are not made.
  struct Drafts {
    CounterPair rows, tokens, accepted;
    std::vector<CounterPair> accepted_at;
  };
  std::optional<Drafts> drafts;
  // Of prefill/decode separation; the same.
  struct Handovers {
    GaugePair leases;
    CounterPair granted, released, expired, withdrawn, refused_reads, refused_connections, bytes_sent;
    CounterPair transfers, failed, withdrawn_there, dropped, given_back, bytes_taken, seconds;
  };
  std::optional<Handovers> handovers;
  ProcessMetrics process{registry};
  StepTokens step_tokens_seen;
  CounterPair stop = success("stop"), length = success("length"), abort = success("abort"), error = success("error");
  HistogramPair ttft = make.histogram("time_to_first_token_seconds", "From arrival to the first token.", kFirstToken);
  HistogramPair itl = make.histogram("inter_token_latency_seconds", "Between two chunks of a choice.", kPerToken);
  HistogramPair tpot = make.histogram("request_time_per_output_token_seconds",
                                      "Mean time of a request's tokens but the first.", kPerToken);
  HistogramPair e2e = make.histogram("e2e_request_latency_seconds", "From arrival to the end.", kRequest);
  HistogramPair queue = make.histogram("request_queue_time_seconds", "From hand-over to the first plan.", kRequest);
  HistogramPair prefill =
      make.histogram("request_prefill_time_seconds", "From the first plan to the first token.", kRequest);
  HistogramPair decode = make.histogram("request_decode_time_seconds", "From the first token to the last.", kRequest);
  HistogramPair inference =
      make.histogram("request_inference_time_seconds", "From the first plan to the last token.", kRequest);
  HistogramPair step_size = make.histogram("iteration_tokens_total", "Tokens of a step.",
                                           Buckets(kStepTokenBounds.begin(), kStepTokenBounds.end()));
  HistogramPair prompt_size = make.histogram("request_prompt_tokens", "Prompt tokens of a request.", kTokens);
  HistogramPair output_size = make.histogram("request_generation_tokens", "Tokens generated by a request.", kTokens);
  HistogramPair longest_output =
      make.histogram("request_max_num_generation_tokens", "Tokens of the longest choice of a request.", kTokens);
  HistogramPair prefill_computed = make.histogram("request_prefill_kv_computed_tokens",
                                                  "Prompt tokens of a request that were not in the cache.", kTokens);
  HistogramPair params_n = make.histogram("request_params_n", "n of a request.", kParallel);
  HistogramPair params_max = make.histogram("request_params_max_tokens", "max_tokens of a request.", kTokens);

  void observe_steps(const StepTokens& now);
  void copy_pages(const SchedulerGauges& gauges);
  void make_drafts(int32_t num_drafts);
  void copy_drafts(const SpeculationTotals& totals);
  void copy_handovers(const HandoverCounts& counts, int64_t leases_given_back);
  GaugePair pages(const char* owner) {
    return make.gauge("cache_pages", "Pages of the pool that hold something, in use or cached.", {{"owner", owner}});
  }
  CounterPair success(const char* reason) {
    return make.counter("request_success", "Requests ended, by reason.", {{"finished_reason", reason}});
  }
};

Metrics::Metrics(const std::string& model_name) : impl_(std::make_unique<Impl>(model_name)) {
  impl_->sleep_state.set(1);
}
Metrics::~Metrics() = default;

void Metrics::set_engine(const BackendInfo& info) {
  const Labels labels = {{"block_size", std::to_string(kBlockTokens)},
                         {"num_gpu_blocks", std::to_string(info.num_pages)},
                         {"dcp_world_size", std::to_string(info.dcp_size)},
                         {"enable_prefix_caching", "True"}};
  impl_->make.gauge("cache_config_info", "Configuration of the cache, as labels.", labels).set(1);
  if (info.num_drafts > 0) impl_->make_drafts(info.num_drafts);
}

void Metrics::first_token(double seconds) {
  impl_->ttft.observe(seconds);
}
void Metrics::inter_token(double seconds) {
  impl_->itl.observe(seconds);
}

void Metrics::request_done(const RequestRecord& record) {
  Impl& m = *impl_;
  const std::string_view reason = record.reason;
  (reason == "stop" ? m.stop : reason == "length" ? m.length : reason == "abort" ? m.abort : m.error).add(1);
  m.e2e.observe(record.end_s);
  m.prompt_size.observe(static_cast<double>(record.prompt_tokens));
  m.output_size.observe(static_cast<double>(record.completion_tokens));
  m.params_n.observe(record.n);
  m.params_max.observe(static_cast<double>(record.max_tokens));
  m.longest_output.observe(static_cast<double>(record.longest_output));
  if (record.scheduled_s <= 0) return;
  m.queue.observe(record.scheduled_s - record.submitted_s);
  m.prefill_computed.observe(static_cast<double>(record.prompt_tokens - record.cached_tokens));
  if (record.first_token_s <= 0) return;
  const double decode_s = record.last_token_s - record.first_token_s;
  m.prefill.observe(record.first_token_s - record.scheduled_s);
  m.decode.observe(decode_s);
  m.inference.observe(record.last_token_s - record.scheduled_s);
  const int64_t later_tokens = record.completion_tokens - record.n;
  m.tpot.observe(later_tokens > 0 ? decode_s * record.n / static_cast<double>(later_tokens) : 0.0);
}

void Metrics::refused(int status) {
  impl_->make
      .counter("requests_refused", "Requests refused before they were run.", {{"status", std::to_string(status)}})
      .add(1);
}

void Metrics::Impl::observe_steps(const StepTokens& now) {
  std::vector<double> more;
  for (size_t i = 0; i < now.steps.size(); ++i)
    more.push_back(static_cast<double>(now.steps[i] - step_tokens_seen.steps[i]));
  step_size.add(more, static_cast<double>(now.tokens - step_tokens_seen.tokens));
  step_tokens_seen = now;
}

void Metrics::Impl::copy_pages(const SchedulerGauges& gauges) {
  latent_pages.set(gauges.latent_pages);
  state_pages.set(gauges.state_pages);
  checkpoint_pages.set(gauges.checkpoint_pages);
  checkpoints.set(gauges.checkpoints);
  checkpoint_writes.raise_to(static_cast<double>(gauges.checkpoint_writes));
  checkpoint_hits.raise_to(static_cast<double>(gauges.checkpoint_hits));
  checkpoint_evictions.raise_to(static_cast<double>(gauges.checkpoint_evictions));
  checkpoint_skips.raise_to(static_cast<double>(gauges.checkpoint_skips));
}

void Metrics::Impl::make_drafts(int32_t num_drafts) {
  Drafts& made = drafts.emplace();
  made.rows = make.counter("spec_decode_num_drafts", "Rows that verified drafted tokens.");
  made.tokens = make.counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified.");
  made.accepted = make.counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.");
  for (int32_t i = 0; i < num_drafts; ++i)
    made.accepted_at.push_back(make.counter("spec_decode_num_accepted_tokens_per_pos",
                                            "Drafted tokens that were accepted, by their place in the draft.",
                                            {{"position", std::to_string(i)}}));
}

void Metrics::Impl::copy_drafts(const SpeculationTotals& totals) {
  if (!drafts) return;
  drafts->rows.raise_to(static_cast<double>(totals.rows));
  drafts->tokens.raise_to(static_cast<double>(totals.drafts));
  drafts->accepted.raise_to(static_cast<double>(totals.accepted()));
  for (size_t i = 0; i < drafts->accepted_at.size(); ++i)
    drafts->accepted_at[i].raise_to(static_cast<double>(totals.accepted_at[i]));
}

void Metrics::Impl::copy_handovers(const HandoverCounts& counts, int64_t leases_given_back) {
  if (!handovers)
    handovers = Handovers{
        .leases = make.gauge("kv_leases", "Prompts that are held for other servers."),
        .granted = make.counter("kv_leases_granted", "Prompts that were held for other servers."),
        .released = make.counter("kv_leases_released", "Of those, let go by their reader."),
        .expired = make.counter("nixl_num_kv_expired_reqs", "Of those, let go because nobody asked for them in time."),
        .withdrawn = make.counter(
            "kv_leases_withdrawn",
            "Of those, ended before they were whole: no room, or their request was cancelled or too late."),
        .refused_reads = make.counter("kv_lease_refusals", "Questions for prompts that are not held, or are others."),
        .refused_connections = make.counter("kv_refused_connections", "Connections of unknown or damaged peers."),
        .bytes_sent = make.counter("kv_bytes_sent", "Bytes of prompts' caches that other servers have read."),
        .transfers = make.counter("kv_transfers", "Prompts that arrived from other servers."),
        .failed = make.counter("nixl_num_failed_transfers", "Prompts that did not arrive."),
        .withdrawn_there = make.counter("kv_transfers_withdrawn",
                                        "Prompts computed here because the server that held them had withdrawn them."),
        .dropped = make.counter("kv_transfers_dropped", "Prompts whose request ended while they were on their way."),
        .given_back =
            make.counter("kv_leases_given_back", "Prompts computed here so that other servers, which wait, find room."),
        .bytes_taken = make.counter("kv_bytes_received", "Bytes of those that arrived."),
        .seconds = make.counter("kv_transfer_seconds", "Time that those took, together.")};
  Handovers& to = *handovers;
  to.leases.set(static_cast<double>(counts.leases.held));
  to.granted.raise_to(static_cast<double>(counts.leases.granted));
  to.released.raise_to(static_cast<double>(counts.leases.released));
  to.expired.raise_to(static_cast<double>(counts.leases.expired));
  to.withdrawn.raise_to(static_cast<double>(counts.leases.withdrawn));
  to.refused_reads.raise_to(static_cast<double>(counts.leases.refused_reads));
  to.refused_connections.raise_to(static_cast<double>(counts.refused_connections));
  to.bytes_sent.raise_to(static_cast<double>(counts.leases.bytes));
  to.transfers.raise_to(static_cast<double>(counts.transfers.arrived));
  to.failed.raise_to(static_cast<double>(counts.transfers.failed));
  to.withdrawn_there.raise_to(static_cast<double>(counts.transfers.withdrawn));
  to.dropped.raise_to(static_cast<double>(counts.transfers.dropped));
  to.given_back.raise_to(static_cast<double>(leases_given_back));
  to.bytes_taken.raise_to(static_cast<double>(counts.transfers.bytes));
  to.seconds.raise_to(counts.transfers.seconds);
}

std::string Metrics::render(const EngineStats& stats) {
  Impl& m = *impl_;
  const std::lock_guard lock(m.render_mutex);
  const SchedulerGauges& gauges = stats.scheduler;
  m.running.set(gauges.running);
  m.waiting.set(gauges.waiting + gauges.awaiting);
  m.waiting_capacity.set(gauges.waiting);
  m.waiting_deferred.set(gauges.awaiting);
  m.kv_usage.set(stats.kv_usage);
  m.host_step.set(stats.host_step_us);
  m.preemptions.raise_to(static_cast<double>(gauges.preemptions));
  m.prefix_queries.raise_to(static_cast<double>(gauges.prefix_queries));
  m.prefix_hits.raise_to(static_cast<double>(gauges.prefix_hits));
  m.prompt_tokens.raise_to(static_cast<double>(gauges.prompt_tokens));
  m.cached_tokens.raise_to(static_cast<double>(gauges.cached_prompt_tokens));
  m.from_cache.raise_to(static_cast<double>(gauges.cached_prompt_tokens));
  m.from_compute.raise_to(static_cast<double>(gauges.prompt_tokens - gauges.cached_prompt_tokens));
  m.generation_tokens.raise_to(static_cast<double>(gauges.generated_tokens));
  m.corrupted.raise_to(static_cast<double>(gauges.not_finite));
  m.copy_pages(gauges);
  m.copy_drafts(gauges.speculation);
  if (stats.handovers) m.copy_handovers(*stats.handovers, gauges.leases_given_back);
  m.process.read();
  m.observe_steps(stats.step_tokens);
  return prometheus::TextSerializer().Serialize(m.registry.Collect());
}

}  // namespace perigee
