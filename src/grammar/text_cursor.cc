// A place in a text. A mask joins the tables of the newest row's states with those tokens that the tables leave open
// and that the parser took when they were tried.
#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>

#include "base/check.h"
#include "grammar/compiled_text.h"
#include "grammar/text_grammar.h"
#include "grammar/trial_walk.h"

namespace perigee {

using xgrammar::AdaptiveTokenMask;

namespace {

// Memory for a mask while it is made. Each thread has one, so that the masks of all texts find it in the caches.
struct MaskMemory {
  std::vector<uint32_t> table, sure;
  OpenTokens bounded;  // tokens of tables that a bound of characters may forbid
  std::array<std::vector<ShortToken>, 2> unions;
  std::vector<int32_t> taken;
  TrialWalk::Room room;
};

MaskMemory& own_memory() {
  static thread_local MaskMemory memory;
  return memory;
}

}  // namespace

struct TextCursor::Chart {
  explicit Chart(const TextGrammar& grammar)
      : compiled(grammar.compiled()),
        table(grammar.table()),
        parser(compiled.grammar.GetGrammar(), compiled.distances, compiled.row_states,
               static_cast<int32_t>(table.tokenizer().longest_token_bytes())) {}

  void allow_all(uint32_t* words);
  void add_table(const xgrammar::ParserState& state, const AdaptiveTokenMask& table, MaskMemory& memory,
                 uint32_t* words);
  void add_sure(const AdaptiveTokenMask& mask, MaskMemory& memory, uint32_t* words);
  // Those of the tokens to be tried that the parser takes, cached by `key`. Where they cost more than kMaskWork, those
  // that are left are left out.
  void add_short(std::optional<uint64_t> key, MaskMemory& memory, uint32_t* words);
  void add_long(std::optional<uint64_t> key, MaskMemory& memory, uint32_t* words);
  bool add_known(std::optional<uint64_t> key, uint32_t* words);

