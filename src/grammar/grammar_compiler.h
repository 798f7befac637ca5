// GrammarCompiler: from what a client asked (GrammarSpec) to what the engine asks of (Constraint), on threads of its
// own.
//
// One for an engine and its tokenizer. What was compiled is kept, least recently used first to go, up to a number of
// bytes; callers who want the same at once share one compilation. What a compilation may cost is bounded before it
// begins: bytes, depth, and the places of its automata, which bound its time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "control/constraint.h"
#include "grammar/grammar_spec.h"
#include "grammar/text_grammar.h"
#include "text/tokenizer.h"

namespace perigee {

struct GrammarCompilerOptions {
  int threads = 2;
  size_t cache_bytes = 256 << 20;
  size_t max_waiting = 64;              // compilations that wait for a thread; more are refused
  std::chrono::seconds tools_time{20};  // for the schemas of one request's tools; the one that is begun is finished
  GrammarLimits limits;
};

class GrammarCompiler {
 public:
  using Done = std::function<void(Result<std::shared_ptr<const Constraint>>)>;

  // `ends`: the ids that end a reply; not empty.
  GrammarCompiler(std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> ends,
                  GrammarCompilerOptions options = {});
  ~GrammarCompiler();  // waits for what is being compiled; what waits is refused (kCancelled)

  // Calls `done` once: at once if it is known or refused for want of room (kUnavailable), else on a thread of the
  // compiler, for everybody who waits for the same in turn. Thread-safe. Errors of the spec: kBadInput, the message
  // beginning with the place in it.
  void compile(GrammarSpec spec, Done done);

  // The same, here and now.
  Result<std::shared_ptr<const Constraint>> compile_now(const GrammarSpec& spec);

  size_t cached_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee
