// sim: runs simulations by seed.
//
//   sim --seed 17            one seed
//   sim --seeds 2000         seeds 0 ... 1999;  --seeds 500..900: that range
//   sim --ranks 2            as many ranks execute each plan;  --drafts 3: rows verify as many drafts at most
//   sim --dcp 8              each seed has a dcp size of 1, 2, 4 or 8
//   sim --replay             runs each seed twice and compares the event logs' hashes
//   sim --mutant 3           plants bug 3 and succeeds when one of 300 seeds or more catches it; 0 plants none
//   sim --all-mutants        does so for each
//   sim --list-mutants

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "control/faults.h"
#include "sim/seeds.h"
#include "sim/simulation.h"

namespace perigee::sim {
namespace {

constexpr uint64_t kSeedsPerMutant = 300;

struct Mutant {
  const char* name;
  const char* found;  // what the check says that is there for it; several are told apart by |
};
constexpr Mutant kMutants[kNumFaults] = {
    {"pages and slot of an ended sequence are free while plans in flight touch them", "under flight"},
    {"blocks are published when planned, not when confirmed",
     "has lost a page|is not what it gives alone|reads a page"},
    {"a hit does not compare token ids", "is twice in slot|is not what it gives alone|reads a page"},
    {"sequences share prefixes across salts", "reads a page of another salt"},
    {"the page of a block's first decoded token is missing", "has no page for position|writes outside its pages"},
    {"ids are delivered twice at a block's end", "is not what it gives alone|goes on after its end"},
    {"a sequence cancelled while it waits ends without an update", "did not end at once|known"},
    {"a hit may cover the whole prompt", "a hit of"},
    {"a preempted sequence keeps its former length", "row at"},
    {"ids of a late row are delivered after the end", "goes on after its end|an update for nobody"},
    {"a hit is as long as the cached blocks, wherever the last checkpoint lies", "and a checkpoint of 0 pages"},
    {"a checkpoint holds the state one token past its boundary", "a checkpoint at"},
    {"the pages of a checkpoint may be reused while a plan in flight copies them",
     "is copied from and given away|under flight"},
    {"a checkpoint and its blocks may be hit before the result of their step is in", "the checkpoint is at"},
    {"a block that is evicted leaves its checkpoint behind", "published and unknown|has lost its block"},
    {"a checkpoint of which one page was evicted is still hit", "is not whole|the checkpoint is at"},
    {"an ended sequence's state pages are free while plans in flight touch them", "under flight"},
    {"the worker does not zero the state of a sequence without a hit", "is not what it gives alone"},
    {"the worker commits the token of a decode row that is still in its ring", "is not what it gives alone"},
    {"the worker forgets its ring where a row should replay it", "is not what it gives alone"},
    {"the second checkpoint of a row is written at the position of its first", "a checkpoint at"},
    {"a row's last two checkpoints are listed in the wrong order", "a checkpoint at"},
    {"the waiting head's match keeps blocks that were evicted",
     "a free page is shared|reads a page|is not what it gives alone"},
    {"a head of the queue that does not fit is stepped over", "overtakes sequence"},
    {"a verify row confirms all its tokens, however many were accepted", "row at|has lost a plan"},
    {"a row after a verify row says that all drafts before it will be accepted", "row at"},
    {"a checkpoint is kept whether or not its row reached the boundary", "the checkpoint is at"},
    {"a verify row has pages for its first token only", "has no page for position|writes outside its pages"},
    {"the worker replays rejected tokens from its ring", "the state is at"},
    {"a result is joined before the last rank has run its step", "ranks disagree|reads a page|row at|but holds"},
    {"of a row that accepts all its drafts the last id is not delivered", "is not what it gives alone|ends at"},
    {"each place of a verify row has the mask of the place before", "is not what it gives alone|for another reason"},
    {"a row's masks are made before the result of the step before is in",
     "is not what it gives alone|for another reason|has masks of"},
    {"a constraint moves by a draft before its row has accepted it", "is not what it gives alone|for another reason"},
    {"the last masked row of a step has no masks", "is not what it gives alone|for another reason"},
};
constexpr int kFirstOfShape = 25;  // bugs from here on need several ranks and verify rows
constexpr Shape kMutantShape{.num_ranks = 2, .num_drafts = kMaxDrafts};

struct Options {
  Seeds seeds{.end = 200};
  bool replay = false, all_mutants = false, list = false;
  int mutant = 0;
  Shape shape;
};

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--replay") {
      options.replay = true;
    } else if (flag == "--all-mutants") {
      options.all_mutants = true;
    } else if (flag == "--list-mutants") {
      options.list = true;
    } else if (flag == "--seed") {
      options.seeds.first = std::strtoull(value, nullptr, 10);
      options.seeds.end = options.seeds.first + 1;
      ++i;
    } else if (flag == "--seeds") {
      if (!parse_seeds(value, options.seeds)) return false;
      ++i;
    } else if (flag == "--mutant") {
      options.mutant = std::atoi(value);
      if (options.mutant < 0 || options.mutant > kNumFaults) return false;
      ++i;
    } else if (flag == "--ranks" || flag == "--drafts" || flag == "--dcp") {
      Shape& shape = options.shape;
      (flag == "--ranks" ? shape.num_ranks : flag == "--drafts" ? shape.num_drafts : shape.max_dcp) = std::atoi(value);
      if (shape.num_ranks < 1 || shape.num_drafts < 0 || shape.num_drafts > kMaxDrafts) return false;
      if (shape.max_dcp < 1 || shape.max_dcp > kMaxDcpSize) return false;
      ++i;
    } else {
      return false;
    }
  }
  return true;
}

