// Tokenizer: Kimi's tiktoken vocabulary and its 256 special tokens; text to ids and ids to bytes.
//
// The same for every Kimi model and Moonlight; special tokens take their names from the model's own
// tokenizer_config.json. Immutable, so one object serves all threads. It knows no chat format: the template is text.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/vocabulary.h"

namespace perigee {

// SpecialMatcher: finds any of a few hundred fixed strings in text.
//
// Only positions whose byte begins one of the strings are looked at, and there a sorted list is narrowed byte by byte,
// so plain text costs one table look-up a byte.
class SpecialMatcher {
 public:
  struct Match {
    size_t begin;   // byte offset in the text
    size_t length;  // bytes
    int32_t index;  // of the string, in the order given to the constructor
  };

  SpecialMatcher() = default;
  explicit SpecialMatcher(const std::vector<std::string_view>& strings);  // none empty, all different

  // The leftmost match at or after `from`; of several that begin there, the longest.
  std::optional<Match> find(std::string_view text, size_t from) const;

  // The string at exactly `pos`, if any.
  std::optional<Match> match_at(std::string_view text, size_t pos) const;

  // Whether the rest of the text from `pos` (not empty) is the beginning of one of the strings, or all of it.
  bool could_complete(std::string_view text, size_t pos) const;

  bool can_begin(char byte) const { return first_bytes_[static_cast<uint8_t>(byte)]; }

 private:
  struct Entry {
    std::string text;
    int32_t index;
  };
  struct Range {
    size_t low;
    size_t high;
  };
  // Of the entries in `range`, which agree in their first `depth` bytes, those whose next byte is `byte`.
  Range narrow(Range range, size_t depth, char byte) const;

  std::vector<Entry> sorted_;
  std::array<bool, 256> first_bytes_{};
};

// TokenBound: at least how many tokens a text has, from its bytes alone and at about 1 GB/s.
//
// Each value of a byte weighs 1 / L, L being the length of the longest token that contains it. So the bytes of a token
// weigh at most 1 together, and a text has at least as many tokens as its bytes weigh, however it is tokenised.
class TokenBound {
 public:
  static constexpr uint32_t kOneToken = 1u << 24;  // weights are multiples of 2^-24, rounded down

  void add_token(std::string_view bytes);

  // In units of 1 / kOneToken.
  uint32_t weight(char byte) const { return weights_[static_cast<uint8_t>(byte)]; }
  uint64_t weight(std::string_view text) const;

  // True: `text` has more than `max_tokens` tokens. False says nothing. Reads no more of it than that takes.
  bool is_over(std::string_view text, uint64_t max_tokens) const;

 private:
  std::array<uint32_t, 256> weights_ = full_weights();
  static constexpr std::array<uint32_t, 256> full_weights() {
    std::array<uint32_t, 256> all{};
    all.fill(kOneToken);
    return all;
  }
};

struct SpecialToken {
  int32_t id;
  std::string text;
  bool special;  // what skip_special_tokens removes; tool and think markers say no
};

// The added_tokens_decoder of a tokenizer_config.json (none: empty). Ids and texts are not checked against a
// vocabulary.
Result<std::vector<SpecialToken>> parse_tokenizer_config(std::string_view json);

enum class SpecialsIn { kRecognised, kPlainText };

// Stands inside every special-token string of untrusted text (U+FDD0, a noncharacter that no text may interchange).
constexpr std::string_view kNeutral = "\xEF\xB7\x90";

class Tokenizer {
 public:
  static constexpr int32_t kNumSpecials = 256;

  // Reads tiktoken.model and the added_tokens_decoder of tokenizer_config.json in `dir`. Errors name the file.
  static Result<std::shared_ptr<const Tokenizer>> load(const std::string& dir);

  // From the bytes of a tiktoken file and the named specials, whose ids must lie in the 256 after the file's ranks. The
  // others of the 256 become <|reserved_token_ID|>, special. Errors: see Vocabulary::parse; an id out of that range or
  // named twice, a text that is empty, over-long, repeated or holds kNeutral.
  static Result<std::shared_ptr<const Tokenizer>> create(std::string_view tiktoken_file,
                                                         std::vector<SpecialToken> specials);

  // Exactly the reference's ids (official tokenization_kimi.py), its cutting of long texts included: a special string
  // that such a cut goes through is plain text. Invalid UTF-8 is encoded byte by byte: the bytes of the ids joined are
  // always `text`.
  // Stops soon after more than `max_ids` of them: so many mean that there are more.
  std::vector<int32_t> encode(std::string_view text, SpecialsIn specials, size_t max_ids = SIZE_MAX) const;

  // Encodes a rendered chat prompt whose untrusted parts went through neutralise(): recognises special tokens, then
  // removes every kNeutral; a special token of one character with kNeutral after it is plain text. Unlike encode(), a
  // cut never breaks a special token: the chat's structure always survives.
  std::vector<int32_t> encode_rendered(std::string_view text, size_t max_ids = SIZE_MAX) const;

  // Makes untrusted text safe to be put into a prompt for encode_rendered: removes any kNeutral, then puts one after
  // the first character of every special string in it, and of a tail that more text could complete to a special string
  // (templates join text parts without a separator). encode_rendered(neutralise(x)) == encode(x, kPlainText) for any x
  // without kNeutral.
  std::string neutralise(std::string_view untrusted) const;

  int32_t vocab_size() const { return vocabulary_.size() + kNumSpecials; }

  // Of all tokens: n bytes of text are never fewer than n / longest_token_bytes() ids. A closer bound reads the text.
  size_t longest_token_bytes() const { return longest_token_bytes_; }
  const TokenBound& bound() const { return bound_; }

  // The bytes of a token; "" for an id out of range.
  std::string_view bytes(int32_t id) const;

  bool is_named_special(int32_t id) const { return id >= vocabulary_.size() && id < vocab_size(); }
  bool is_skipped(int32_t id) const { return is_named_special(id) && specials_[id - vocabulary_.size()].special; }
  std::optional<int32_t> special_id(std::string_view text) const;
  // The ordinary token with exactly these bytes.
  std::optional<int32_t> ordinary_id(std::string_view bytes) const;
  const std::vector<SpecialToken>& specials() const { return specials_; }  // all 256, by id

 private:
  explicit Tokenizer(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}
  void append_ordinary(std::string_view text, size_t max_ids, std::vector<int32_t>& out) const;

  Vocabulary vocabulary_;
  size_t longest_token_bytes_ = 0;
  TokenBound bound_;
  std::vector<SpecialToken> specials_;
  SpecialMatcher matcher_;  // its indices are those of specials_
};

}  // namespace perigee
