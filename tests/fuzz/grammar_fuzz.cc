// What clients send as schemas, patterns, grammars and structural tags. INPUT = a byte for the kind, then the text.
// What compiles must say a shortest reply that its own masks allow, id by id.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/check.h"
#include "grammar/grammar_compiler.h"
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
  if (const auto made = compiler.compile_now(spec); made.ok()) perigee::follow_shortest(*tokenizer, **made);
  return 0;
}
