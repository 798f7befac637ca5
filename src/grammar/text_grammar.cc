#include "grammar/text_grammar.h"

#include <compiled_grammar_impl.h>
#include <grammar_functor.h>
#include <tokenizer_info_impl.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <variant>

#include "grammar/closing.h"
#include "grammar/tried_tokens.h"

namespace perigee {
namespace {

using xgrammar::AdaptiveTokenMask;

// xgrammar's own ranges of the tokens that begin with another one are too wide where a later token has that one's bytes
// in its middle, and its tables of tokens would then be wrong for them.
void set_prefix_ranges(xgrammar::TokenizerInfo& info) {
  constexpr auto kRanges = std::get<7>(xgrammar::member_trait<xgrammar::TokenizerInfo::Impl>::members);
  const auto& sorted = info.GetSortedDecodedVocab();
  std::vector<int32_t>& ranges = info.ImplPtr()->*kRanges;
  std::vector<size_t> open;
  const auto close_until = [&](std::string_view bytes, size_t at) {
    for (; !open.empty() && !bytes.starts_with(sorted[open.back()].second); open.pop_back())
      ranges[open.back()] = static_cast<int32_t>(at);
  };
  for (size_t i = 0; i < sorted.size(); ++i) {
    close_until(sorted[i].second, i);
    open.push_back(i);
  }
  for (const size_t at : open) ranges[at] = static_cast<int32_t>(sorted.size());
}

// What every grammar of a table shares: xgrammar's sorted vocabulary. A table's first grammar makes it.
std::shared_ptr<const xgrammar::TokenizerInfo> sorted_vocabulary(const std::shared_ptr<const TokenTable>& table) {
  static std::mutex mutex;
  static std::weak_ptr<const TokenTable> owner;
  static std::shared_ptr<const xgrammar::TokenizerInfo> info;
  std::lock_guard lock(mutex);
  if (info != nullptr && owner.lock() == table) return info;
  std::vector<std::string> bytes(table->tokenizer().vocab_size());  // special ids stay empty: never part of text
  for (int32_t id = 0; id < table->num_ordinary(); ++id) bytes[id] = std::string(table->tokenizer().bytes(id));
  auto made = std::make_shared<xgrammar::TokenizerInfo>(bytes, xgrammar::VocabType::RAW, std::nullopt,
                                                        std::vector<int32_t>{table->num_ordinary()});
  set_prefix_ranges(*made);
  info = std::move(made);
  owner = table;
  return info;
}

// xgrammar's messages begin with a time, a file and a line of its own.
std::string without_place(std::string message) {
  if (const size_t end = message.find("] "); message.starts_with("[") && end != std::string::npos) {
    message.erase(0, end + 2);
    if (const size_t colon = message.find(": "); colon != std::string::npos && message.find(".cc:") < colon)
      message.erase(0, colon + 2);
  }
  return message;
}

struct Cost {
  int32_t places = 0;
  int64_t tries = 0;
};

// Ordinary tokens by their first two bytes.
class Beginnings {
 public:
  explicit Beginnings(const TokenTable& table) {
    for (int32_t id = 0; id < table.num_ordinary(); ++id) {
      const std::string_view bytes = table.tokenizer().bytes(id);
      const auto first = static_cast<uint8_t>(bytes[0]);
      ++all_[first];
      if (bytes.size() > 1) ++pairs_[size_t{first} * 256 + static_cast<uint8_t>(bytes[1])];
    }
  }
  int64_t all(int32_t first) const { return all_[static_cast<size_t>(first)]; }
  int64_t with_second(int32_t first, const std::bitset<256>& seconds) const {
    int64_t sum = 0;
    for (size_t second = 0; second < 256; ++second)
      if (seconds[second]) sum += pairs_[static_cast<size_t>(first) * 256 + second];
    return sum;
  }

