#include "text/vocabulary.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

#include "base/rng.h"

namespace perigee {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

// The value of a base64 digit (RFC 4648, section 4), or -1.
int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+') return 62;
  return c == '/' ? 63 : -1;
}

// Appends the bytes of strict base64 (padded, no blanks, unused bits zero); false if it is anything else.
bool append_base64(std::string_view text, std::string& out) {
  if (text.empty() || text.size() % 4 != 0) return false;
  size_t padding = 0;
  while (padding < 2 && text[text.size() - 1 - padding] == '=') ++padding;
  for (size_t i = 0; i < text.size(); i += 4) {
    const size_t digits = i + 4 == text.size() ? 4 - padding : 4;
    uint32_t bits = 0;
    for (size_t j = 0; j < 4; ++j) {
      const int digit = j < digits ? base64_digit(text[i + j]) : 0;
      if (digit < 0) return false;
      bits = bits << 6 | static_cast<uint32_t>(digit);
    }
    if ((bits & ((1u << (4 - digits) * 8) - 1)) != 0) return false;
    for (size_t j = 0; j + 1 < digits; ++j) out += static_cast<char>(bits >> (16 - 8 * j));
  }
  return true;
}

// A rank in plain decimal, or -1: signs, blanks, leading zeros and anything from kMaxTokens on are refused.
int64_t parse_rank(std::string_view text) {
  if (text.empty() || text.size() > 9 || (text.size() > 1 && text[0] == '0')) return -1;
  int64_t rank = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return -1;
    rank = rank * 10 + (c - '0');
  }
  return rank < static_cast<int64_t>(Vocabulary::kMaxTokens) ? rank : -1;
}

template <typename Word>
uint64_t load(const char* from) {
  Word out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

// Different for different strings of one length up to 8; a hash beyond.
uint64_t key_of(std::string_view bytes) {
  const char* p = bytes.data();
  const size_t n = bytes.size();
  if (n < 4) return load<uint8_t>(p) | load<uint8_t>(p + n / 2) << 8 | load<uint8_t>(p + n - 1) << 16;
  if (n <= 8) return load<uint32_t>(p) | load<uint32_t>(p + n - 4) << 32;
  uint64_t hash = n;
  for (size_t i = 0; i + 8 <= n; i += 8) hash = mix64(hash ^ load<uint64_t>(p + i));
  return mix64(hash ^ load<uint64_t>(p + n - 8));
}

uint64_t slot_hash(uint64_t key, size_t length) {
  return (key + length) * 0x9E3779B97F4A7C15ull;
}

struct Line {
  uint32_t begin;   // the token's bytes in the order of the file
  uint32_t length;  // 0: no line has this rank yet
};

Error line_error(size_t line, const char* what) {
  return bad_input(fmt::format("tiktoken file, line {}: {}", line, what));
}

// One line without its end; appends the token's bytes to `blob` and notes them in `by_rank`, which grows as needed.
Status parse_line(std::string_view text, size_t number, std::string& blob, std::vector<Line>& by_rank) {
  const size_t blank = text.find(' ');
  if (blank == std::string_view::npos) return line_error(number, "expected base64, a space and a rank");
  if (blank > Vocabulary::kMaxTokenBytes / 3 * 4)
    return line_error(number, "the token is over the limit of 4096 bytes");
  const size_t begin = blob.size();
  if (!append_base64(text.substr(0, blank), blob) || blob.size() == begin) return line_error(number, "bad base64");
  const int64_t rank = parse_rank(text.substr(blank + 1));
  if (rank < 0) return line_error(number, "bad rank (a decimal number below 4194304)");
  if (static_cast<size_t>(rank) >= by_rank.size()) by_rank.resize(rank + 1, Line{0, 0});
  if (by_rank[rank].length != 0) return line_error(number, "the rank occurs twice");
  by_rank[rank] = {static_cast<uint32_t>(begin), static_cast<uint32_t>(blob.size() - begin)};
  return {};
}

}  // namespace

