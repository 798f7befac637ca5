// `perigee bench serve | decode | prefill`: loads a running server and prints the tables people compare; `bench step`
// is step_bench.cc.
#include <algorithm>
#include <cstdio>
#include <map>

#include "base/clock.h"
#include "main/commands.h"
#include "main/load.h"
#include "main/options.h"
#include "main/result_file.h"
#include "main/step_bench.h"

namespace perigee {
namespace {

int fail(const Error& error) {
  const bool help = error.code == Code::kCancelled;
  std::fprintf(help ? stdout : stderr, "%s%s\n", help ? "" : "perigee bench: ", error.message.c_str());
  return help ? 0 : 2;
}

struct Target {
  HttpEndpoint endpoint;
  ServerFacts facts;
  int32_t vocab = 0;
  uint64_t seed = 0;
};

void add_target_options(Options& options) {
  options.add("host", "127.0.0.1", "server address");
  options.add("port", "8000", "server port");
  options.add("api-key", "", "key that the server wants");
  options.add("model", "", "model name; empty: the first the server lists");
  options.add("vocab", "2048", "prompts are random token ids below this");
  options.add("seed", "1", "seed of the prompts");
  add_result_option(options);
}

Result<Target> make_target(const Options& options) {
  RETURN_IF_ERROR(check_result_file(options));
  Target target;
  target.endpoint = {.host = options.text("host"), .port = options.text("port"), .api_key = options.text("api-key")};
  ASSIGN_OR_RETURN(target.facts, ask_server(target.endpoint));
  if (!options.text("model").empty()) target.facts.model = options.text("model");
  ASSIGN_OR_RETURN(const int64_t vocab, options.integer("vocab", 2, 1 << 20));
  ASSIGN_OR_RETURN(const int64_t seed, options.integer("seed", 0, INT64_MAX));
  target.vocab = static_cast<int32_t>(vocab);
  target.seed = static_cast<uint64_t>(seed);
  return target;
}

Result<std::vector<int64_t>> parse_sizes(const Options& options, const std::string& name) {
  std::vector<int64_t> sizes;
  std::string item;
  for (const char c : options.text(name) + ",") {
    if (c != ',') {
      item += c;
      continue;
    }
    const bool digits = !item.empty() && item.size() < 9 && item.find_first_not_of("0123456789") == std::string::npos;
    if (!digits)
      return bad_input(str_cat("--", name, " must be numbers with commas between, not \"", item, "\""), name);
    sizes.push_back(std::stoll(item));
    if (sizes.back() == 0) return bad_input(str_cat("--", name, " must be numbers from 1 on, not 0"), name);
    item.clear();
  }
  return sizes;
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

void print_group(const char* title, const char* name, const Summary& s) {
  std::printf("%s\n", title);
  std::printf("%-40s %-10.2f\n", str_cat("Mean ", name, " (ms):").c_str(), s.mean);
  std::printf("%-40s %-10.2f\n", str_cat("Median ", name, " (ms):").c_str(), s.median);
  std::printf("%-40s %-10.2f\n", str_cat("P99 ", name, " (ms):").c_str(), s.p99);
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
  std::printf("============ Serving Benchmark Result ============\n");
  std::printf("%-40s %-10lld\n", "Successful requests:", static_cast<long long>(sum.completed));
  std::printf("%-40s %-10lld\n", "Failed requests:", static_cast<long long>(sum.failed));
  std::printf("%-40s %-10.2f\n", "Benchmark duration (s):", d);
  std::printf("%-40s %-10lld\n", "Total input tokens:", static_cast<long long>(sum.input));
  std::printf("%-40s %-10lld\n", "Total generated tokens:", static_cast<long long>(sum.output));
  std::printf("%-40s %-10.2f\n", "Request throughput (req/s):", static_cast<double>(sum.completed) / d);
  std::printf("%-40s %-10.2f\n", "Output token throughput (tok/s):", static_cast<double>(sum.output) / d);
  std::printf("%-40s %-10.2f\n", "Peak output token throughput (tok/s):", static_cast<double>(peak_rate(timings)));
  std::printf("%-40s %-10.2f\n", "Total token throughput (tok/s):", static_cast<double>(sum.input + sum.output) / d);
  print_group("---------------Time to First Token----------------", "TTFT", ttft);
  print_group("-----Time per Output Token (excl. 1st token)------", "TPOT", tpot);
  print_group("---------------Inter-token Latency----------------", "ITL", itl);
  std::printf("==================================================\n");
  if (!sum.first_error.empty()) std::fprintf(stderr, "first failure: %s\n", sum.first_error.c_str());
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

Result<int> bench_serve(const std::vector<std::string>& arguments) {
  Options options("perigee bench serve", "Loads a running server; prints throughput and latencies.");
  add_target_options(options);
  options.add("num-prompts", "64", "requests");
  options.add("max-concurrency", "16", "requests under way at once");
  options.add("request-rate", "0", "requests started a second; 0: as fast as the concurrency allows");
  options.add("random-input-len", "512", "prompt tokens");
  options.add("random-output-len", "128", "output tokens");
  RETURN_IF_ERROR(options.parse(arguments));
  ASSIGN_OR_RETURN(const Target target, make_target(options));
  ASSIGN_OR_RETURN(const int64_t count, options.integer("num-prompts", 1, 1 << 20));
  ASSIGN_OR_RETURN(const int64_t concurrency, options.integer("max-concurrency", 1, 4096));
  ASSIGN_OR_RETURN(const double rate, options.number("request-rate", 0, 1e6));
  ASSIGN_OR_RETURN(const int64_t input, options.integer("random-input-len", 1, 1 << 22));
  ASSIGN_OR_RETURN(const int64_t output, options.integer("random-output-len", 1, 1 << 20));
  const auto requests = random_prompts(count, input, static_cast<int32_t>(output), target.vocab, target.seed);
  const auto timings = run_load(target.endpoint, target.facts.model, requests, static_cast<int>(concurrency), rate);
  const Json figures = print_serving_block(timings);
  RETURN_IF_ERROR(save_result(options, figures));
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
  int64_t chunks = 0;
  for (const RequestTiming& t : timings) {
    double at = t.first_s;
    for (const double gap : t.gaps_s) {
      at += gap;
      chunks += at > begin && at <= end;
    }
  }
  return static_cast<double>(chunks) / (end - begin);
}

Result<int> bench_decode(const std::vector<std::string>& arguments) {
  Options options("perigee bench decode", "Decode matrix: tokens/s by context and concurrency, distinct prompts.");
  add_target_options(options);
  options.add("contexts", "1024,4096", "prompt lengths in tokens");
  options.add("concurrencies", "1,4,16", "streams that decode together");
  options.add("output-len", "128", "tokens of each stream");
  RETURN_IF_ERROR(options.parse(arguments));
  ASSIGN_OR_RETURN(const Target target, make_target(options));
  ASSIGN_OR_RETURN(const auto contexts, parse_sizes(options, "contexts"));
  ASSIGN_OR_RETURN(const auto concurrencies, parse_sizes(options, "concurrencies"));
  ASSIGN_OR_RETURN(const int64_t output, options.integer("output-len", 2, 1 << 20));
  std::printf("Decode, aggregate tok/s (distinct prompts, %lld output tokens)\n| context |",
              static_cast<long long>(output));
  for (const int64_t c : concurrencies) std::printf(" C=%lld |", static_cast<long long>(c));
  std::printf("\n|---|");
  for (size_t i = 0; i < concurrencies.size(); ++i) std::printf("---|");
  std::printf("\n");
  Json figures;
  std::string why;  // of the first cell without a figure
  uint64_t seed = target.seed;
  for (const int64_t context : contexts) {
    std::printf("| %lld |", static_cast<long long>(context));
    Json row;
    for (const int64_t c : concurrencies) {
      const auto requests = random_prompts(c, context, static_cast<int32_t>(output), target.vocab, ++seed);
      const auto timings = run_load(target.endpoint, target.facts.model, requests, static_cast<int>(c), 0);
      const double rate = decode_rate(timings);
      std::printf(rate > 0 ? " %.1f |" : " - |", rate);
      std::fflush(stdout);
      row.set(std::to_string(c), rate);
      if (why.empty() && rate <= 0) why = total(timings).first_error;
      if (why.empty() && rate <= 0)
        why =
            str_cat(c, " streams never decoded all at once: longer --output-len, or a server with more --max-num-seqs");
    }
    std::printf("\n");
    figures.set(std::to_string(context), std::move(row));
  }
  if (!why.empty()) std::fprintf(stderr, "perigee bench decode: no figure (-): %s\n", why.c_str());
  RETURN_IF_ERROR(save_result(options, figures));
  return why.empty() ? 0 : 1;
}

Result<int> bench_prefill(const std::vector<std::string>& arguments) {
  Options options("perigee bench prefill", "Prefill table: prompt tokens/s and time to first token, one stream.");
  add_target_options(options);
  options.add("lengths", "512,2048,8192", "prompt lengths in tokens");
  options.add("repeats", "3", "runs of each; the median counts");
  RETURN_IF_ERROR(options.parse(arguments));
  ASSIGN_OR_RETURN(const Target target, make_target(options));
  ASSIGN_OR_RETURN(const auto lengths, parse_sizes(options, "lengths"));
  ASSIGN_OR_RETURN(const int64_t repeats, options.integer("repeats", 1, 1000));
  std::printf(
      "Prefill, one stream, nothing cached (median of %lld)\n| prompt tokens | tok/s | TTFT ms |\n|---|---|---|\n",
      static_cast<long long>(repeats));
  Json figures;
  uint64_t seed = target.seed << 20;
  HttpClient client(target.endpoint);
  for (const int64_t length : lengths) {
    std::vector<double> ttft;
    for (int64_t i = 0; i < repeats; ++i) {
      const RequestTiming t =
          run_request(client, target.facts.model, random_prompts(1, length, 1, target.vocab, ++seed)[0]);
      if (!t.ok) return Error(Code::kUnavailable, t.error);
      ttft.push_back(t.ttft_s());
    }
    const double median = summarise(ttft).median;
    std::printf("| %lld | %.0f | %.1f |\n", static_cast<long long>(length), static_cast<double>(length) / median,
                median * 1e3);
    figures.set(std::to_string(length), static_cast<double>(length) / median);
  }
  RETURN_IF_ERROR(save_result(options, figures));
  return 0;
}

}  // namespace

int run_bench(const std::vector<std::string>& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1), arguments.end());
  if (what == "--help" || what == "-h")
    return std::fputs("perigee bench serve | decode | prefill | step; each has its own --help\n", stdout) < 0;
  Result<int> outcome = bad_input(str_cat("bench what? serve, decode, prefill or step, not \"", what, "\""));
  if (what == "serve") outcome = bench_serve(rest);
  if (what == "decode") outcome = bench_decode(rest);
  if (what == "prefill") outcome = bench_prefill(rest);
  if (what == "step") outcome = bench_step(rest);
  return outcome.ok() ? *outcome : fail(outcome.error());
}

}  // namespace perigee