 private:
  std::array<int32_t, 256> all_{};
  std::vector<int32_t> pairs_ = std::vector<int32_t>(256 * 256);
};

// The bytes that may come at a place of a grammar's automata.
class FirstBytes {
 public:
  explicit FirstBytes(const xgrammar::Grammar& grammar)
      : grammar_(grammar), is_end_(grammar->complete_fsm.NumStates()) {
    for (int32_t rule = 0; rule < grammar->NumRules(); ++rule)
      for (const int32_t end : grammar->per_rule_fsms[rule]->GetFsm().GetEnds()) is_end_[end] = true;
  }

  // None: any may, or it is not known.
  std::optional<std::bitset<256>> of(int32_t place, int depth = 0) const {
    constexpr int kDeepest = 4;
    std::bitset<256> out;
    // Tables end where their rule does: what follows it is tried later.
    if (depth == 0 && grammar_->complete_fsm.GetEdges(place).size() == 0) return out;
    if (depth > kDeepest || is_end_[place]) return std::nullopt;
    for (const auto& edge : grammar_->complete_fsm.GetEdges(place)) {
      if (edge.IsCharRange()) {
        for (int32_t byte = edge.min; byte <= std::min(edge.max, 255); ++byte) out.set(static_cast<size_t>(byte));
        continue;
      }
      if (!edge.IsEpsilon() && !edge.IsRuleRef()) return std::nullopt;
      const int32_t next =
          edge.IsEpsilon() ? edge.target : grammar_->per_rule_fsms[edge.GetRefRuleId()]->GetFsm().GetStart();
      const auto after = of(next, depth + 1);
      if (!after) return std::nullopt;
      out |= *after;
    }
    return out;
  }

 private:
  const xgrammar::Grammar& grammar_;
  std::vector<bool> is_end_;
};

// Of the tables of tokens that are to be made. A token that fails at its second byte costs a fraction of one that does
// not: texts of one character after the other are cheap.
Cost cost_of(const xgrammar::Grammar& grammar, const TokenTable& table) {
  constexpr int64_t kFractionOfFailed = 8;
  const Beginnings tokens(table);
  const FirstBytes firsts(grammar);
  Cost cost;
  for (int32_t place = 0; place < grammar->complete_fsm.NumStates(); ++place) {
    bool scans = false;
    for (const auto& edge : grammar->complete_fsm.GetEdges(place)) {
      if (!edge.IsCharRange()) continue;
      scans = true;
      const auto seconds = firsts.of(edge.target);
      for (int32_t byte = edge.min; byte <= std::min(edge.max, 255); ++byte) {
        const int64_t taken = seconds ? tokens.with_second(byte, *seconds) : tokens.all(byte);
        cost.tries += taken + (tokens.all(byte) - taken) / kFractionOfFailed;
      }
    }
    cost.places += scans ? 1 : 0;
  }
  return cost;
}

}  // namespace

struct TextGrammar::Compiled {
  // Tokens by how much they may lengthen the rest of a text: growths_[i] is the most of level i, ascending.
  struct Level {
    int32_t growth;
    std::vector<uint32_t> words;
  };

  xgrammar::CompiledGrammar grammar;
  Distances distances;
  std::shared_ptr<const xgrammar::TokenizerInfo> vocabulary;
  std::vector<Level> levels;
  int32_t most_growth = 0;
  int32_t row_states = 0;                                           // GrammarLimits
  std::shared_ptr<const std::vector<std::vector<uint32_t>>> up_to;  // by n: the tokens of at most n characters

  // Where a rule has a bound of characters: the tokens that could enter it, by a quote, and go over the least bound.
  // xgrammar's tables know no bounds. Indices of the sorted vocabulary, and the same as a mask; empty without bounds.
  std::vector<int32_t> entering;
  std::vector<uint32_t> entering_mask;
  std::vector<std::pair<int32_t, int32_t>> quoting;  // index and id of the tokens with a quote; empty without bounds
  void find_entering(const TokenTable& table);

  // Of what a table leaves open, the tokens of over RestChart::kShortBytes; where there are any.
  std::unordered_map<const AdaptiveTokenMask*, std::vector<int32_t>> long_uncertain;
  std::vector<int32_t> only(const std::vector<int32_t>& indices, bool is_long) const {
    std::vector<int32_t> out;
    const auto& sorted = vocabulary->GetSortedDecodedVocab();
    for (const int32_t index : indices)
      if ((sorted[index].second.size() > static_cast<size_t>(RestChart::kShortBytes)) == is_long) out.push_back(index);
    return out;
  }