Result<Vocabulary> Vocabulary::parse(std::string_view file) {
  if (file.size() > kMaxFileBytes)
    return Error(Code::kTooLarge,
                 fmt::format("tiktoken file: {} bytes is over the limit of {}", file.size(), kMaxFileBytes));
  std::string blob;
  std::vector<Line> by_rank;
  size_t number = 0;
  for (size_t begin = 0; begin < file.size(); ++number) {
    const size_t end = std::min(file.find('\n', begin), file.size());
    std::string_view text = file.substr(begin, end - begin);
    if (text.ends_with('\r')) text.remove_suffix(1);
    if (!text.empty()) RETURN_IF_ERROR(parse_line(text, number + 1, blob, by_rank));
    begin = end + 1;
  }
  Vocabulary out;
  out.blob_.reserve(blob.size());
  out.offsets_.reserve(by_rank.size() + 1);
  out.offsets_.push_back(0);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].length == 0) return bad_input(fmt::format("tiktoken file: rank {} is missing", rank));
    out.blob_.append(blob, by_rank[rank].begin, by_rank[rank].length);
    out.offsets_.push_back(static_cast<uint32_t>(out.blob_.size()));
    out.longest_ = std::max<size_t>(out.longest_, by_rank[rank].length);
  }
  RETURN_IF_ERROR(out.build_table());
  return out;
}

Status Vocabulary::build_table() {
  const size_t slots = std::bit_ceil(static_cast<size_t>(size()) * 2 + 2);
  slots_.assign(slots, Slot{});
  shift_ = 64 - static_cast<uint32_t>(std::countr_zero(slots));
  byte_pair_ids_.assign(size_t{256} * 256, -1);
  std::fill(std::begin(byte_ids_), std::end(byte_ids_), -1);
  for (int32_t id = 0; id < size(); ++id) {
    const std::string_view token = bytes(id);
    if (find(token) >= 0)
      return bad_input(fmt::format("tiktoken file: ranks {} and {} are one token", find(token), id));
    if (token.size() == 1) byte_ids_[static_cast<uint8_t>(token[0])] = id;
    if (token.size() == 2) byte_pair_ids_[static_cast<uint8_t>(token[0]) << 8 | static_cast<uint8_t>(token[1])] = id;
    const uint64_t key = key_of(token);
    size_t at = slot_hash(key, token.size()) >> shift_;
    while (slots_[at].length != 0) at = (at + 1) & (slots - 1);
    slots_[at] = {key, id, static_cast<uint32_t>(token.size())};
  }
  const auto missing = std::find(std::begin(byte_ids_), std::end(byte_ids_), -1);
  if (missing != std::end(byte_ids_))
    return bad_input(fmt::format("tiktoken file: no token for the byte {}", missing - std::begin(byte_ids_)));
  return {};
}

int32_t Vocabulary::find(std::string_view bytes) const {
  if (bytes.size() == 1) return byte_ids_[static_cast<uint8_t>(bytes[0])];
  return bytes.empty() || bytes.size() > longest_ ? -1 : find_multibyte(bytes);
}

int32_t Vocabulary::find_multibyte(std::string_view bytes) const {
  const uint64_t key = key_of(bytes);
  const size_t mask = slots_.size() - 1;
  for (size_t at = slot_hash(key, bytes.size()) >> shift_; slots_[at].length != 0; at = (at + 1) & mask) {
    const Slot& slot = slots_[at];
    if (slot.key != key || slot.length != bytes.size()) continue;
    if (slot.length <= 8 || this->bytes(slot.id) == bytes) return slot.id;
  }
  return -1;
}

void Vocabulary::append_piece(std::string_view piece, std::vector<int32_t>& out) const {
  if (const int32_t id = find(piece); id >= 0) {
    out.push_back(id);
  } else if (piece.size() <= kShortPiece) {
    if (!piece.empty()) merge_short(piece, out);
  } else {
    merge_long(piece, out);
  }
}

