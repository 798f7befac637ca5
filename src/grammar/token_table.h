// TokenTable: a vocabulary as grammars see it: the bytes of its ordinary ids, and the few special ids that have a
// meaning in a constrained reply.
//
// Special ids are never part of text. Immutable: all compiled grammars of an engine share one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace perigee {

class TokenTable {
 public:
  // `ends` end a reply: not empty, each of them below the tokenizer's vocab_size().
  TokenTable(std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> ends);

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const std::vector<int32_t>& ends() const { return ends_; }
  int32_t num_ordinary() const { return tokenizer_->vocab_size() - Tokenizer::kNumSpecials; }
  int64_t words() const { return (tokenizer_->vocab_size() + 31) / 32; }
  bool is_ordinary(int32_t id) const { return id >= 0 && id < num_ordinary(); }

  // Appends the fewest ids whose bytes are `text`. All single bytes are tokens, so there are at most text.size().
  void append_fewest_ids(std::string_view text, std::vector<int32_t>& out) const;

  // The ordinary id with exactly these bytes.
  std::optional<int32_t> find(std::string_view bytes) const { return tokenizer_->ordinary_id(bytes); }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<int32_t> ends_;
  static constexpr size_t kStart = 4, kNumStarts = 1 << 16;
  static size_t start_of(std::string_view bytes);  // of its first kStart

  std::vector<uint8_t> longest_;  // by start_of(): the bytes of the longest token that begins so, up to 255
};

// Bits of a mask: bit id % 32 of word id / 32.
inline void set_bit(uint32_t* words, int32_t id) {
  words[id / 32] |= 1u << (id % 32);
}
inline bool has_bit(const uint32_t* words, int32_t id) {
  return (words[id / 32] >> (id % 32) & 1) != 0;
}

}  // namespace perigee
