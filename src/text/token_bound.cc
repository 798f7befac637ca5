#include "text/token_bound.h"

#include <algorithm>

namespace perigee {

void TokenBound::add_token(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto share = static_cast<uint32_t>(kOneToken / bytes.size());
  for (const char byte : bytes) {
    uint32_t& weight = weights_[static_cast<uint8_t>(byte)];
    weight = std::min(weight, share);
  }
}

uint64_t TokenBound::weight(std::string_view text) const {
  uint64_t sums[4] = {};  // four chains of additions, since one would wait for each look-up
  size_t i = 0;
  for (; i + 4 <= text.size(); i += 4)
    for (size_t j = 0; j < 4; ++j) sums[j] += weight(text[i + j]);
  for (; i < text.size(); ++i) sums[0] += weight(text[i]);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

bool TokenBound::is_over(std::string_view text, uint64_t max_tokens) const {
  constexpr size_t kPiece = 4096;
  const uint64_t limit = max_tokens * kOneToken;
  uint64_t sum = 0;
  while (!text.empty() && sum <= limit) {
    const std::string_view piece = text.substr(0, kPiece);
    sum += weight(piece);
    text.remove_prefix(piece.size());
  }
  return sum > limit;
}

}  // namespace perigee
