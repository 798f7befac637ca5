#include "grammar/token_table.h"

#include <algorithm>
#include <cstring>

namespace perigee {

TokenTable::TokenTable(std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> ends)
    : tokenizer_(std::move(tokenizer)), ends_(std::move(ends)) {
  CHECK(!ends_.empty(), "no id ends a reply");
  for (const int32_t id : ends_) CHECK(id >= 0 && id < tokenizer_->vocab_size(), "an end out of range: ", id);
  longest_.resize(kNumStarts);
  for (int32_t id = 0; id < num_ordinary(); ++id) {
    const std::string_view bytes = tokenizer_->bytes(id);
    if (bytes.size() < kStart) continue;
    uint8_t& longest = longest_[start_of(bytes)];
    longest = std::max(longest, static_cast<uint8_t>(std::min<size_t>(bytes.size(), UINT8_MAX)));
  }
}

size_t TokenTable::start_of(std::string_view bytes) {
  static_assert(kStart == sizeof(uint32_t));
  uint32_t start;
  std::memcpy(&start, bytes.data(), kStart);
  return start * 0x9E3779B1U >> 16;
}

void TokenTable::append_fewest_ids(std::string_view text, std::vector<int32_t>& out) const {
  struct Step {
    int32_t ids;  // that the text from here on takes
    int32_t first;
  };
  constexpr size_t kMost = 24;  // longer tokens are rare: this keeps it linear
  std::vector<Step> steps(text.size() + 1, Step{0, -1});
  for (size_t begin = text.size(); begin-- > 0;) {
    Step best{INT32_MAX, -1};
    const std::string_view rest = text.substr(begin);
    const size_t longest = rest.size() < kStart ? rest.size() : std::max<size_t>(longest_[start_of(rest)], kStart - 1);
    for (size_t length = 1; length <= std::min({longest, rest.size(), kMost}); ++length) {
      const std::optional<int32_t> id = find(text.substr(begin, length));
      if (id && steps[begin + length].ids + 1 <= best.ids) best = {steps[begin + length].ids + 1, *id};
    }
    steps[begin] = best;
  }
  for (size_t at = 0; at < text.size(); at += tokenizer_->bytes(out.back()).size()) out.push_back(steps[at].first);
}

}  // namespace perigee
