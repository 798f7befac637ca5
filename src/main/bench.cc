// `perigee bench serve | decode | prefill`: loads a running server and prints the tables people compare; `bench step`
// is step_bench.cc, `bench context` context_bench.cc.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "base/clock.h"
#include "main/acceptance.h"
#include "main/command_line.h"
#include "main/commands.h"
#include "main/context_bench.h"
#include "main/load.h"
#include "main/result_file.h"
#include "main/step_bench.h"

namespace perigee {
namespace {

struct Target {
  HttpEndpoint endpoint;
  std::string model;  // empty: the first that the server lists
  int32_t vocab = 2048;
  uint64_t seed = 1;
  std::string result_path;
};

void add_target_flags(CommandLine& flags, Target& to) {
  flags.add("--host", to.endpoint.host, "server address");
  flags.add("--port", to.endpoint.port, "server port");
  flags.add("--api-key", to.endpoint.api_key, "key that the server wants");
  flags.add("--model", to.model, "model name; empty: the first the server lists");
  flags.add("--vocab", to.vocab, Whole{2, 1 << 20}, "prompts are random token ids below this");
  flags.add("--seed", to.seed, Whole{0, INT64_MAX}, "seed of the prompts");
  add_result_flag(flags, to.result_path);
}

// Reads the words, and asks the server for what they leave open.
Status read(CommandLine& flags, const std::vector<std::string>& words, Target& target) {
  RETURN_IF_ERROR(flags.parse(words));
  RETURN_IF_ERROR(check_result_file(target.result_path));
  ASSIGN_OR_RETURN(const ServerFacts facts, ask_server(target.endpoint));
  if (target.model.empty()) target.model = facts.model;
  return {};
}

struct Totals {
  int64_t completed = 0, failed = 0, input = 0, output = 0;
  double duration_s = 0;
  std::vector<double> ttft_ms, tpot_ms, itl_ms;
  std::string first_error;
};

Totals total(const std::vector<RequestTiming>& timings) {
  Totals sum;
  double begin = 1e300, end = 0;
  for (const RequestTiming& t : timings) {
    begin = std::min(begin, t.send_s);
    end = std::max(end, t.last_s);
    if (!t.ok) {
      ++sum.failed;
      if (sum.first_error.empty()) sum.first_error = t.error;
      continue;
    }
    ++sum.completed;
    sum.input += t.prompt_tokens;
    sum.output += t.output_tokens;
    sum.ttft_ms.push_back(t.ttft_s() * 1e3);
    if (t.output_tokens > 1) sum.tpot_ms.push_back(t.tpot_s() * 1e3);
    for (const double gap : t.gaps_s) sum.itl_ms.push_back(gap * 1e3);
  }
  sum.duration_s = std::max(end - begin, 1e-9);
  return sum;
}

// Most chunks that arrived within one second of the run.
int64_t peak_rate(const std::vector<RequestTiming>& timings) {
  std::map<int64_t, int64_t> seconds;
  for (const RequestTiming& t : timings) {
    if (!t.ok) continue;
    double at = t.first_s;
    ++seconds[static_cast<int64_t>(at)];
    for (const double gap : t.gaps_s) ++seconds[static_cast<int64_t>(at += gap)];
  }
  int64_t peak = 0;
  for (const auto& [second, chunks] : seconds) peak = std::max(peak, chunks);
  return peak;
}

void print_row(const std::string& name, double value) {
  fmt::print("{:<40} {:<10.2f}\n", name, value);
}
void print_row(const std::string& name, int64_t value) {
  fmt::print("{:<40} {:<10}\n", name, value);
}

void print_group(const char* title, const char* name, const Summary& s) {
  fmt::print("{}\n", title);
  print_row(fmt::format("Mean {} (ms):", name), s.mean);
  print_row(fmt::format("Median {} (ms):", name), s.median);
  print_row(fmt::format("P99 {} (ms):", name), s.p99);
}

Json group_json(const Summary& s) {
  Json out;
  out.set("mean_ms", s.mean);
  out.set("median_ms", s.median);
  out.set("p99_ms", s.p99);
  return out;
}

Json print_serving_block(const std::vector<RequestTiming>& timings) {
  const Totals sum = total(timings);
  const Summary ttft = summarise(sum.ttft_ms), tpot = summarise(sum.tpot_ms), itl = summarise(sum.itl_ms);
  const double d = sum.duration_s;
  fmt::print("============ Serving Benchmark Result ============\n");
  print_row("Successful requests:", sum.completed);
  print_row("Failed requests:", sum.failed);
  print_row("Benchmark duration (s):", d);
  print_row("Total input tokens:", sum.input);
  print_row("Total generated tokens:", sum.output);
  print_row("Request throughput (req/s):", static_cast<double>(sum.completed) / d);
  print_row("Output token throughput (tok/s):", static_cast<double>(sum.output) / d);
  print_row("Peak output token throughput (tok/s):", static_cast<double>(peak_rate(timings)));
  print_row("Total token throughput (tok/s):", static_cast<double>(sum.input + sum.output) / d);
  print_group("---------------Time to First Token----------------", "TTFT", ttft);
  print_group("-----Time per Output Token (excl. 1st token)------", "TPOT", tpot);
  print_group("---------------Inter-token Latency----------------", "ITL", itl);
  fmt::print("==================================================\n");
  if (!sum.first_error.empty()) fmt::print(stderr, "first failure: {}\n", sum.first_error);
  Json figures;
  figures.set("completed", sum.completed);
  figures.set("failed", sum.failed);
  figures.set("duration_s", d);
  figures.set("input_tokens", sum.input);
  figures.set("output_tokens", sum.output);
  figures.set("request_throughput", static_cast<double>(sum.completed) / d);
  figures.set("output_throughput", static_cast<double>(sum.output) / d);
  figures.set("ttft", group_json(ttft));
  figures.set("tpot", group_json(tpot));
  figures.set("itl", group_json(itl));
  return figures;
}

Result<int> bench_serve(const std::vector<std::string>& words) {
  CommandLine flags("perigee bench serve", "Loads a running server; prints throughput and latencies.");
  Target target;
  int64_t count = 64, input = 512;
  int32_t output = 128;
  int concurrency = 16;
  double rate = 0;
  add_target_flags(flags, target);
  flags.add("--num-prompts", count, Whole{1, 1 << 20}, "requests");
  flags.add("--max-concurrency", concurrency, Whole{1, 4096}, "requests under way at once");
  flags.add("--request-rate", rate, Number{0, 1e6}, "requests started a second; 0: as fast as the concurrency allows");
  flags.add("--random-input-len", input, Whole{1, 1 << 22}, "prompt tokens");
  flags.add("--random-output-len", output, Whole{1, 1 << 20}, "output tokens");
  RETURN_IF_ERROR(read(flags, words, target));
  const auto requests = random_prompts(count, input, output, target.vocab, target.seed);
  const auto timings = run_load(target.endpoint, target.model, requests, concurrency, rate);
  const Json figures = print_serving_block(timings);
  RETURN_IF_ERROR(save_result(target.result_path, figures));
  return figures.find("failed")->as_int() == 0 ? 0 : 1;
}

// Output tokens a second while all streams decode: from the moment the last stream has its first token to the moment
// the first stream ends.
double decode_rate(const std::vector<RequestTiming>& timings) {
  double begin = 0, end = 1e300;
  for (const RequestTiming& t : timings) {
    if (!t.ok) return 0;
    begin = std::max(begin, t.first_s);
    end = std::min(end, t.last_s);
  }
  if (end <= begin) return 0;
  int64_t tokens = 0;
  for (const RequestTiming& t : timings) {
    double at = t.first_s;
    for (size_t i = 0; i < t.gaps_s.size(); ++i) {
      at += t.gaps_s[i];
      if (at > begin && at <= end) tokens += t.tokens_after[i];
    }
  }
  return static_cast<double>(tokens) / (end - begin);
}

// What a decode matrix is measured with.
struct DecodeMatrix {
  Target target;
  std::vector<int64_t> contexts = {1024, 4096}, concurrencies = {1, 4, 16};
  int32_t output = 128;
  bool same_prompt = false;
  uint64_t seed = 0;  // of the next prompts
};

std::vector<LoadRequest> prompts_of(DecodeMatrix& matrix, int64_t count, int64_t context) {
  auto requests = random_prompts(count, context, matrix.output, matrix.target.vocab, ++matrix.seed);
  if (!matrix.same_prompt) return requests;
  --matrix.seed;  // until the context's last cell
  for (LoadRequest& request : requests) request.prompt = requests[0].prompt;
  return requests;
}

Acceptance ask_acceptance(const HttpEndpoint& endpoint) {
  HttpClient client(endpoint);
  const auto reply = client.get("/metrics");
  return reply.ok() ? read_acceptance(reply->body) : Acceptance();
}

// Brings the prompt of a context's cells into the cache. Prompt tokens a second up to the first output; 0: refused.
double scout(DecodeMatrix& matrix, int64_t context) {
  LoadRequest request = prompts_of(matrix, 1, context)[0];
  request.max_tokens = 1;
  HttpClient client(matrix.target.endpoint);
  const RequestTiming t = run_request(client, matrix.target.model, request);
  return t.ok ? static_cast<double>(context) / t.ttft_s() : 0;
}

// Prints the row of one context; `why` becomes the reason of the first cell without a figure.
Json print_decode_row(DecodeMatrix& matrix, int64_t context, std::string& why) {
  fmt::print("| {} |", context);
  Json row;
  for (const int64_t c : matrix.concurrencies) {
    const auto timings =
        run_load(matrix.target.endpoint, matrix.target.model, prompts_of(matrix, c, context), static_cast<int>(c), 0);
    const double rate = decode_rate(timings);
    fmt::print("{}", rate > 0 ? fmt::format(" {:.1f} |", rate) : " - |");
    std::fflush(stdout);
    row.set(std::to_string(c), rate);
    if (why.empty() && rate <= 0) why = total(timings).first_error;
    if (why.empty() && rate <= 0)
      why = fmt::format(
          "{} streams never decoded all at once: longer --output-len, or a server with more --max-num-seqs", c);
  }
  fmt::print("\n");
  return row;
}

Result<int> bench_decode(const std::vector<std::string>& words) {
  CommandLine flags("perigee bench decode", "Decode matrix: tokens/s by context and concurrency.");
  DecodeMatrix matrix;
  add_target_flags(flags, matrix.target);
  flags.add("--contexts", matrix.contexts, Counts(), "prompt lengths in tokens");
  flags.add("--concurrencies", matrix.concurrencies, Counts(), "streams that decode together");
  flags.add("--output-len", matrix.output, Whole{2, 1 << 20}, "tokens of each stream");
  flags.add_switch("--same-prompt", matrix.same_prompt,
                   "all streams of a context have one prompt, which a request ahead of them brings into the prefix "
                   "cache; also prints the prefill table of these requests");
  RETURN_IF_ERROR(read(flags, words, matrix.target));
  matrix.seed = matrix.target.seed;
  fmt::print("Decode, aggregate tok/s ({}, {} output tokens)\n| context |",
             matrix.same_prompt ? "one cached prompt" : "distinct prompts", matrix.output);
  for (const int64_t c : matrix.concurrencies) fmt::print(" C={} |", c);
  fmt::print("\n|---|");
  for (size_t i = 0; i < matrix.concurrencies.size(); ++i) fmt::print("---|");
  fmt::print("\n");
  Json figures;
  const Acceptance before = ask_acceptance(matrix.target.endpoint);
  std::vector<double> prefill;
  std::string why;
  for (const int64_t context : matrix.contexts) {
    if (matrix.same_prompt) prefill.push_back(scout(matrix, context));
    figures.set(std::to_string(context), print_decode_row(matrix, context, why));
    if (matrix.same_prompt) ++matrix.seed;
  }
  if (const std::string drafts = acceptance_text(before, ask_acceptance(matrix.target.endpoint)); !drafts.empty()) {
    fmt::print("\n{}; the prompts are random: not what a text gives\n", drafts);
    figures.set("drafts", drafts);
  }
  if (!prefill.empty()) {
    fmt::print("\nPrefill, one stream, nothing cached\n| prompt tokens | tok/s |\n|---|---|\n");
    Json rates;
    for (size_t i = 0; i < prefill.size(); ++i) {
      fmt::print("| {} | {} |\n", matrix.contexts[i], prefill[i] > 0 ? fmt::format("{:.0f}", prefill[i]) : "-");
      rates.set(std::to_string(matrix.contexts[i]), prefill[i]);
    }
    figures.set("prefill", std::move(rates));
  }
  if (!why.empty()) fmt::print(stderr, "perigee bench decode: no figure (-): {}\n", why);
  RETURN_IF_ERROR(save_result(matrix.target.result_path, figures));
  return why.empty() ? 0 : 1;
}

Result<int> bench_prefill(const std::vector<std::string>& words) {
  CommandLine flags("perigee bench prefill", "Prefill table: prompt tokens/s and time to first token, one stream.");
  Target target;
  std::vector<int64_t> lengths = {512, 2048, 8192};
  int repeats = 3;
  add_target_flags(flags, target);
  flags.add("--lengths", lengths, Counts(), "prompt lengths in tokens");
  flags.add("--repeats", repeats, Whole{1, 1000}, "runs of each; the median counts");
  RETURN_IF_ERROR(read(flags, words, target));
  fmt::print("Prefill, one stream, nothing cached (median of {})\n| prompt tokens | tok/s | TTFT ms |\n|---|---|---|\n",
             repeats);
  Json figures;
  uint64_t seed = target.seed << 20;
  HttpClient client(target.endpoint);
  for (const int64_t length : lengths) {
    std::vector<double> ttft;
    for (int i = 0; i < repeats; ++i) {
      const RequestTiming t = run_request(client, target.model, random_prompts(1, length, 1, target.vocab, ++seed)[0]);
      if (!t.ok) return Error(Code::kUnavailable, t.error);
      ttft.push_back(t.ttft_s());
    }
    const double median = summarise(ttft).median;
    fmt::print("| {} | {:.0f} | {:.1f} |\n", length, static_cast<double>(length) / median, median * 1e3);
    figures.set(std::to_string(length), static_cast<double>(length) / median);
  }
  RETURN_IF_ERROR(save_result(target.result_path, figures));
  return 0;
}

}  // namespace

int run_bench(const std::vector<std::string>& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1), arguments.end());
  if (what == "--help" || what == "-h")
    return std::fputs("perigee bench serve | decode | prefill | step | context; each has its own --help\n", stdout) < 0;
  Result<int> outcome = bad_input(fmt::format("bench what? serve, decode, prefill, step or context, not \"{}\"", what));
  if (what == "serve") outcome = bench_serve(rest);
  if (what == "decode") outcome = bench_decode(rest);
  if (what == "prefill") outcome = bench_prefill(rest);
  if (what == "step") outcome = bench_step(rest);
  if (what == "context") outcome = bench_context(rest);
  return outcome.ok() ? *outcome : print_refusal("perigee bench", outcome.error());
}

}  // namespace perigee
