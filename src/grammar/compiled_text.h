// What a TextGrammar was compiled to: xgrammar's automata and tables of tokens, and what masks read besides. Nothing of
// it changes afterwards except `tried`, the cache of trials. Only text_grammar.cc and text_cursor.cc include this.
#pragma once

#include <compiled_grammar_impl.h>
#include <tokenizer_info_impl.h>
#include <xgrammar/xgrammar.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grammar/closing.h"
#include "grammar/rest_chart.h"
#include "grammar/text_grammar.h"
#include "grammar/tried_tokens.h"

namespace perigee {

// A token of up to RestChart::kShortBytes bytes, with these: many are tried one after the other.
struct ShortToken {
  uint32_t index : 28;  // of the sorted vocabulary
  uint32_t length : 4;
  int32_t id;
  std::array<char, RestChart::kShortBytes> bytes;
  std::string_view text() const { return {bytes.data(), length}; }
};
static_assert(sizeof(ShortToken) == 16);

// Tokens to be tried. Those that xgrammar's table of a state does not decide reach beyond the end of the state's rule:
// whether they are allowed depends on what may follow the rule where it was used.
struct OpenTokens {
  std::vector<ShortToken> few;  // ascending
  std::vector<int32_t> many;    // the longer ones: indices of the sorted vocabulary
};

constexpr size_t kMostCounted = 256;    // see TextGrammar::Compiled::up_to
constexpr int64_t kMaskWork = 400'000;  // for a mask's trials of tokens, after which the rest is left out

struct TextGrammar::Compiled {
  // Tokens by how much they may lengthen the rest of a text: levels[i].growth is the most of level i, ascending.
  struct Level {
    int32_t growth;
    std::vector<uint32_t> words;
  };

  xgrammar::CompiledGrammar grammar;
  Distances distances;
  std::shared_ptr<const xgrammar::TokenizerInfo> vocabulary;
  int32_t row_states = 0;  // GrammarLimits
  std::shared_ptr<const std::vector<std::vector<uint32_t>>>
      up_to;  // by n < kMostCounted: the tokens of at most n characters
  std::vector<Level> levels;
  int32_t most_growth = 0;

  // Where a rule has a bound of characters, which xgrammar's tables do not know; empty otherwise.
  OpenTokens over_a_bound;                  // that have more characters after a quote than the least bound
  std::vector<uint32_t> over_a_bound_mask;  // the same; empty where there are none
  OpenTokens with_quote;
  int32_t most_with_quote = 0;  // bytes of these

  // Of tables that leave any open. Tables that leave the same open share them.
  std::unordered_map<const xgrammar::AdaptiveTokenMask*, std::shared_ptr<const OpenTokens>> open;
  size_t open_bytes = 0;  // of their memory, about
  mutable TriedTokens tried;

  // The largest level that lengthens a rest by at most `growth`; null if there is none.
  const Level* level(int32_t growth) const {
    const Level* found = nullptr;
    for (const Level& each : levels)
      if (each.growth <= growth) found = &each;
    return found;
  }
  const std::pair<int32_t, std::string>& token(int32_t index) const {
    return vocabulary->GetSortedDecodedVocab()[static_cast<size_t>(index)];
  }

  void make_levels(const TokenTable& table);
  void find_bounded(const TokenTable& table);
  void find_open();
  void add_open(int32_t index, OpenTokens& open) const;
};

}  // namespace perigee
