// TokenBound: at least how many tokens a text has, from its bytes alone and at about 1 GB/s.
//
// Each value of a byte weighs 1 / L, L being the length of the longest token that contains it. So the bytes of a token
// weigh at most 1 together, and a text has at least as many tokens as its bytes weigh, however it is tokenised.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace perigee {

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

}  // namespace perigee
