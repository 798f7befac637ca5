#include "grammar/text_grammar.h"

#include <grammar_functor.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>

#include "grammar/compiled_text.h"

namespace perigee {
namespace {

using Compiled = TextGrammar::Compiled;

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
  message.erase(message.find_last_not_of('\n') + 1);
  return message;
}

Error too_many_ways(int32_t row_states) {
  return Error(Code::kBadInput, "its rules begin with one another in over " + std::to_string(row_states) +
                                    " ways: give them beginnings of their own");
}

// xgrammar's automata of regular expressions are built and freed by recursion, a frame for each nested group. Pattern
// bounds the groups of regexes and schemas; a client's grammar may hold regular expressions of its own.
constexpr size_t kMostBytesWithRegex = 32 << 10;

Status check_own_regexes(const std::string& text) {
  if (text.size() <= kMostBytesWithRegex) return {};
  for (const char* sign : {"egex", "attern"})
    if (text.find(sign) != std::string::npos)
      return Error(Code::kBadInput,
                   "it has " + std::to_string(text.size()) + " bytes, at most " + std::to_string(kMostBytesWithRegex) +
                       " are allowed with regular expressions in it: shorten it or spell them as rules");
  return {};
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
  const std::optional<std::bitset<256>>& of(int32_t place) {
    const auto [known, is_new] = known_.try_emplace(place);
    if (is_new) known->second = found(place);
    return known->second;
  }

 private:
  std::optional<std::bitset<256>> found(int32_t first) {
    constexpr int kDeepest = 4;
    constexpr int64_t kMostWork = 20'000'000;  // places looked at, of a grammar
    std::bitset<256> out;
    // Tables end where their rule does: what follows it is tried later.
    if (grammar_->complete_fsm.GetEdges(first).size() == 0) return out;
    std::vector<int32_t> places{first}, deeper;
    std::unordered_set<int32_t> seen{first};
    for (int depth = 0; !places.empty(); ++depth) {
      if (depth > kDeepest) return std::nullopt;
      for (const int32_t place : places) {
        if (is_end_[place] || ++work_ > kMostWork) return std::nullopt;
        for (const auto& edge : grammar_->complete_fsm.GetEdges(place)) {
          if (edge.IsCharRange()) {
            for (int32_t byte = edge.min; byte <= std::min(edge.max, 255); ++byte) out.set(static_cast<size_t>(byte));
            continue;
          }
          if (!edge.IsEpsilon() && !edge.IsRuleRef()) return std::nullopt;
          const int32_t next =
              edge.IsEpsilon() ? edge.target : grammar_->per_rule_fsms[edge.GetRefRuleId()]->GetFsm().GetStart();
          if (seen.insert(next).second) deeper.push_back(next);
        }
      }
      places = std::exchange(deeper, {});
    }
    return out;
  }

  const xgrammar::Grammar& grammar_;
  std::vector<bool> is_end_;
  std::unordered_map<int32_t, std::optional<std::bitset<256>>> known_;
  int64_t work_ = 0;
};

// The states of the parser's chart where a text comes to a place: what waits for a rule, and what takes a byte.
class Openings {
 public:
  explicit Openings(const xgrammar::Grammar& grammar)
      : grammar_(grammar),
        may_be_empty_(static_cast<size_t>(grammar->NumRules())),
        seen_by_(static_cast<size_t>(grammar->complete_fsm.NumStates()), -1) {
    for (const int32_t rule : grammar->allow_empty_rule_ids) may_be_empty_[rule] = true;
  }

