// schema_replies FOLDER REPLIES: random replies under the masks of JSON schemas, for judge.py.
//
// FOLDER has a tokenizer; standard input has a schema a line. Prints one JSON a line: {"schema": its line, "text": the
// reply}, {"schema": …, "cut": a reply that could not end} or {"schema": …, "refused": why}. Half of the replies have
// few ids left.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "base/json.h"
#include "base/rng.h"
#include "grammar/grammar_compiler.h"
#include "grammar/schema_fixture.h"

namespace perigee {
namespace {

int run(const std::string& folder, int replies) {
  auto tokenizer = Tokenizer::load(folder);
  if (!tokenizer.ok()) return std::fprintf(stderr, "%s\n", tokenizer.error().message.c_str()), 1;
  const int32_t end = *(*tokenizer)->special_id("<|im_end|>");
  GrammarCompiler compiler(*tokenizer, {end}, {.threads = 0});
  int64_t index = 0;
  const auto print = [&](const char* what, const std::string& text) {
    const Json line(Json::Object{{"schema", Json(index)}, {what, Json(text)}});
    std::printf("%s\n", dump_json(line).c_str());
  };
  for (std::string line; std::getline(std::cin, line); ++index) {
    GrammarSpec spec;
    spec.kind = GrammarSpec::Kind::kJsonSchema;
    spec.text = line;
    const auto constraint = compiler.compile_now(spec);
    if (!constraint.ok()) {
      print("refused", constraint.error().message);
      continue;
    }
    Rng rng(static_cast<uint64_t>(index) + 1);
    for (int i = 0; i < replies; ++i) {
      const int32_t budget = (*constraint)->shortest() + static_cast<int32_t>(rng.below(i % 2 == 0 ? 20 : 300));
      const RandomReply reply = random_reply(**tokenizer, **constraint, end, budget, rng);
      print(reply.ended ? "text" : "cut", reply.text);
    }
  }
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "schema_replies FOLDER REPLIES < SCHEMAS\n"), 2;
  return perigee::run(argv[1], std::atoi(argv[2]));
}