int check_rarity(const char* name, int64_t count, int64_t steps) {
  if (count * 100 >= steps) return 0;
  std::printf("FAILED: %s are rarer than 1 %% of steps\n", name);
  return 1;
}

// What several ranks, verify rows and constraints are there for did happen.
int check_shape(const Shape& shape, const Counts& counts) {
  const bool drafts =
      shape.num_drafts == 0 || (counts.all_accepted > 0 && counts.none_accepted > 0 && counts.unwritten > 0);
  const bool ranks = shape.num_ranks == 1 || (counts.late_ranks > 0 && counts.lost_ranks > 0);
  const bool dcp =
      shape.max_dcp == 1 || (counts.spilled > 0 && counts.spilled * 2 < counts.dealt && counts.dealt_in_turn > 0);
  const bool masks = counts.masks_missing > 0 && (shape.num_drafts == 0 || counts.masked_verify_rows > 0);
  if (!drafts || !ranks || !dcp || !masks)
    std::printf("FAILED: something that ranks, drafts and masks can do never happened\n");
  return drafts && ranks && dcp && masks ? 0 : 1;
}

int run_seeds(const Options& options) {
  Counts counts;
  for (uint64_t seed = options.seeds.first; seed < options.seeds.end; ++seed) {
    const Counts one = Simulation(seed, options.shape).run();
    if (options.replay && Simulation(seed, options.shape).run().log_hash != one.log_hash) {
      std::printf("FAILED seed %llu: a replay differs\n", static_cast<unsigned long long>(seed));
      return 1;
    }
    counts.add(one);
  }
  const auto n = [](int64_t value) { return static_cast<long long>(value); };
  std::printf(
      "seeds %llu..%llu: %lld steps, %lld requests, %lld ids, %lld preemptions (%lld resumed with a hit), "
      "%lld cancels in flight, %lld results reordered, %lld prefix hits, %lld deadlines, %lld errors; log %016llx\n",
      static_cast<unsigned long long>(options.seeds.first), static_cast<unsigned long long>(options.seeds.end - 1),
      n(counts.steps), n(counts.requests), n(counts.ids), n(counts.preemptions), n(counts.resumes_hit),
      n(counts.cancels_in_flight), n(counts.reordered), n(counts.hits), n(counts.expired), n(counts.errors),
      static_cast<unsigned long long>(counts.log_hash));
  std::printf(
      "recurrent: %lld steps, %lld checkpoints written, %lld rows with several, %lld hit (%lld while another plan "
      "copied them), %lld evicted, %lld skipped, %lld lost with their sequence\n"
      "fairness: at most %lld plans in a row for others that are served later\n",
      n(counts.hybrid_steps), n(counts.checkpoint_writes), n(counts.rows_of_several), n(counts.checkpoint_hits),
      n(counts.shared_copies), n(counts.checkpoint_evictions), n(counts.checkpoint_skips), n(counts.lost_writes),
      n(counts.most_overtaken));
  if (options.shape.num_drafts > 0 || options.shape.num_ranks > 1)
    std::printf(
        "%d ranks: late %lld times, lost %lld times; %lld verify rows, %lld accept all drafts, %lld none; "
        "%lld checkpoints not reached\n",
        options.shape.num_ranks, n(counts.late_ranks), n(counts.lost_ranks), n(counts.verify_rows),
        n(counts.all_accepted), n(counts.none_accepted), n(counts.unwritten));
  if (options.shape.max_dcp > 1)
    std::printf("dcp: %lld blocks dealt, %lld past an index that was full; %lld dealt in turn\n", n(counts.dealt),
                n(counts.spilled), n(counts.dealt_in_turn));
  std::printf("constraints: %lld masked rows, %lld of them verify drafts, %lld stopped before their masks were made\n",
              n(counts.masked_rows), n(counts.masked_verify_rows), n(counts.masks_missing));
  if (options.seeds.end - options.seeds.first < 200) return 0;
  return check_shape(options.shape, counts) | check_rarity("preemptions", counts.preemptions, counts.steps) |
         check_rarity("cancels in flight", counts.cancels_in_flight, counts.steps) |
         check_rarity("reordered results", counts.reordered, counts.steps) |
         check_rarity("hits", counts.hits, counts.steps) |
         check_rarity("checkpoint writes", counts.checkpoint_writes, counts.hybrid_steps) |
         check_rarity("rows with several checkpoints", counts.rows_of_several, counts.checkpoint_writes) |
         check_rarity("checkpoint hits", counts.checkpoint_hits, counts.hybrid_steps) |
         check_rarity("checkpoint evictions", counts.checkpoint_evictions, counts.hybrid_steps) |
         check_rarity("checkpoints skipped", counts.checkpoint_skips, counts.hybrid_steps);
}

