// A place in a text. A mask joins the tables of the newest row's states with those tokens that the tables leave open
// and that the parser took when they were tried.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/check.h"
#include "grammar/compiled_text.h"
#include "grammar/text_grammar.h"
#include "grammar/trial_walk.h"

namespace perigee {

using xgrammar::AdaptiveTokenMask;

struct TextCursor::Chart {
  explicit Chart(const TextGrammar& grammar)
      : compiled(grammar.compiled()),
        table(grammar.table()),
        parser(compiled.grammar.GetGrammar(), compiled.distances, compiled.row_states,
               static_cast<int32_t>(table.tokenizer().longest_token_bytes())) {}

  // A state of the newest row, its table of tokens, and tokens of that which a bound of characters may forbid.
  struct RowState {
    xgrammar::ParserState state;
    const AdaptiveTokenMask* sure;
    const OpenTokens* open;  // null: the table leaves none open
    std::vector<int32_t> bounded;
  };
  using Row = std::vector<RowState>;

  void allow_all(uint32_t* words);
  void add_table(RowState& each, uint32_t* words);
  void add_sure(const AdaptiveTokenMask& mask, uint32_t* words);
  // The tokens that tables leave open and the parser takes: those of up to RestChart::kShortBytes bytes, and longer
  // ones. They are cached by `key`.
  void add_short(const Row& row, std::optional<uint64_t> key, uint32_t* words);
  void add_long(const Row& row, std::optional<uint64_t> key, uint32_t* words);
  bool add_known(std::optional<uint64_t> key, uint32_t* words);
  void add_tried(const std::vector<int32_t>& tokens, int32_t most_bytes, uint32_t* words, std::vector<int32_t>& taken);

