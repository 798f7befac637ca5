// pd_sim: runs simulations of several nodes by seed.
//
//   pd_sim --seed 17         one seed, with a trace of its end if it fails
//   pd_sim --seeds 1000      seeds 0 ... 999;  --seeds 500..900: that range
//   pd_sim --jobs 2          in so many processes
//   pd_sim --replay          runs each seed twice and compares what happened

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "base/log.h"
#include "sim/pd/simulation.h"
#include "sim/seeds.h"

namespace perigee::sim {
namespace {

struct Options {
  Seeds seeds{.end = 100};
  int jobs = 1;
  bool replay = false, trace = false;
};

// What a run of 200 seeds or more must have seen, each at least once.
constexpr const char* kMustHappen[] = {"a segment corrupted",
                                       "a segment repeated",
                                       "a segment overtaken",
                                       "a slow segment",
                                       "a connection cut",
                                       "a connection refused",
                                       "a connection timed out",
                                       "a segment held up by a partition",
                                       "a peer was silent too long",
                                       "a process ended",
                                       "a process died",
                                       "a process died unheard",
                                       "a process stopped",
                                       "a partition",
                                       "an HTTP connection cut",
                                       "a client left a stream",
                                       "a client left before its reply",
                                       "a lie about a lease",
                                       "a lease granted",
                                       "a lease granted without a checkpoint",
                                       "a lease announced",
                                       "a lease grown",
                                       "a lease whole",
                                       "a lease withdrawn",
                                       "a lease failed",
                                       "a lease read while it grows",
                                       "a lease given back",
                                       "a lease released",
                                       "a lease expired",
                                       "a lease ended",
                                       "a read refused",
                                       "an import posted",
                                       "an import after a hit",
                                       "an import that needs nothing",
                                       "an import arrived",
                                       "an import withdrawn",
                                       "an import dropped",
                                       "an import failed and is computed",
                                       "an import failed its request",
                                       "an import ended after its sequence",
                                       "a cancel",
                                       "a cancel while bytes are on their way",
                                       "a deadline passed",
                                       "a preemption",
                                       "a prefix hit",
                                       "a start from a tail",
                                       "a tail given up",
                                       "an import arrived without a checkpoint",
                                       "a request refused for its lease",
                                       "a request with a lease refused for want of room",
                                       "the router: a worker was silent",
                                       "a client: whole reply",
                                       "a client: an error"};

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--replay") {
      options.replay = true;
    } else if (flag == "--trace") {
      options.trace = true;
    } else if (flag == "--seed") {
      options.seeds.first = std::strtoull(value, nullptr, 10);
      options.seeds.end = options.seeds.first + 1;
      options.trace = true;
      ++i;
    } else if (flag == "--seeds") {
      if (!parse_seeds(value, options.seeds)) return false;
      ++i;
    } else if (flag == "--jobs") {
      options.jobs = std::atoi(value);
      if (options.jobs < 1 || options.jobs > 256) return false;
      ++i;
    } else {
      return false;
    }
  }
  return true;
}

using Happened = std::map<std::string, int64_t>;

void run_seed(const Options& options, uint64_t seed, Happened& happened, uint64_t& hash) {
  uint64_t first = 0;
  {
    PdSimulation simulation(seed, options.trace);
    for (const auto& [what, times] : simulation.run()) happened[what] += times;
    first = simulation.hash();
  }
  hash += mix64(first + seed);
  if (!options.replay) return;
  PdSimulation again(seed, options.trace);
  (void)again.run();
  if (again.hash() == first) return;
  std::printf("FAILED seed %llu: a replay differs\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::_Exit(1);
}

// One process of several; `at` says to the parent which seed it is at, should it end otherwise.
[[noreturn]] void run_job(const Options& options, int job, int out, volatile uint64_t* at) {
  Happened happened;
  uint64_t hash = 0;
  for (uint64_t seed = options.seeds.first + static_cast<uint64_t>(job); seed < options.seeds.end;
       seed += static_cast<uint64_t>(options.jobs)) {
    *at = seed;
    run_seed(options, seed, happened, hash);
  }
  FILE* lines = fdopen(out, "w");
  std::fprintf(lines, "%llu hash\n", static_cast<unsigned long long>(hash));
  for (const auto& [what, times] : happened)
    std::fprintf(lines, "%lld %s\n", static_cast<long long>(times), what.c_str());
  std::fclose(lines);
  std::_Exit(0);
}

int run(const Options& options) {
  set_log_level(options.trace && std::getenv("PD_SIM_LOG") != nullptr ? LogLevel::kInfo : LogLevel::kError);
  auto* at = static_cast<volatile uint64_t*>(mmap(nullptr, sizeof(uint64_t) * static_cast<size_t>(options.jobs),
                                                  PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<std::pair<pid_t, FILE*>> children;
  std::fflush(stdout);
  for (int job = 0; job < options.jobs; ++job) {
    int out[2];
    if (pipe(out) != 0) return 1;
    const pid_t child = fork();
    if (child == 0) run_job(options, job, out[1], at + job);
    close(out[1]);
    children.emplace_back(child, fdopen(out[0], "r"));
  }
  Happened happened;
  uint64_t hash = 0;
  int failures = 0;
  for (size_t job = 0; job < children.size(); ++job) {
    const auto [child, lines] = children[job];
    char line[256];
    while (std::fgets(line, sizeof line, lines) != nullptr) {
      char* rest = nullptr;
      const uint64_t times = std::strtoull(line, &rest, 10);
      const std::string what(rest + 1, std::strlen(rest + 1) - 1);
      if (what == "hash")
        hash += times;
      else
        happened[what] += static_cast<int64_t>(times);
    }
    std::fclose(lines);
    int status = 0;
    waitpid(child, &status, 0);
    if (status == 0) continue;
    ++failures;
    const auto seed = static_cast<unsigned long long>(at[job]);
    std::printf("FAILED in seed %llu: pd_sim --seed %llu shows what led to it\n", seed, seed);
  }
  if (failures > 0) return 1;
  std::printf("P/D seeds %llu..%llu, log %016llx:", static_cast<unsigned long long>(options.seeds.first),
              static_cast<unsigned long long>(options.seeds.end - 1), static_cast<unsigned long long>(hash));
  const char* between = " ";
  for (const auto& [what, times] : happened)
    std::printf("%s%lld x %s", std::exchange(between, "; "), static_cast<long long>(times), what.c_str());
  std::printf("\n");
  if (options.seeds.end - options.seeds.first < 200) return 0;
  for (const char* what : kMustHappen) {
    if (happened[what] > 0) continue;
    std::printf("FAILED: never happened: %s\n", what);
    ++failures;
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perigee::sim

int main(int argc, char** argv) {
  perigee::sim::Options options;
  if (!perigee::sim::parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: pd_sim [--seed N | --seeds N | --seeds A..B] [--jobs N] [--replay] [--trace]\n");
    return 2;
  }
  return perigee::sim::run(options);
}