  mutable TriedTokens tried;

  // The largest level that lengthens a rest by at most `growth`; null if there is none.
  const Level* level(int32_t growth) const {
    const Level* found = nullptr;
    for (const Level& each : levels)
      if (each.growth <= growth) found = &each;
    return found;
  }
  void make_levels(const TokenTable& table);
};

void TextGrammar::Compiled::find_entering(const TokenTable& table) {
  int32_t least = INT32_MAX;
  const xgrammar::Grammar rules = grammar.GetGrammar();
  for (int32_t rule = 0; rule < rules->NumRules(); ++rule)
    if (const int32_t bound = rules->GetRule(rule).max_tokens; bound >= 0) least = std::min(least, bound);
  if (least == INT32_MAX) return;
  entering_mask.resize(static_cast<size_t>(table.words()));
  const auto& sorted = vocabulary->GetSortedDecodedVocab();
  for (size_t i = 0; i < sorted.size(); ++i) {
    const std::string& bytes = sorted[i].second;
    const size_t quote = bytes.find('"');
    if (quote == std::string::npos) continue;
    quoting.emplace_back(static_cast<int32_t>(i), sorted[i].first);
    if (static_cast<int64_t>(bytes.size() - quote) - 1 <= least) continue;
    entering.push_back(static_cast<int32_t>(i));
    set_bit(entering_mask.data(), sorted[i].first);
  }
}

// Levels at 0, 1, 3, 7, …: few masks, and a token is left out at most one doubling too early.
void TextGrammar::Compiled::make_levels(const TokenTable& table) {
  std::vector<int32_t> growths(table.num_ordinary());
  for (int32_t id = 0; id < table.num_ordinary(); ++id) {
    int64_t growth = 0;
    for (const char byte : table.tokenizer().bytes(id)) {
      const int32_t each = distances.growth(static_cast<uint8_t>(byte));
      if (each != Distances::kNever) growth += each;
    }
    growths[id] = static_cast<int32_t>(std::clamp<int64_t>(growth, 0, 1 << 24));
    most_growth = std::max(most_growth, growths[id]);
  }
  for (int32_t bound = 0; bound < most_growth; bound = 2 * bound + 1) {
    levels.push_back({bound, std::vector<uint32_t>(table.words())});
    for (int32_t id = 0; id < table.num_ordinary(); ++id)
      if (growths[id] <= bound) set_bit(levels.back().words.data(), id);
  }
}

// By n below kMostCounted: the tokens with at most n bytes that could begin a character.
constexpr size_t kMostCounted = 256;
std::shared_ptr<const std::vector<std::vector<uint32_t>>> tokens_up_to(const std::shared_ptr<const TokenTable>& table) {
  static std::mutex mutex;
  static std::weak_ptr<const TokenTable> owner;
  static std::shared_ptr<const std::vector<std::vector<uint32_t>>> made;
  std::lock_guard lock(mutex);
  if (made != nullptr && owner.lock() == table) return made;
  std::vector<int32_t> begins(table->num_ordinary());
  for (int32_t id = 0; id < table->num_ordinary(); ++id)
    for (const char c : table->tokenizer().bytes(id)) begins[id] += (static_cast<uint8_t>(c) & 0xC0) != 0x80 ? 1 : 0;
  const int32_t most = *std::max_element(begins.begin(), begins.end());
  std::vector<std::vector<uint32_t>> sets(std::min<size_t>(most, kMostCounted), std::vector<uint32_t>(table->words()));
  for (int32_t n = 0; n < static_cast<int32_t>(sets.size()); ++n)
    for (int32_t id = 0; id < table->num_ordinary(); ++id)
      if (begins[id] <= n) set_bit(sets[n].data(), id);
  made = std::make_shared<const std::vector<std::vector<uint32_t>>>(std::move(sets));
  owner = table;
  return made;
}

TextGrammar::TextGrammar(std::shared_ptr<const TokenTable> table) : table_(std::move(table)) {}
TextGrammar::~TextGrammar() = default;

namespace {

using Compiled = TextGrammar::Compiled;

// From a parsed grammar; throws what xgrammar throws.
Result<std::unique_ptr<Compiled>> compile_parsed(const std::shared_ptr<const TokenTable>& table,
                                                 const xgrammar::Grammar& parsed, const GrammarLimits& limits) {
  const xgrammar::Grammar optimized = xgrammar::GrammarOptimizer::Apply(parsed);
  const Cost cost = cost_of(optimized, *table);
  if (cost.places > limits.places) {
    return Error(Code::kBadInput, "its automata have " + std::to_string(cost.places) + " places, at most " +
                                      std::to_string(limits.places) + " are allowed: make it smaller");
  }
  if (cost.tries > limits.token_tries) {
    return Error(Code::kBadInput,
                 "it would take too long to compile: it counts too many characters of large classes; use maxLength "
                 "without a pattern, or smaller classes and repetitions");
  }
  // Before the tables of tokens, which are what costs.
  Result<Distances> checked = Distances::make(optimized, limits.shortest_bytes);
  if (!checked.ok()) return checked.error();
  auto vocabulary = sorted_vocabulary(table);
  xgrammar::GrammarCompiler compiler(*vocabulary, /*max_threads=*/1, /*cache_enabled=*/false);
  xgrammar::CompiledGrammar grammar = compiler.CompileGrammar(parsed);
  Result<Distances> distances = Distances::make(grammar.GetGrammar(), limits.shortest_bytes);
  if (!distances.ok()) return distances.error();
  auto compiled = std::unique_ptr<Compiled>(new Compiled{
      grammar, *std::move(distances), vocabulary, {}, 0, limits.row_states, tokens_up_to(table), {}, {}, {}, {}});
  compiled->make_levels(*table);
  compiled->find_entering(*table);
  for (const auto& [state, mask] : compiled->grammar->adaptive_token_mask_cache)
    if (auto few = compiled->only(mask.uncertain_indices, /*is_long=*/true); !few.empty())
      compiled->long_uncertain.emplace(&mask, std::move(few));
  return compiled;
}

template <typename Parse>
Result<std::unique_ptr<Compiled>> compile_guarded(const std::shared_ptr<const TokenTable>& table, size_t bytes,
                                                  const GrammarLimits& limits, Parse parse) {
  if (bytes > limits.text_bytes) {
    return Error(Code::kBadInput, "it has " + std::to_string(bytes) + " bytes as a grammar, at most " +
                                      std::to_string(limits.text_bytes) + " are allowed");
  }
  try {
    return compile_parsed(table, parse(), limits);
  } catch (const std::bad_alloc&) {
    return Error(Code::kUnavailable, "not enough memory to compile it");
  } catch (const std::exception& error) {
    return Error(Code::kBadInput, without_place(error.what()));
  }
}

}  // namespace

Result<std::shared_ptr<const TextGrammar>> TextGrammar::compile(std::shared_ptr<const TokenTable> table,
                                                                const std::string& ebnf, const GrammarLimits& limits) {
  // xgrammar's tables of the first rule take it that nothing follows, so it must not be used by another.
  const std::string whole = ebnf + "\nperigee_start ::= root\n";
  auto compiled =
      compile_guarded(table, ebnf.size(), limits, [&] { return xgrammar::Grammar::FromEBNF(whole, "perigee_start"); });
  if (!compiled.ok()) return compiled.error();
  return finish(std::move(table), *std::move(compiled));
}

Result<std::shared_ptr<const TextGrammar>> TextGrammar::compile_structural_tag(std::shared_ptr<const TokenTable> table,
                                                                               const std::string& json,
                                                                               const GrammarLimits& limits) {
  auto compiled = compile_guarded(table, json.size(), limits, [&] {
    auto parsed = xgrammar::Grammar::FromStructuralTag(json, *sorted_vocabulary(table));
    if (auto* grammar = std::get_if<xgrammar::Grammar>(&parsed)) return *grammar;
    throw std::runtime_error(std::visit([](const auto& error) { return std::string(error.what()); },
                                        std::get<xgrammar::StructuralTagError>(parsed)));
  });
  if (!compiled.ok()) return compiled.error();
  return finish(std::move(table), *std::move(compiled));
}

Result<std::shared_ptr<const TextGrammar>> TextGrammar::finish(std::shared_ptr<const TokenTable> table,
                                                               std::unique_ptr<Compiled> compiled) {
  std::shared_ptr<TextGrammar> made(new TextGrammar(std::move(table)));
  made->compiled_ = std::move(compiled);
  made->bytes_ = made->compiled_->grammar.MemorySizeBytes() + TriedTokens::kMostBytes +
                 made->compiled_->levels.size() * static_cast<size_t>(made->table_->words()) * sizeof(uint32_t);
  const std::unique_ptr<TextCursor> start = made->begin();
  if (start->is_crowded())
    return Error(Code::kBadInput, "its rules begin with one another in over " +
                                      std::to_string(made->compiled_->row_states) +
                                      " ways: give them beginnings of their own");
  made->shortest_ = start->way();
  return std::shared_ptr<const TextGrammar>(std::move(made));
}

std::unique_ptr<TextCursor> TextGrammar::begin() const {
  return std::make_unique<TextCursor>(shared_from_this());
}

struct TextCursor::Chart {
  Chart(const TextGrammar::Compiled& compiled_in, int32_t token_bytes)
      : compiled(compiled_in),
        parser(compiled.grammar.GetGrammar(), compiled.distances, compiled.row_states, token_bytes) {}

