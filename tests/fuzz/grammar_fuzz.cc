// What clients send as schemas, patterns, grammars and structural tags. INPUT = a byte for the kind, then the text.
// What compiles must say a shortest reply that its own masks allow, id by id, and no place of a text may cost more than
// its bound.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/rng.h"
#include "grammar/grammar_compiler.h"
#include "grammar/schema_grammar.h"
#include "grammar/text_grammar.h"
#include "grammar/token_table.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

constexpr int32_t kEnd = 258;  // <|im_end|>

void follow_shortest(const Tokenizer& tokenizer, const Constraint& constraint) {
  const auto state = constraint.begin();
  const int64_t words = (tokenizer.vocab_size() + 31) / 32;
  std::vector<uint32_t> mask(static_cast<size_t>(words));
  const int32_t shortest = constraint.shortest();
  for (int32_t left = shortest; left > 0; --left) {
    if (shortest - left > 500) return;  // long enough
    state->masks({}, left, words, mask.data());
    int32_t next = -1;
    for (int32_t id = 0; id < tokenizer.vocab_size() && next < 0; ++id)
      if (has_bit(mask.data(), id)) next = id;
    CHECK(next >= 0, "a mask without an id");
    CHECK(state->accept(next), "a mask that allows what is refused");
    if (next == kEnd) return;
  }
  CHECK(false, "a reply that did not end in its ids");
}

// Random ids of the masks: no mask and no id may cost more than its bound, counted in states that are visited.
void walk(const Tokenizer& tokenizer, const TextGrammar& grammar, uint64_t seed) {
  constexpr int64_t kMostOfAMask = 1'100'000, kMostOfAnId = 250'000;
  Rng rng(seed);
  const auto cursor = grammar.begin();
  std::vector<uint32_t> mask(static_cast<size_t>(grammar.table().words()));
  for (int step = 0; step < 60; ++step) {
    std::fill(mask.begin(), mask.end(), 0);
    const int64_t before = cursor->work();
    cursor->allow(100'000, 8, mask.data());
    CHECK(cursor->work() - before <= kMostOfAMask, "a mask that cost ", cursor->work() - before);
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
      if (has_bit(mask.data(), id)) ids.push_back(id);
    CHECK(!ids.empty() || cursor->at_end(), "a mask without an id");
    if (ids.empty()) return;
    const int64_t masked = cursor->work();
    const bool taken = cursor->accept(ids[rng.below(ids.size())]);
    CHECK(cursor->work() - masked <= kMostOfAnId, "an id that cost ", cursor->work() - masked);
    CHECK(taken || cursor->was_too_much(), "a mask that allows what is refused");
    if (!taken) return;
  }
}

}  // namespace
}  // namespace perigee

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using perigee::GrammarSpec;
  if (size < 1 || size > 4096) return 0;
  static const auto tokenizer = perigee::test_tokenizer();
  static perigee::GrammarCompiler compiler(tokenizer, {perigee::kEnd},
                                           {.threads = 0, .limits = {.text_bytes = 8192, .places = 1000}});
  constexpr GrammarSpec::Kind kKinds[] = {GrammarSpec::Kind::kJsonSchema, GrammarSpec::Kind::kRegex,
                                          GrammarSpec::Kind::kEbnf, GrammarSpec::Kind::kStructuralTag};
  GrammarSpec spec;
  spec.kind = kKinds[data[0] % 4];
  spec.text.assign(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto made = compiler.compile_now(spec);
  if (!made.ok()) return 0;
  perigee::follow_shortest(*tokenizer, **made);
  if (spec.kind != GrammarSpec::Kind::kJsonSchema && spec.kind != GrammarSpec::Kind::kEbnf) return 0;
  static const auto table = std::make_shared<const perigee::TokenTable>(tokenizer, std::vector<int32_t>{perigee::kEnd});
  const auto ebnf = spec.kind == GrammarSpec::Kind::kEbnf ? perigee::Result<std::string>(spec.text)
                                                          : perigee::schema_grammar(spec.text);
  if (!ebnf.ok()) return 0;
  const auto grammar = perigee::TextGrammar::compile(table, *ebnf, {.text_bytes = 32768, .places = 1000});
  if (grammar.ok()) perigee::walk(*tokenizer, **grammar, size);
  return 0;
}
