// grammar_bench FOLDER [SCHEMAS]: what constraints cost.
//
// FOLDER has a tokenizer. SCHEMAS has a JSON schema a line; without it one of each class is taken. For each: the
// milliseconds of its compilation; the microseconds that one mask takes in random replies under the masks (median, 99th
// percentile and maximum of the first replies of a grammar, then the mean, 99th percentile and maximum of later ones,
// which find places that were met before); and how many places those are. Of three runs.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <numeric>

#include "base/rng.h"
#include "grammar/grammar_compiler.h"

namespace perigee {
namespace {

double microseconds() {
  return 1e-3 * static_cast<double>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

// Whether it ended.
bool reply(const Tokenizer& tokenizer, const Constraint& constraint, int32_t end, int32_t budget, Rng& rng,
           std::vector<double>& times) {
  const auto state = constraint.begin();
  const int64_t words = (tokenizer.vocab_size() + 31) / 32;
  std::vector<uint32_t> mask(static_cast<size_t>(words));
  std::vector<int32_t> ids;
  for (int32_t left = budget; left > 0; --left) {
    const double began = microseconds();
    state->masks({}, left, words, mask.data());
    times.push_back(microseconds() - began);
    ids.clear();
    for (int64_t word = 0; word < words; ++word)
      for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1)
        ids.push_back(static_cast<int32_t>(word * 32) + __builtin_ctz(bits));
    if (ids.empty()) return false;
    const bool may_end = std::find(ids.begin(), ids.end(), end) != ids.end();
    const int32_t id = may_end && rng.below(4) == 0 ? end : ids[rng.below(ids.size())];
    if (!state->accept(id)) return false;
    if (id == end) return true;
  }
  return false;
}

struct Case {
  std::string name, schema;
};

std::string object_of(int members, const std::string& value) {
  std::string out = R"({"type":"object","properties":{)";
  for (int i = 0; i < members; ++i) out += fmt::format("{}\"property_{}\":{}", i > 0 ? "," : "", i, value);
  return out + "}}";
}

std::vector<Case> own_cases() {
  std::string nested = R"({"type":"integer"})", words;
  for (int i = 0; i < 25; ++i)
    nested = fmt::format(R"({{"type":"object","properties":{{"next":{}}},"required":["next"]}})", nested);
  for (int i = 0; i < 1000; ++i)
    words += fmt::format("{}\"value {} of a long list\"", i > 0 ? "," : "", i * 7919 % 1000);
  return {
      {"integer", R"({"type":"integer"})"},
      {"string", R"({"type":"string"})"},
      {"any object", R"({"type":"object"})"},
      {"3 members",
       R"({"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","minimum":1,"maximum":14},)"
       R"("unit":{"enum":["celsius","fahrenheit"]}},"required":["city"]})"},
      {"array, patterns",
       R"({"type":"array","items":{"type":"object","properties":{"id":{"type":"string","pattern":"^[a-z]{2,8}-[0-9]{4}$"},)"
       R"("tags":{"type":"array","items":{"type":"string"},"maxItems":5}},"required":["id","tags"]}})"},
      {"60 objects", object_of(60, R"({"type":"object","properties":{"name":{"type":"string","maxLength":40},)"
                                   R"("value":{"type":"number"}}})")},
      {"300 members", object_of(300, R"({"type":"string"})")},
      {"recursion", R"({"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"v":{"type":"string"},)"
                    R"("l":{"$ref":"#/$defs/n"},"r":{"anyOf":[{"$ref":"#/$defs/n"},{"type":"null"}]}}}}})"},
      {"25 levels", nested},
      {"enum of 1,000", R"({"enum":[)" + words + "]}"},
      {"long pattern",
       R"({"type":"string","pattern":"^([A-Z][a-z]{2,12} ){3,9}[0-9a-f]{8}-[0-9a-f]{4}(\\.[a-z]{1,20}){0,5}$"})"},
      {"maxLength 200", R"({"type":"array","items":{"type":"string","minLength":3,"maxLength":200}})"},
      {"set of strings", R"({"type":"array","items":{"type":"string"},"uniqueItems":true})"},
  };
}

constexpr int kReplies = 40, kRuns = 3;

double at(const std::vector<double>& sorted, size_t percent) {
  return sorted.empty() ? 0 : sorted[std::min(sorted.size() - 1, sorted.size() * percent / 100)];
}

int run(const std::string& folder, const char* file) {
  auto tokenizer = Tokenizer::load(folder);
  if (!tokenizer.ok()) return std::fprintf(stderr, "%s\n", tokenizer.error().message.c_str()), 1;
  const int32_t end = *(*tokenizer)->special_id("<|im_end|>");
  GrammarCompiler compiler(*tokenizer, {end});
  std::vector<Case> cases = own_cases();
  if (file != nullptr) {
    cases.clear();
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) cases.push_back({fmt::format("line {}", cases.size() + 1), line});
  }
  GrammarSpec first;  // the table of tokens is made by whoever is first
  (void)compiler.compile_now(first);
  std::printf("%-16s %7s %10s | %7s %7s %7s | %7s %7s %7s | %7s %6s\n", "schema", "bytes", "compile ms", "p50 us",
              "p99", "max", "mean us", "p99", "max", "places", "ended");
  for (size_t i = 0; i < cases.size(); ++i) {
    GrammarSpec spec;
    spec.kind = GrammarSpec::Kind::kJsonSchema;
    spec.text = cases[i].schema;
    // Each run compiles anew and draws the same replies; of each place the least of the runs counts, so that what else
    // the machine does shows less.
    std::vector<double> times[2];
    double compiled = 0;
    int ended = 0;
    std::string refused;
    for (int run = 0; run < kRuns && refused.empty(); ++run) {
      const double began = microseconds();
      const auto constraint = compiler.compile_now(spec);
      const double took = microseconds() - began;
      if (!constraint.ok()) {
        refused = constraint.error().message;
        break;
      }
      compiled = run == 0 ? took : std::min(compiled, took);
      ended = 0;
      for (std::vector<double>& least : times) {
        std::vector<double> some;
        Rng rng(i + 1);
        for (int j = 0; j < kReplies; ++j) {
          const int32_t budget = (*constraint)->shortest() + static_cast<int32_t>(rng.below(j % 2 == 0 ? 20 : 300));
          ended += reply(**tokenizer, **constraint, end, budget, rng, some) ? 1 : 0;
        }
        if (run == 0) least = some;
        for (size_t at = 0; at < least.size(); ++at) least[at] = std::min(least[at], some[at]);
      }
    }
    if (!refused.empty()) {
      std::printf("%-16s refused: %s\n", cases[i].name.c_str(), refused.c_str());
      continue;
    }
    for (std::vector<double>& some : times) std::sort(some.begin(), some.end());
    const double mean = std::accumulate(times[1].begin(), times[1].end(), 0.0) / static_cast<double>(times[1].size());
    std::printf("%-16s %7zu %10.1f | %7.1f %7.1f %7.1f | %7.1f %7.1f %7.1f | %7zu %3d/%d\n", cases[i].name.c_str(),
                spec.text.size(), 1e-3 * compiled, at(times[0], 50), at(times[0], 99), at(times[0], 100), mean,
                at(times[1], 99), at(times[1], 100), times[0].size(), ended, 2 * kReplies);
  }
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  return perigee::run(argc > 1 ? argv[1] : "models/tiny-k2", argc > 2 ? argv[2] : nullptr);
}
