// Vocabulary: the ordinary tokens of a tiktoken file, by id and by bytes, and byte-pair merging over them.
//
// A tiktoken file has one token per line: base64 of its bytes, one space, its rank in decimal. A token's rank is its id
// and also its merge priority, lowest first. The file comes from whoever made the model, so it is not trusted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace perigee {

class Vocabulary {
 public:
  static constexpr size_t kMaxFileBytes = 64u << 20;
  static constexpr size_t kMaxTokenBytes = 4096;
  static constexpr size_t kMaxTokens = 1u << 22;

  // Parses a whole file. Errors (with the line number): bad base64; an empty, too long or repeated token; ranks that
  // are not exactly 0 … n-1; one of the 256 single bytes missing; kTooLarge over a cap.
  static Result<Vocabulary> parse(std::string_view file);

  int32_t size() const { return static_cast<int32_t>(offsets_.size()) - 1; }

  // The bytes of a token; requires 0 <= id < size().
  std::string_view bytes(int32_t id) const {
    return std::string_view(blob_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }

  size_t longest() const { return longest_; }  // bytes of the longest token

  // The token with exactly these bytes, or -1.
  int32_t find(std::string_view bytes) const;

  // Appends the tokens of one piece: the piece itself if it is a token, else single bytes merged pair by pair, always
  // the adjacent pair whose joined bytes have the lowest rank, leftmost on ties (Sennrich et al. 2016; tiktoken's
  // rule). O(n log n) in the bytes of the piece. Never fails: all single bytes are tokens.
  void append_piece(std::string_view piece, std::vector<int32_t>& out) const;

  // The two ways that append_piece chooses from by length; they give the same tokens. Both require piece.size() >= 2.
  void merge_short(std::string_view piece,
                   std::vector<int32_t>& out) const;                         // quadratic; requires <= kShortPiece bytes
  void merge_long(std::string_view piece, std::vector<int32_t>& out) const;  // a heap of pairs
  static constexpr size_t kShortPiece = 96;

 private:
  // One slot of the hash table. Up to 8 bytes are in `key` itself, so a short token is found without touching blob_.
  struct Slot {
    uint64_t key = 0;
    int32_t id = -1;
    uint32_t length = 0;  // 0: empty
  };

  Vocabulary() = default;
  Status build_table();
  int32_t find_multibyte(std::string_view bytes) const;  // as find, for at least 2 bytes

  std::string blob_;               // all tokens' bytes, by id
  std::vector<uint32_t> offsets_;  // [size + 1]
  std::vector<Slot> slots_;        // open addressing, a power of two
  uint32_t shift_ = 0;             // 64 - log2(slots)
  size_t longest_ = 0;
  int32_t byte_ids_[256];
  std::vector<int32_t> byte_pair_ids_;  // [256 * 256]: the token of two bytes, or -1
};

}  // namespace perigee