  // Counted up to one above `most`, at most once for each place.
  int32_t of(int32_t place, int32_t most) {
    const int32_t first = place;
    std::vector<int32_t> next;
    const auto enter = [&](int32_t to) {
      if (std::exchange(seen_by_[to], first) != first) next.push_back(to);
    };
    int32_t states = 0, waiting = 0;
    for (enter(first); !next.empty();) {
      place = next.back();
      next.pop_back();
      bool scans = false;
      for (const auto& edge : grammar_->complete_fsm.GetEdges(place)) {
        scans |= edge.IsCharRange();
        if (edge.IsEpsilon()) enter(edge.target);
        if (!edge.IsRuleRef() && !edge.IsRepeatRef()) continue;
        const bool repeats = edge.IsRepeatRef();
        const auto rule =
            repeats ? grammar_->complete_fsm.GetRepeatEdgeInfo(edge.GetAuxIndex()).RuleId() : edge.GetRefRuleId();
        ++waiting;
        enter(grammar_->per_rule_fsms[rule]->GetFsm().GetStart());
        if (may_be_empty_[rule] ||
            (repeats && grammar_->complete_fsm.GetRepeatEdgeInfo(edge.GetAuxIndex()).Lower() == 0))
          enter(edge.target);
      }
      states += scans ? 1 : 0;
      if (std::max(states, waiting) > most) break;
    }
    return std::max(states, waiting);
  }