  // A state of the newest row, its table of tokens, and tokens of that which a bound of characters may forbid.
  struct Open {
    xgrammar::ParserState state;
    const AdaptiveTokenMask* table;
    std::vector<int32_t> doubtful;
  };

  void allow_all(const TokenTable& table, uint32_t* words);
  // The tokens that tables leave open, as the parser takes them, of up to RestChart::kShortBytes and of more; what it
  // took at `place` is remembered.
  void add_short(const std::vector<Open>& open, std::optional<uint64_t> place, uint32_t* words);
  void add_long(const std::vector<Open>& open, std::optional<uint64_t> place, uint32_t* words);
  bool add_known(std::optional<uint64_t> place, uint32_t* words);
  void add_sure(const AdaptiveTokenMask& mask, const TokenTable& table, uint32_t* words);
  void add_tried(const xgrammar::ParserState& state, const std::vector<int32_t>& tokens, uint32_t* words,
                 std::vector<int32_t>& taken);

  const TextGrammar::Compiled& compiled;
  RestChart parser;
  std::vector<uint32_t> scratch;
};

// The tokens that a state takes whatever waits behind its rule.
void TextCursor::Chart::add_sure(const AdaptiveTokenMask& mask, const TokenTable& table, uint32_t* words) {
  const auto& sorted = compiled.vocabulary->GetSortedDecodedVocab();
  const int64_t num_words = table.words();
  switch (mask.store_type) {
    case AdaptiveTokenMask::StoreType::kAccepted:
      for (const int32_t index : mask.accepted_indices) set_bit(words, sorted[index].first);
      return;
    case AdaptiveTokenMask::StoreType::kAcceptedBitset:
      xgrammar::DynamicBitset(mask.accepted_bitset.Size(), words) |= mask.accepted_bitset;
      return;
    case AdaptiveTokenMask::StoreType::kRejected: {
      scratch.assign(static_cast<size_t>(num_words), ~uint32_t{0});
      const auto clear = [&](int32_t id) { scratch[id / 32] &= ~(1u << (id % 32)); };
      for (int32_t id = table.num_ordinary(); id < num_words * 32; ++id) clear(id);
      for (const int32_t index : mask.rejected_indices) clear(sorted[index].first);
      for (const int32_t index : mask.uncertain_indices) clear(sorted[index].first);
      for (int64_t word = 0; word < num_words; ++word) words[word] |= scratch[word];
      return;
    }
  }
}

// Those of `tokens` (indices of the sorted vocabulary, ascending) that the parser takes from this state, also to
// `taken`.
void TextCursor::Chart::add_tried(const xgrammar::ParserState& state, const std::vector<int32_t>& tokens,
                                  uint32_t* words, std::vector<int32_t>& taken) {
  if (tokens.empty()) return;
  const auto& sorted = compiled.vocabulary->GetSortedDecodedVocab();
  parser.push_trial(state);
  std::string_view done;    // the bytes that the parser stands behind
  std::string_view failed;  // and those that it did not take: no token that begins with them can follow
  for (const int32_t index : tokens) {
    const auto& [id, bytes] = sorted[index];
    if ((!failed.empty() && bytes.starts_with(failed)) || has_bit(words, id)) continue;
    const size_t shared = std::mismatch(done.begin(), done.end(), bytes.begin(), bytes.end()).first - done.begin();
    parser.pop_trial(static_cast<int32_t>(done.size() - shared));
    size_t at = shared;
    while (at < bytes.size() && parser.advance(static_cast<uint8_t>(bytes[at]))) ++at;
    done = std::string_view(bytes).substr(0, at);
    if (at == bytes.size()) {
      set_bit(words, id);
      taken.push_back(id);
    } else {
      failed = std::string_view(bytes).substr(0, at + 1);
    }
  }
  parser.pop_trial(static_cast<int32_t>(done.size()) + 1);
}

void TextCursor::Chart::allow_all(const TokenTable& table, uint32_t* words) {
  const auto& masks = compiled.grammar->adaptive_token_mask_cache;
  std::vector<Open> open;
  for (const auto& state : parser.states()) open.push_back({state, nullptr, {}});  // by value: trials move the row
  for (Open& each : open) {
    const auto found = masks.find(each.state);
    CHECK(found != masks.end(), "a state without a table of tokens");
    each.table = &found->second;
    const int32_t characters = parser.characters_left(each.state);
    const auto& up_to = *compiled.up_to;
    const bool all_fit = (up_to.size() < kMostCounted && characters >= static_cast<int32_t>(up_to.size())) ||
                         characters >= static_cast<int32_t>(Vocabulary::kMaxTokenBytes);
    if (all_fit && compiled.entering.empty()) {
      add_sure(found->second, table, words);
      continue;
    }
    std::vector<uint32_t> sure(static_cast<size_t>(table.words()));
    add_sure(found->second, table, sure.data());
    if (!all_fit) {
      // What a token has after the quote that ends a string is not counted.
      const std::vector<uint32_t>& few = up_to[std::min<size_t>(characters, up_to.size() - 1)];
      for (const auto& [index, id] : compiled.quoting)
        if (has_bit(sure.data(), id) && !has_bit(few.data(), id)) each.doubtful.push_back(index);
      for (int64_t word = 0; word < table.words(); ++word) sure[word] &= few[word];
    }
    for (int64_t word = 0; word < table.words(); ++word)
      words[word] |= sure[word] & ~(compiled.entering.empty() ? 0 : compiled.entering_mask[word]);
    for (const int32_t index : compiled.entering)
      if (has_bit(sure.data(), compiled.vocabulary->GetSortedDecodedVocab()[index].first))
        each.doubtful.push_back(index);
  }
  const auto place = parser.place();
  add_short(open, place ? std::optional(place->for_short) : std::nullopt, words);
  add_long(open, place ? std::optional(place->for_long) : std::nullopt, words);
}

bool TextCursor::Chart::add_known(std::optional<uint64_t> place, uint32_t* words) {
  const TriedTokens::Ids known = place ? compiled.tried.find(*place) : nullptr;
  if (known == nullptr) return false;
  for (const int32_t id : *known) set_bit(words, id);
  return true;
}

void TextCursor::Chart::add_short(const std::vector<Open>& open, std::optional<uint64_t> place, uint32_t* words) {
  if (add_known(place, words)) return;
  std::vector<int32_t> taken;
  for (const Open& each : open) {
    add_tried(each.state, compiled.only(each.doubtful, /*is_long=*/false), words, taken);
    add_tried(each.state, compiled.only(each.table->uncertain_indices, /*is_long=*/false), words, taken);
  }
  if (place) compiled.tried.keep(*place, std::move(taken));
}

// Bounds at up to the longest token's length change what long tokens may follow, and few places have any in doubt.
void TextCursor::Chart::add_long(const std::vector<Open>& open, std::optional<uint64_t> place, uint32_t* words) {
  std::vector<std::pair<const Open*, std::vector<int32_t>>> lists;
  for (const Open& each : open) {
    std::vector<int32_t> list = compiled.only(each.doubtful, /*is_long=*/true);
    const auto more = compiled.long_uncertain.find(each.table);
    if (more != compiled.long_uncertain.end()) list.insert(list.end(), more->second.begin(), more->second.end());
    std::sort(list.begin(), list.end());
    if (!list.empty()) lists.emplace_back(&each, std::move(list));
  }
  if (lists.empty() || add_known(place, words)) return;
  std::vector<int32_t> taken;
  for (const auto& [each, list] : lists) add_tried(each->state, list, words, taken);
  if (place) compiled.tried.keep(*place, std::move(taken));
}

TextCursor::TextCursor(std::shared_ptr<const TextGrammar> grammar)
    : grammar_(std::move(grammar)),
      chart_(std::make_unique<Chart>(grammar_->compiled(),
                                     static_cast<int32_t>(grammar_->table().tokenizer().longest_token_bytes()))) {}
TextCursor::~TextCursor() = default;

bool TextCursor::accept(int32_t id) {
  if (!grammar_->table().is_ordinary(id)) return false;
  const std::string_view bytes = grammar_->table().tokenizer().bytes(id);
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (chart_->parser.advance(static_cast<uint8_t>(bytes[i]))) continue;
    chart_->parser.pop(static_cast<int32_t>(i));
    return false;
  }
  chart_->parser.settle();
  lengths_.push_back(static_cast<int32_t>(bytes.size()));
  // The rest of a known way is a way: what was promised is kept, though another may be as short in bytes.
  if (way_ && !way_->empty() && way_->front() == id) {
    way_->erase(way_->begin());
  } else {
    way_.reset();
  }
  return true;
}

