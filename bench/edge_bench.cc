// edge_bench [FOLDER] [MAX_MODEL_LEN]: processor time that refused requests cost, from a body in memory to the reply.
// edge_bench --list: name and path of each request, one a line. edge_bench --body INDEX: its body.
//
// FOLDER has a tokenizer (default models/tiny-k2). Each request is sent three times; the least counts.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "base/log.h"
#include "server/app.h"
#include "server/direct_exchange.h"
#include "server/fake_backend.h"
#include "server/hostile_requests.h"

namespace perigee {
namespace {

constexpr size_t kBodyBytes = 30u << 20;

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

int run(const std::string& folder, int64_t max_model_len) {
  const auto text = ModelText::load(folder);
  if (!text.ok()) return std::fprintf(stderr, "%s\n", text.error().message.c_str()), 1;
  FakeOptions options;
  options.reply = [](const std::vector<int32_t>&) { return std::vector<int32_t>{1}; };
  options.vocab = (*text)->tokenizer()->vocab_size();
  options.max_model_len = max_model_len;
  AppConfig config;
  config.served_names = {"model"};
  App app(config, *text);
  app.set_ready(std::make_shared<FakeBackend>(options));
  std::printf("%s, context %lld, longest token %zu bytes\n%-40s %8s %8s %7s\n", folder.c_str(),
              static_cast<long long>(max_model_len), (*text)->tokenizer()->longest_token_bytes(), "request", "MB",
              "CPU ms", "status");
  double worst_ms = 0;
  for (const HostileRequest& hostile : hostile_requests(kBodyBytes)) {
    double least_ms = 1e9;
    const std::string body = hostile.body();
    int status = 0;
    for (int i = 0; i < 3; ++i) {
      HttpRequest request = post_request(hostile.path, body);
      const auto exchange = std::make_shared<DirectExchange>();
      const double begin_ms = cpu_ms();
      app.handle(exchange, std::move(request));
      if (!exchange->run_until_answered()) return 1;
      least_ms = std::min(least_ms, cpu_ms() - begin_ms);
      status = exchange->reply->status;
    }
    std::printf("%-40s %8.1f %8.2f %7d\n", hostile.name, static_cast<double>(body.size()) * 1e-6, least_ms, status);
    worst_ms = std::max(worst_ms, least_ms);
  }
  std::printf("worst: %.2f ms\n", worst_ms);
  return 0;
}

int list() {
  for (const HostileRequest& hostile : hostile_requests(kBodyBytes))
    std::printf("%s\t%s\n", hostile.name, hostile.path);
  return 0;
}

int print_body(size_t index) {
  const std::vector<HostileRequest> all = hostile_requests(kBodyBytes);
  if (index >= all.size()) return 2;
  const std::string body = all[index].body();
  return std::fwrite(body.data(), 1, body.size(), stdout) == body.size() ? 0 : 1;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (first == "--list") return perigee::list();
  if (first == "--body" && argc > 2) return perigee::print_body(std::strtoul(argv[2], nullptr, 10));
  perigee::set_log_level(perigee::LogLevel::kError);
  return perigee::run(argc > 1 ? argv[1] : "models/tiny-k2", argc > 2 ? std::atoll(argv[2]) : 4096);
}