 private:
  const xgrammar::Grammar& grammar_;
  std::vector<bool> may_be_empty_;
  std::vector<int32_t> seen_by_;  // the place whose search came by last
};

// Whether tables of tokens can be made of what may open at each place that takes a byte: each of those states is set up
// again for each place, and where there are more of them than of a row no text could come by.
Status check_openings(const xgrammar::Grammar& grammar, const GrammarLimits& limits) {
  Openings openings(grammar);
  int64_t all = 0;
  for (int32_t place = 0; place < grammar->complete_fsm.NumStates(); ++place) {
    const auto edges = grammar->complete_fsm.GetEdges(place);
    if (std::none_of(edges.begin(), edges.end(), [](const auto& edge) { return edge.IsCharRange(); })) continue;
    const int32_t states = openings.of(place, limits.row_states);
    all += states;
    if (states > limits.row_states) return too_many_ways(limits.row_states);
    if (all > limits.openings)
      return Error(Code::kBadInput, "too many of its rules begin with one another: give them beginnings of their own");
  }
  return {};
}

// Of the tables of tokens that are to be made. A token that fails at its second byte costs a fraction of one that does
// not: texts of one character after the other are cheap.
Cost cost_of(const xgrammar::Grammar& grammar, const TokenTable& table) {
  constexpr int64_t kFractionOfFailed = 8;
  const Beginnings tokens(table);
  FirstBytes firsts(grammar);
  Cost cost;
  for (int32_t place = 0; place < grammar->complete_fsm.NumStates(); ++place) {
    bool scans = false;
    for (const auto& edge : grammar->complete_fsm.GetEdges(place)) {
      if (!edge.IsCharRange()) continue;
      scans = true;
      const auto& seconds = firsts.of(edge.target);
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

void TextGrammar::Compiled::find_bounded(const TokenTable& table) {
  int32_t least = INT32_MAX;
  const xgrammar::Grammar rules = grammar.GetGrammar();
  for (int32_t rule = 0; rule < rules->NumRules(); ++rule)
    if (const int32_t bound = rules->GetRule(rule).max_tokens; bound >= 0) least = std::min(least, bound);
  if (least == INT32_MAX) return;
  over_a_bound_mask.resize(static_cast<size_t>(table.words()));
  const auto& sorted = vocabulary->GetSortedDecodedVocab();
  for (size_t i = 0; i < sorted.size(); ++i) {
    const std::string& bytes = sorted[i].second;
    const size_t quote = bytes.find('"');
    if (quote == std::string::npos) continue;
    add_open(static_cast<int32_t>(i), with_quote);
    most_with_quote = std::max(most_with_quote, static_cast<int32_t>(bytes.size()));
    if (static_cast<int64_t>(bytes.size() - quote) - 1 <= least) continue;
    add_open(static_cast<int32_t>(i), over_a_bound);
    set_bit(over_a_bound_mask.data(), sorted[i].first);
  }
  if (over_a_bound.few.empty() && over_a_bound.many.empty()) over_a_bound_mask.clear();
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

void TextGrammar::Compiled::add_open(int32_t index, OpenTokens& to) const {
  const auto& [id, bytes] = token(index);
  if (bytes.size() > static_cast<size_t>(RestChart::kShortBytes)) return to.many.push_back(index);
  const auto length = static_cast<uint32_t>(bytes.size());
  ShortToken& added = to.few.emplace_back(ShortToken{static_cast<uint32_t>(index), length, id, {}});
  std::copy(bytes.begin(), bytes.end(), added.bytes.begin());
}

void TextGrammar::Compiled::find_open() {
  std::map<std::vector<int32_t>, std::shared_ptr<const OpenTokens>> known;
  for (const auto& [state, table] : grammar->adaptive_token_mask_cache) {
    if (table.uncertain_indices.empty()) continue;
    std::vector<int32_t> indices = table.uncertain_indices;
    std::sort(indices.begin(), indices.end());
    auto& same = known[indices];
    if (same == nullptr) {
      OpenTokens found;
      for (const int32_t index : indices) add_open(index, found);
      open_bytes += sizeof(found) + found.few.size() * sizeof(ShortToken) + found.many.size() * sizeof(int32_t);
      same = std::make_shared<const OpenTokens>(std::move(found));
    }
    open[&table] = same;
  }
}

TextGrammar::TextGrammar(std::shared_ptr<const TokenTable> table) : table_(std::move(table)) {}
TextGrammar::~TextGrammar() = default;

namespace {

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
  RETURN_IF_ERROR(check_openings(optimized, limits));
  Result<Distances> checked = Distances::make(optimized, limits.shortest_bytes);
  if (!checked.ok()) return checked.error();
  auto vocabulary = sorted_vocabulary(table);
  xgrammar::GrammarCompiler compiler(*vocabulary, /*max_threads=*/1, /*cache_enabled=*/false);
  xgrammar::CompiledGrammar grammar = compiler.CompileGrammar(parsed);
  Result<Distances> distances = Distances::make(grammar.GetGrammar(), limits.shortest_bytes);
  if (!distances.ok()) return distances.error();
  auto compiled = std::unique_ptr<Compiled>(new Compiled{.grammar = grammar,
                                                         .distances = *std::move(distances),
                                                         .vocabulary = vocabulary,
                                                         .row_states = limits.row_states,
                                                         .up_to = tokens_up_to(table)});
  compiled->make_levels(*table);
  compiled->find_bounded(*table);
  compiled->find_open();
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

Status TextGrammar::check_ebnf(const std::string& ebnf) {
  RETURN_IF_ERROR(check_own_regexes(ebnf));
  try {
    const xgrammar::Grammar grammar = xgrammar::Grammar::FromEBNF(ebnf, "root");
    for (int32_t i = 0; i < grammar->NumRules(); ++i) {
      const auto& rule = grammar->GetRule(i);
      if (rule.max_tokens < 0 && rule.max_chars < 0 && rule.capture_name.empty() && !rule.is_lazy && !rule.temperature)
        continue;
      return Error(Code::kBadInput, "rule " + rule.name +
                                        " has attributes in brackets, which are not followed: bound its length by a "
                                        "repetition, such as [a-z]{1,9}");
    }
  } catch (const std::bad_alloc&) {
    return Error(Code::kUnavailable, "not enough memory to read it");
  } catch (const std::exception& error) {
    return Error(Code::kBadInput, without_place(error.what()));
  }
  return {};
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
  made->bytes_ = made->compiled_->grammar.MemorySizeBytes() + TriedTokens::kMostBytes + made->compiled_->open_bytes +
                 made->compiled_->levels.size() * static_cast<size_t>(made->table_->words()) * sizeof(uint32_t);
  const std::unique_ptr<TextCursor> start = made->begin();
  if (start->is_crowded()) return too_many_ways(made->compiled_->row_states);
  made->shortest_ = start->way();
  return std::shared_ptr<const TextGrammar>(std::move(made));
}

std::unique_ptr<TextCursor> TextGrammar::begin() const {
  return std::make_unique<TextCursor>(shared_from_this());
}

}  // namespace perigee