void TextCursor::rewind(const Mark& mark) {
  CHECK(mark.size <= lengths_.size(), "a cursor cannot be wound forward");
  int32_t bytes = 0;
  for (; lengths_.size() > mark.size; lengths_.pop_back()) bytes += lengths_.back();
  if (bytes > 0) chart_->parser.pop(bytes);
  way_ = mark.way;
}

bool TextCursor::is_crowded() const {
  return chart_->parser.is_crowded();
}

bool TextCursor::at_end() const {
  return chart_->parser.completed();
}

const std::vector<int32_t>& TextCursor::way() {
  if (!way_) grammar_->table().append_fewest_ids(chart_->parser.way(), way_.emplace());
  return *way_;
}

void TextCursor::allow(int32_t ids_left, int32_t spare, uint32_t* words) {
  const TokenTable& table = grammar_->table();
  const Rest rest = chart_->parser.rest();
  const int64_t room = int64_t{ids_left} - 1 - rest.most;  // by which the next token may lengthen the rest
  if (room >= chart_->compiled.most_growth && ids_left > int64_t{rest.least} + spare)
    return chart_->allow_all(table, words);
  const std::vector<int32_t>& shortest = way();
  CHECK(static_cast<int64_t>(shortest.size()) <= ids_left, "a text that cannot end in time");
  if (ids_left > static_cast<int64_t>(shortest.size()) + spare) {
    const auto* level = chart_->compiled.level(static_cast<int32_t>(std::clamp<int64_t>(room, -1, 1 << 24)));
    if (level != nullptr) {
      std::vector<uint32_t> all(static_cast<size_t>(table.words()));
      chart_->allow_all(table, all.data());
      for (int64_t word = 0; word < table.words(); ++word) words[word] |= all[word] & level->words[word];
    }
  }
  if (!shortest.empty()) set_bit(words, shortest.front());
}

}  // namespace perigee