  const TextGrammar::Compiled& compiled;
  const TokenTable& table;
  RestChart parser;
  std::vector<uint32_t> scratch;
};

// The tokens that a state takes whatever may follow its rule.
void TextCursor::Chart::add_sure(const AdaptiveTokenMask& mask, uint32_t* words) {
  const int64_t num_words = table.words();
  switch (mask.store_type) {
    case AdaptiveTokenMask::StoreType::kAccepted:
      for (const int32_t index : mask.accepted_indices) set_bit(words, compiled.token(index).first);
      return;
    case AdaptiveTokenMask::StoreType::kAcceptedBitset:
      xgrammar::DynamicBitset(mask.accepted_bitset.Size(), words) |= mask.accepted_bitset;
      return;
    case AdaptiveTokenMask::StoreType::kRejected: {
      scratch.assign(static_cast<size_t>(num_words), ~uint32_t{0});
      const auto clear = [&](int32_t id) { scratch[id / 32] &= ~(1u << (id % 32)); };
      for (int32_t id = table.num_ordinary(); id < num_words * 32; ++id) clear(id);
      for (const int32_t index : mask.rejected_indices) clear(compiled.token(index).first);
      for (const int32_t index : mask.uncertain_indices) clear(compiled.token(index).first);
      for (int64_t word = 0; word < num_words; ++word) words[word] |= scratch[word];
      return;
    }
  }
}

// Those of `tokens` (indices of the sorted vocabulary, ascending) that the parser takes, also to `taken`. Where they
// cost more than kMaskWork, those that are left are left out.
void TextCursor::Chart::add_tried(const std::vector<int32_t>& tokens, int32_t most_bytes, uint32_t* words,
                                  std::vector<int32_t>& taken) {
  if (tokens.empty()) return;
  TrialWalk walk(parser, most_bytes);
  for (const int32_t index : tokens) {
    if (walk.work() > kMaskWork) break;
    const auto& [id, bytes] = compiled.token(index);
    if (has_bit(words, id) || !walk.takes(bytes)) continue;
    set_bit(words, id);
    taken.push_back(id);
  }
}

// What the state's table is sure of, except tokens that a bound of characters may forbid: these go to each.bounded.
void TextCursor::Chart::add_table(RowState& each, uint32_t* words) {
  const int32_t characters = parser.characters_left(each.state);
  const auto& up_to = *compiled.up_to;
  const bool all_fit = (up_to.size() < kMostCounted && characters >= static_cast<int32_t>(up_to.size())) ||
                       characters >= static_cast<int32_t>(Vocabulary::kMaxTokenBytes);
  if (all_fit && compiled.over_a_bound.empty()) return add_sure(*each.sure, words);
  std::vector<uint32_t> sure(static_cast<size_t>(table.words()));
  add_sure(*each.sure, sure.data());
  if (!all_fit) {
    // What a token has after the quote that ends a string is not counted.
    const std::vector<uint32_t>& few = up_to[std::min<size_t>(characters, up_to.size() - 1)];
    for (const auto& [index, id] : compiled.with_quote)
      if (has_bit(sure.data(), id) && !has_bit(few.data(), id)) each.bounded.push_back(index);
    for (int64_t word = 0; word < table.words(); ++word) sure[word] &= few[word];
  }
  for (int64_t word = 0; word < table.words(); ++word)
    words[word] |= sure[word] & ~(compiled.over_a_bound.empty() ? 0 : compiled.over_a_bound_mask[word]);
  for (const int32_t index : compiled.over_a_bound)
    if (has_bit(sure.data(), compiled.token(index).first)) each.bounded.push_back(index);
}

void TextCursor::Chart::allow_all(uint32_t* words) {
  const auto& tables = compiled.grammar->adaptive_token_mask_cache;
  Row row;
  for (const auto& state : parser.states()) {
    const auto found = tables.find(state);
    CHECK(found != tables.end(), "a state without a table of tokens");
    const auto open = compiled.open.find(&found->second);
    row.push_back({state, &found->second, open == compiled.open.end() ? nullptr : &open->second, {}});
    add_table(row.back(), words);
  }
  const auto key = parser.cache_key();
  add_short(row, key ? std::optional(key->for_short) : std::nullopt, words);
  add_long(row, key ? std::optional(key->for_long) : std::nullopt, words);
}

bool TextCursor::Chart::add_known(std::optional<uint64_t> key, uint32_t* words) {
  const TriedTokens::Ids known = key ? compiled.tried.find(*key) : nullptr;
  if (known == nullptr) return false;
  for (const int32_t id : *known) set_bit(words, id);
  return true;
}

namespace {

// Ascending, each once.
std::vector<int32_t> united(std::vector<int32_t> all) {
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

}  // namespace

void TextCursor::Chart::add_short(const Row& row, std::optional<uint64_t> key, uint32_t* words) {
  if (add_known(key, words)) return;
  std::vector<int32_t> taken, tokens;
  std::vector<const OpenTokens*> tables;
  for (const RowState& each : row) {
    if (each.open != nullptr) tables.push_back(each.open);
    for (const int32_t index : each.bounded)
      if (!compiled.is_long(index)) tokens.push_back(index);
  }
  std::sort(tables.begin(), tables.end());
  tables.erase(std::unique(tables.begin(), tables.end()), tables.end());
  for (const OpenTokens* open : tables) tokens.insert(tokens.end(), open->few.begin(), open->few.end());
  add_tried(united(std::move(tokens)), RestChart::kShortBytes, words, taken);
  if (key) compiled.tried.keep(*key, std::move(taken));
}

// Bounds at up to the longest token's length change what long tokens may follow, and few places have any in doubt.
void TextCursor::Chart::add_long(const Row& row, std::optional<uint64_t> key, uint32_t* words) {
  std::vector<int32_t> tokens;
  for (const RowState& each : row) {
    if (each.open != nullptr) tokens.insert(tokens.end(), each.open->many.begin(), each.open->many.end());
    for (const int32_t index : each.bounded)
      if (compiled.is_long(index)) tokens.push_back(index);
  }
  if (tokens.empty() || add_known(key, words)) return;
  std::vector<int32_t> taken;
  add_tried(united(std::move(tokens)), static_cast<int32_t>(table.tokenizer().longest_token_bytes()), words, taken);
  if (key) compiled.tried.keep(*key, std::move(taken));
}

TextCursor::TextCursor(std::shared_ptr<const TextGrammar> grammar)
    : grammar_(std::move(grammar)), chart_(std::make_unique<Chart>(*grammar_)) {}
TextCursor::~TextCursor() = default;

bool TextCursor::accept(int32_t id) {
  chart_->parser.begin_id();
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

bool TextCursor::was_too_much() const {
  return chart_->parser.was_too_much();
}

int64_t TextCursor::work() const {
  return chart_->parser.work();
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
  if (room >= chart_->compiled.most_growth && ids_left > int64_t{rest.least} + spare) {
    chart_->allow_all(words);
    // The budget may have ended before the first token that can follow.
    if (std::any_of(words, words + table.words(), [](uint32_t word) { return word != 0; })) return;
  }
  const std::vector<int32_t>& shortest = way();
  CHECK(static_cast<int64_t>(shortest.size()) <= ids_left, "a text that cannot end in time");
  if (ids_left > static_cast<int64_t>(shortest.size()) + spare) {
    const auto* level = chart_->compiled.level(static_cast<int32_t>(std::clamp<int64_t>(room, -1, 1 << 24)));
    if (level != nullptr) {
      std::vector<uint32_t> all(static_cast<size_t>(table.words()));
      chart_->allow_all(all.data());
      for (int64_t word = 0; word < table.words(); ++word) words[word] |= all[word] & level->words[word];
    }
  }
  if (!shortest.empty()) set_bit(words, shortest.front());
}

}  // namespace perigee
