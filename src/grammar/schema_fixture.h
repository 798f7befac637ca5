// For tests: random replies under a constraint's masks.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "control/constraint.h"
#include "grammar/token_table.h"
#include "text/test_vocabulary.h"

namespace perigee {

inline std::shared_ptr<const Tokenizer> grammar_tokenizer() {
  static const auto tokenizer =
      test_tokenizer({"\":",   "{\"",          "\",\"",    "\":\"", "[[", "]]",  "}}", "\"}", "name", "true",
                      "false", "null",         "\\\"",     "\\u",   "12", "00",  ".5", "e+",  "ab",   "functions.",
                      "get_",  "\xE4\xB8\xAD", "\xE4\xB8", "}]",    "[{", ",\"", "-1", "a\":"});
  return tokenizer;
}

struct RandomReply {
  std::vector<int32_t> ids;  // without the one that ended it
  bool ended = false;
  std::string text;  // of the ordinary ids
};

// Ids drawn uniformly from the masks until an end or `budget` ids. Checks that each mask has a bit and that the state
// takes what the mask allows.
inline RandomReply random_reply(const Tokenizer& tokenizer, const Constraint& constraint, int32_t end, int32_t budget,
                                Rng& rng) {
  const auto state = constraint.begin();
  const int64_t words = (tokenizer.vocab_size() + 31) / 32;
  std::vector<uint32_t> mask(static_cast<size_t>(words));
  RandomReply reply;
  while (static_cast<int32_t>(reply.ids.size()) < budget) {
    state->masks({}, budget - static_cast<int32_t>(reply.ids.size()), words, mask.data());
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
      if (has_bit(mask.data(), id)) ids.push_back(id);
    CHECK(!ids.empty(), "a mask that allows nothing after ", reply.text);
    const bool may_end = std::find(ids.begin(), ids.end(), end) != ids.end();
    const int32_t id = may_end && rng.below(6) == 0 ? end : ids[rng.below(ids.size())];
    CHECK(state->accept(id), "a mask that allows what the state refuses: ", id, " after ", reply.text);
    if (id == end) {
      reply.ended = true;
      return reply;
    }
    reply.ids.push_back(id);
    if (id < tokenizer.vocab_size() - Tokenizer::kNumSpecials) reply.text += tokenizer.bytes(id);
  }
  return reply;
}

}  // namespace perigee
