// grammar_bench FOLDER [SCHEMAS]: what constraints cost.
//
// FOLDER has a tokenizer. SCHEMAS has a JSON schema a line; without it a few of several sizes are taken. For each: the
// milliseconds of its compilation, the median and the 99th percentile of the microseconds that one mask takes in random
// replies under the masks, and places of those.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>

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

std::vector<std::string> own_schemas() {
  std::string large = R"({"type":"object","properties":{)";
  for (int i = 0; i < 60; ++i) {
    large += std::string(i > 0 ? "," : "") + "\"property_" + std::to_string(i) +
             R"(":{"type":"object","properties":{"name":{"type":"string","maxLength":40},"value":{"type":"number"}}})";
  }
  return {
      R"({"type":"integer"})",
      R"({"type":"string"})",
      R"({"type":"object"})",
      (R"({"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","minimum":1,"maximum":14},)"
       R"("unit":{"enum":["celsius","fahrenheit"]}},"required":["city"]})"),
      (R"({"type":"array","items":{"type":"object","properties":{"id":{"type":"string","pattern":"^[a-z]{2,8}-[0-9]{4}$"},)"
       R"("tags":{"type":"array","items":{"type":"string"},"maxItems":5}},"required":["id","tags"]}})"),
      large + "}}"};
}

int run(const std::string& folder, const char* file) {
  auto tokenizer = Tokenizer::load(folder);
  if (!tokenizer.ok()) return std::fprintf(stderr, "%s\n", tokenizer.error().message.c_str()), 1;
  const int32_t end = *(*tokenizer)->special_id("<|im_end|>");
  GrammarCompiler compiler(*tokenizer, {end});
  std::vector<std::string> schemas = own_schemas();
  if (file != nullptr) {
    schemas.clear();
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) schemas.push_back(line);
  }
  GrammarSpec first;  // the table of tokens is made by whoever is first
  (void)compiler.compile_now(first);
  std::printf("%8s %10s %8s %8s %8s %8s\n", "bytes", "compile ms", "p50 us", "p99 us", "places", "ended");
  for (size_t i = 0; i < schemas.size(); ++i) {
    GrammarSpec spec;
    spec.kind = GrammarSpec::Kind::kJsonSchema;
    spec.text = schemas[i];
    const double began = microseconds();
    const auto constraint = compiler.compile_now(spec);
    const double compiled = microseconds() - began;
    if (!constraint.ok()) {
      std::printf("%8zu refused: %s\n", schemas[i].size(), constraint.error().message.c_str());
      continue;
    }
    Rng rng(i + 1);
    std::vector<double> times;
    int ended = 0;
    constexpr int kReplies = 20;
    for (int j = 0; j < kReplies; ++j) {
      const int32_t budget = (*constraint)->shortest() + static_cast<int32_t>(rng.below(j % 2 == 0 ? 20 : 300));
      ended += reply(**tokenizer, **constraint, end, budget, rng, times) ? 1 : 0;
    }
    std::sort(times.begin(), times.end());
    std::printf("%8zu %10.1f %8.1f %8.1f %8zu %5d/%d\n", schemas[i].size(), 1e-3 * compiled, times[times.size() / 2],
                times[times.size() * 99 / 100], times.size(), ended, kReplies);
  }
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  return perigee::run(argc > 1 ? argv[1] : "models/tiny-k2", argc > 2 ? argv[2] : nullptr);
}