  const TextGrammar::Compiled& compiled;
  const TokenTable& table;
  RestChart parser;
  std::vector<const OpenTokens*> open;  // what the tables of the newest row's states leave so
};

// The tokens that a state takes whatever may follow its rule.
void TextCursor::Chart::add_sure(const AdaptiveTokenMask& mask, MaskMemory& memory, uint32_t* words) {
  const int64_t num_words = table.words();
  switch (mask.store_type) {
    case AdaptiveTokenMask::StoreType::kAccepted:
      for (const int32_t index : mask.accepted_indices) set_bit(words, compiled.token(index).first);
      return;
    case AdaptiveTokenMask::StoreType::kAcceptedBitset:
      xgrammar::DynamicBitset(mask.accepted_bitset.Size(), words) |= mask.accepted_bitset;
      return;
    case AdaptiveTokenMask::StoreType::kRejected: {
      std::vector<uint32_t>& taken = memory.table;
      taken.assign(static_cast<size_t>(num_words), ~uint32_t{0});
      const auto clear = [&](int32_t id) { taken[id / 32] &= ~(1u << (id % 32)); };
      for (int32_t id = table.num_ordinary(); id < num_words * 32; ++id) clear(id);
      for (const int32_t index : mask.rejected_indices) clear(compiled.token(index).first);
      for (const int32_t index : mask.uncertain_indices) clear(compiled.token(index).first);
      for (int64_t word = 0; word < num_words; ++word) words[word] |= taken[word];
      return;
    }
  }
}

namespace {

// Adds to `to` what `from` has, except what `fit` has not or `over` has, each unless it is empty.
void add_all(const std::vector<uint32_t>& from, std::span<const uint32_t> fit, std::span<const uint32_t> over,
             uint32_t* to) {
  const size_t words = from.size();
  if (fit.empty() && over.empty()) {
    for (size_t word = 0; word < words; ++word) to[word] |= from[word];
  } else if (fit.empty()) {
    for (size_t word = 0; word < words; ++word) to[word] |= from[word] & ~over[word];
  } else if (over.empty()) {
    for (size_t word = 0; word < words; ++word) to[word] |= from[word] & fit[word];
  } else {
    for (size_t word = 0; word < words; ++word) to[word] |= from[word] & fit[word] & ~over[word];
  }
}

bool has_any(std::span<const uint32_t> words) {
  uint32_t found = 0;
  constexpr size_t kBlock = 256;
  for (; found == 0 && !words.empty(); words = words.subspan(std::min(kBlock, words.size())))
    for (const uint32_t word : words.first(std::min(kBlock, words.size()))) found |= word;
  return found != 0;
}

}  // namespace

// What the state's table is sure of, except tokens that a bound of characters may forbid: these go to `bounded`.
void TextCursor::Chart::add_table(const xgrammar::ParserState& state, const AdaptiveTokenMask& mask, MaskMemory& memory,
                                  uint32_t* words) {
  const int32_t characters = parser.characters_left(state);
  const auto& up_to = *compiled.up_to;
  const bool all_fit = (up_to.size() < kMostCounted && characters >= static_cast<int32_t>(up_to.size())) ||
                       characters >= static_cast<int32_t>(Vocabulary::kMaxTokenBytes);
  if (all_fit && compiled.over_a_bound_mask.empty()) return add_sure(mask, memory, words);
  std::vector<uint32_t>& sure = memory.sure;
  sure.assign(static_cast<size_t>(table.words()), 0);
  add_sure(mask, memory, sure.data());
  const std::vector<uint32_t>* fit = all_fit ? nullptr : &up_to[std::min<size_t>(characters, up_to.size() - 1)];
  const auto is_bounded = [&](int32_t id) {
    if (!has_bit(sure.data(), id)) return false;
    if (fit != nullptr && !has_bit(fit->data(), id)) return true;
    return !compiled.over_a_bound_mask.empty() && has_bit(compiled.over_a_bound_mask.data(), id);
  };
  // What a token has after the quote that ends a string is not counted.
  const OpenTokens& doubtful = characters < compiled.most_with_quote ? compiled.with_quote : compiled.over_a_bound;
  for (const ShortToken& token : doubtful.few)
    if (is_bounded(token.id)) memory.bounded.few.push_back(token);
  for (const int32_t index : doubtful.many)
    if (is_bounded(compiled.token(index).first)) memory.bounded.many.push_back(index);
  add_all(sure, fit != nullptr ? std::span(*fit) : std::span<const uint32_t>(), compiled.over_a_bound_mask, words);
}

void TextCursor::Chart::allow_all(uint32_t* words) {
  MaskMemory& memory = own_memory();
  open.clear();
  memory.bounded.few.clear();
  memory.bounded.many.clear();
  for (const auto& state : parser.states()) {
    const auto found = compiled.grammar->adaptive_token_mask_cache.find(state);
    CHECK(found != compiled.grammar->adaptive_token_mask_cache.end(), "a state without a table of tokens");
    if (const auto known = compiled.open.find(&found->second); known != compiled.open.end())
      open.push_back(known->second.get());
    add_table(state, found->second, memory, words);
  }
  std::sort(open.begin(), open.end());
  open.erase(std::unique(open.begin(), open.end()), open.end());
  const auto key = parser.cache_key();
  add_short(key ? std::optional(key->for_short) : std::nullopt, memory, words);
  add_long(key ? std::optional(key->for_long) : std::nullopt, memory, words);
}

bool TextCursor::Chart::add_known(std::optional<uint64_t> key, uint32_t* words) {
  const TriedTokens::Ids known = key ? compiled.tried.find(*key) : nullptr;
  if (known == nullptr) return false;
  for (const int32_t id : *known) set_bit(words, id);
  return true;
}

void TextCursor::Chart::add_short(std::optional<uint64_t> key, MaskMemory& memory, uint32_t* words) {
  if (add_known(key, words)) return;
  auto& [few, merged] = memory.unions;
  const std::vector<ShortToken>* tokens = open.empty() ? &memory.bounded.few : &open.front()->few;
  if (open.size() + (memory.bounded.few.empty() ? 0 : 1) > 1) {
    few = memory.bounded.few;
    for (const OpenTokens* each : open) {
      merged.clear();
      std::set_union(few.begin(), few.end(), each->few.begin(), each->few.end(), std::back_inserter(merged),
                     [](const auto& a, const auto& b) { return a.index < b.index; });
      few.swap(merged);
    }
    tokens = &few;
  }
  memory.taken.clear();
  if (!tokens->empty()) {
    TrialWalk walk(parser, RestChart::kShortBytes, memory.room);
    for (const ShortToken& token : *tokens) {
      if (walk.work() > kMaskWork) break;
      if (has_bit(words, token.id) || !walk.takes(token.text())) continue;
      set_bit(words, token.id);
      memory.taken.push_back(token.id);
    }
  }
  if (key) compiled.tried.keep(*key, memory.taken);
}

// Bounds at up to the longest token's length change what long tokens may follow, and few places have any in doubt.
void TextCursor::Chart::add_long(std::optional<uint64_t> key, MaskMemory& memory, uint32_t* words) {
  std::vector<int32_t>& tokens = memory.bounded.many;
  for (const OpenTokens* each : open) tokens.insert(tokens.end(), each->many.begin(), each->many.end());
  if (tokens.empty() || add_known(key, words)) return;
  std::sort(tokens.begin(), tokens.end());
  memory.taken.clear();
  TrialWalk walk(parser, static_cast<int32_t>(table.tokenizer().longest_token_bytes()), memory.room);
  for (const int32_t index : tokens) {
    if (walk.work() > kMaskWork) break;
    const auto& [id, bytes] = compiled.token(index);
    if (has_bit(words, id) || !walk.takes(bytes)) continue;
    set_bit(words, id);
    memory.taken.push_back(id);
  }
  if (key) compiled.tried.keep(*key, memory.taken);
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
    if (has_any({words, static_cast<size_t>(table.words())})) return;
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