// The last line that a child printed, which runs the seeds with this bug, and how it ended.
std::string run_child(const Options& options, int mutant, int& status) {
  int out[2];
  if (pipe(out) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    g_planted_fault = static_cast<Fault>(mutant);
    if (dup2(out[1], STDOUT_FILENO) < 0 || dup2(out[1], STDERR_FILENO) < 0) std::_Exit(0);
    const uint64_t end = std::max(options.seeds.end, options.seeds.first + kSeedsPerMutant);
    const Shape shape = mutant < kFirstOfShape ? options.shape : kMutantShape;
    for (uint64_t seed = options.seeds.first; seed < end; ++seed) Simulation(seed, shape).run();
    std::_Exit(0);
  }
  close(out[1]);
  std::string last, line;
  FILE* lines = fdopen(out[0], "r");
  for (int c = std::fgetc(lines); c != EOF; c = std::fgetc(lines)) {
    if (c != '\n') line += static_cast<char>(c);
    if (c == '\n' && !line.empty()) last = std::exchange(line, {});
  }
  std::fclose(lines);
  if (child < 0 || waitpid(child, &status, 0) != child) status = 0;
  return last;
}

bool says(const std::string& message, const std::string& found) {
  for (size_t begin = 0; begin <= found.size();) {
    const size_t end = std::min(found.find('|', begin), found.size());
    if (message.find(found.substr(begin, end - begin)) != std::string::npos) return true;
    begin = end + 1;
  }
  return false;
}

// A planted bug may end the process in a CHECK, so a child runs the seeds. Caught is what the judge or a CHECK found,
// in the words of a check that is there for it; a crash, or any other end, does not count.
int run_mutant(const Options& options, int mutant) {
  constexpr int kJudge = 1, kCheck = 70;  // exit codes
  std::printf("mutant %d (%s): ", mutant, kMutants[mutant - 1].name);
  std::fflush(stdout);
  int status = 0;
  const std::string last = run_child(options, mutant, status);
  const bool aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;  // CHECK under sanitizers
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : aborted ? kCheck : -1;
  const bool by_check = (code == kJudge && last.starts_with("FAILED seed")) ||
                        (code == kCheck && last.find("CHECK(") != std::string::npos);
  const bool caught = by_check && says(last, kMutants[mutant - 1].found);
  if (code != 0) std::printf("%s: ", last.c_str());
  std::printf("%s\n", caught ? "caught" : code == 0 ? "SURVIVED" : "ENDED OTHERWISE");
  return caught ? 0 : 1;
}

int run(const Options& options) {
  if (options.list) {
    for (int i = 0; i < kNumFaults; ++i) std::printf("%2d %s\n", i + 1, kMutants[i].name);
    return 0;
  }
  if (options.mutant > 0) return run_mutant(options, options.mutant);
  if (!options.all_mutants) return run_seeds(options);
  int failures = 0;
  for (int mutant = 1; mutant <= kNumFaults; ++mutant) failures += run_mutant(options, mutant);
  std::printf("%d of %d planted bugs caught\n", kNumFaults - failures, kNumFaults);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perigee::sim

int main(int argc, char** argv) {
  perigee::sim::Options options;
  if (!perigee::sim::parse(argc, argv, options)) {
    std::fprintf(
        stderr,
        "usage: sim [--seed N | --seeds N | --seeds A..B] [--ranks N] [--drafts K] [--dcp N] [--replay] [--mutant K | "
        "--all-mutants | "
        "--list-mutants]\n");
    return 2;
  }
  return perigee::sim::run(options);
}
