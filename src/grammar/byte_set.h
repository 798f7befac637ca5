// ByteSet: a set of bytes in four words, made of ranges.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace perigee {

class ByteSet {
 public:
  bool has(uint8_t byte) const { return (words_[byte / 64] >> (byte % 64) & 1) != 0; }
  void add(uint8_t byte) { words_[byte / 64] |= uint64_t{1} << (byte % 64); }
  void add_range(uint8_t first, uint8_t last) {
    for (size_t word = first / 64; word <= last / size_t{64}; ++word) words_[word] |= part(word, first, last);
  }
  void remove_range(uint8_t first, uint8_t last) {
    for (size_t word = first / 64; word <= last / size_t{64}; ++word) words_[word] &= ~part(word, first, last);
  }
  // The largest that is at most `byte`; 0 if there is none.
  uint8_t last_up_to(uint8_t byte) const {
    size_t word = byte / 64;
    for (uint64_t bits = words_[word] & part(word, 0, byte);; bits = words_[--word]) {
      if (bits != 0) return static_cast<uint8_t>(64 * word + 63 - static_cast<size_t>(std::countl_zero(bits)));
      if (word == 0) return 0;
    }
  }
  // The smallest that is above `byte`; 256 if there is none.
  int32_t first_above(uint8_t byte) const {
    if (byte == 255) return 256;
    const auto first = static_cast<uint8_t>(byte + 1);
    for (size_t word = first / 64; word < words_.size(); ++word)
      if (const uint64_t bits = words_[word] & part(word, first, 255); bits != 0)
        return static_cast<int32_t>(64 * word) + std::countr_zero(bits);
    return 256;
  }

 private:
  // The bits of a word that are in the range, which ends in that word or later and begins in it or earlier.
  static uint64_t part(size_t word, uint8_t first, uint8_t last) {
    uint64_t bits = ~uint64_t{0};
    if (word == first / size_t{64}) bits &= ~uint64_t{0} << (first % 64);
    if (word == last / size_t{64}) bits &= ~uint64_t{0} >> (63 - last % 64);
    return bits;
  }

  std::array<uint64_t, 4> words_{};
};

}  // namespace perigee
