// What the equality suites share that ask the bundled models questions: the jobs, and the comparison of two runs of
// them up to the tie rule of DESIGN D10.
#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "harness.h"
#include "text/tokenizer.h"

namespace perigee {

// Held-out questions in the form the model was trained on; five shots at random, so prompts share only their
// beginnings.
inline std::vector<Job> task_jobs(const TestModel& model, const Engine& engine, size_t count,
                                  const char* tasks = "gsm_5shot_a") {
  const auto tokenizer = Tokenizer::load(model.folder);
  CHECK(tokenizer.ok(), tokenizer.error().message);
  std::ifstream file(fmt::format("tests/data/tiny_tasks/{}.jsonl", tasks));
  std::vector<Job> jobs;
  for (std::string line; jobs.size() < count && std::getline(file, line);) {
    const auto row = parse_json(line);
    CHECK(row.ok(), row.error().message);
    jobs.push_back({.prompt = (*tokenizer)->encode(row->find("prompt")->as_string(), SpecialsIn::kRecognised),
                    .max_tokens = 48,
                    .stop_ids = engine.model().eos_ids,
                    .cache_salt = std::to_string(jobs.size())});
  }
  CHECK(jobs.size() == count);
  return jobs;
}

inline size_t num_jobs(size_t usually, size_t in_a_soak) {
  return soak_requested() ? in_a_soak : usually;
}

struct Tally {
  size_t tokens = 0, after_ties = 0, flips = 0;
  float most_apart = 0;
};

// Compares two runs of the jobs. A reply that leaves the other one at a tie goes on from there as `reference` does when
// it is given the same beginning. Of the replies at most one in four may do that: more would be no ties.
inline Tally compare(Engine& reference, std::vector<Job> jobs, std::vector<Reply> whole, std::vector<Reply> other) {
  Tally tally;
  const size_t most_flips = jobs.size() / 4;
  for (int round = 0; !jobs.empty(); ++round) {
    std::vector<Job> rest;
    std::vector<Reply> rest_of_other;
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE(fmt::format("job {} of round {}", i, round));
      const Likeness likeness = compare_greedy(whole[i], other[i]);
      (round == 0 ? tally.tokens : tally.after_ties) += likeness.tokens;
      tally.most_apart = std::max(tally.most_apart, likeness.most_apart);
      if (!likeness.parts) continue;
      ++tally.flips;
      const auto taken = static_cast<std::ptrdiff_t>(likeness.tokens) + 1;
      if (taken == std::ssize(other[i].ids)) continue;
      rest.push_back(jobs[i]);
      rest.back().prompt.insert(rest.back().prompt.end(), other[i].ids.begin(), other[i].ids.begin() + taken);
      rest.back().max_tokens -= static_cast<int32_t>(taken);
      rest_of_other.emplace_back();
      rest_of_other.back().ids.assign(other[i].ids.begin() + taken, other[i].ids.end());
      rest_of_other.back().logprobs.assign(other[i].logprobs.begin() + taken, other[i].logprobs.end());
    }
    jobs = std::move(rest);
    other = std::move(rest_of_other);
    if (!jobs.empty()) whole = run(reference, jobs, true);
  }
  EXPECT_LE(tally.flips, most_flips);
  return tally;
}

inline void print(const char* what, const std::vector<Job>& jobs, const Tally& tally) {
  std::printf("%s: %zu requests, %zu tokens, at most %.2g apart; %zu flips at ties, %zu tokens after them\n", what,
              jobs.size(), tally.tokens, static_cast<double>(tally.most_apart), tally.flips, tally.after_ties);
}

}  // namespace perigee