// Parts are [begin[i], begin[i + 1]); rank[i] is that of parts i and i + 1 joined.
void Vocabulary::merge_short(std::string_view piece, std::vector<int32_t>& out) const {
  std::array<uint8_t, kShortPiece + 2> begin;
  std::array<int32_t, kShortPiece + 1> rank;
  size_t parts = piece.size();
  DCHECK(parts >= 2 && parts <= kShortPiece);
  for (size_t i = 0; i <= parts; ++i) begin[i] = static_cast<uint8_t>(i);
  const auto joined = [&](size_t i) {
    if (i + 2 > parts) return kNoRank;
    const size_t length = begin[i + 2] - begin[i];
    const int32_t id = length > longest_ ? -1 : find_multibyte(piece.substr(begin[i], length));
    return id < 0 ? kNoRank : id;
  };
  for (size_t i = 0; i + 1 < parts; ++i) {
    const int32_t id = byte_pair_ids_[static_cast<uint8_t>(piece[i]) << 8 | static_cast<uint8_t>(piece[i + 1])];
    rank[i] = id < 0 ? kNoRank : id;
  }
  rank[parts - 1] = kNoRank;
  while (true) {
    int32_t lowest = kNoRank;  // the minimum first, then its place: the compiler vectorises both, not std::min_element
    for (size_t i = 0; i < parts; ++i) lowest = std::min(lowest, rank[i]);
    if (lowest == kNoRank) break;
    const size_t i = static_cast<size_t>(std::find(rank.begin(), rank.begin() + parts, lowest) - rank.begin());
    std::memmove(&begin[i + 1], &begin[i + 2], (parts - i - 1) * sizeof(begin[0]));
    std::memmove(&rank[i], &rank[i + 1], (parts - i - 1) * sizeof(rank[0]));
    --parts;
    rank[i] = joined(i);
    if (i > 0) rank[i - 1] = joined(i - 1);
  }
  for (size_t i = 0; i < parts; ++i) out.push_back(find(piece.substr(begin[i], begin[i + 1] - begin[i])));
}

// Parts form a linked list over byte positions. A heap entry is stale when its part is gone or has another rank by now;
// equal rank means equal bytes, so an entry is never taken for another pair.
void Vocabulary::merge_long(std::string_view piece, std::vector<int32_t>& out) const {
  struct Part {
    uint32_t previous;
    uint32_t next;  // where the part ends
    int32_t rank;   // of this part and the next joined; -1 once the part is gone
  };
  const auto size = static_cast<uint32_t>(piece.size());
  std::vector<Part> parts(size);
  std::vector<uint64_t> heap;  // rank << 32 | position: the least is the leftmost of the lowest rank
  const auto set_rank = [&](uint32_t at) {
    const uint32_t middle = parts[at].next;
    const size_t length = middle == size ? 0 : parts[middle].next - at;
    const int32_t id = length == 0 || length > longest_ ? -1 : find_multibyte(piece.substr(at, length));
    parts[at].rank = id < 0 ? kNoRank : id;
    if (id < 0) return false;
    heap.push_back(static_cast<uint64_t>(id) << 32 | at);
    return true;
  };
  for (uint32_t i = 0; i < size; ++i) parts[i] = {i == 0 ? 0 : i - 1, i + 1, kNoRank};
  for (uint32_t i = 0; i < size; ++i) set_rank(i);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto refresh = [&](uint32_t at) {
    if (set_rank(at)) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto at = static_cast<uint32_t>(heap.back());
    const auto rank = static_cast<int32_t>(heap.back() >> 32);
    heap.pop_back();
    if (parts[at].rank != rank) continue;
    const uint32_t gone = parts[at].next;
    parts[at].next = parts[gone].next;
    parts[gone].rank = -1;
    if (parts[at].next < size) parts[parts[at].next].previous = at;
    refresh(at);
    if (at > 0) refresh(parts[at].previous);
  }
  for (uint32_t at = 0; at < size; at = parts[at].next) out.push_back(find(piece.substr(at, parts[at].next - at)));
}

}  // namespace perigee
