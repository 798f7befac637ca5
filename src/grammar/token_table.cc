#include "grammar/token_table.h"

#include <algorithm>

namespace perigee {

TokenTable::TokenTable(std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> ends)
    : tokenizer_(std::move(tokenizer)), ends_(std::move(ends)) {
  CHECK(!ends_.empty(), "no id ends a reply");
  for (const int32_t id : ends_) CHECK(id >= 0 && id < tokenizer_->vocab_size(), "an end out of range: ", id);
  ids_.reserve(static_cast<size_t>(num_ordinary()));
  for (int32_t id = 0; id < num_ordinary(); ++id) ids_.emplace(tokenizer_->bytes(id), id);
}

std::optional<int32_t> TokenTable::find(std::string_view bytes) const {
  const auto found = ids_.find(bytes);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

void TokenTable::append_fewest_ids(std::string_view text, std::vector<int32_t>& out) const {
  struct Step {
    int32_t ids;  // that the text from here on takes
    int32_t first;
  };
  // Long tokens are rare: looking for at most 24 bytes at a place keeps this linear, and short.
  const size_t longest = std::min<size_t>(tokenizer_->longest_token_bytes(), 24);
  std::vector<Step> steps(text.size() + 1, Step{0, -1});
  for (size_t begin = text.size(); begin-- > 0;) {
    Step best{INT32_MAX, -1};
    for (size_t length = 1; length <= std::min(longest, text.size() - begin); ++length) {
      const std::optional<int32_t> id = find(text.substr(begin, length));
      if (id && steps[begin + length].ids + 1 <= best.ids) best = {steps[begin + length].ids + 1, *id};
    }
    steps[begin] = best;
  }
  for (size_t at = 0; at < text.size(); at += tokenizer_->bytes(out.back()).size()) out.push_back(steps[at].first);
}

}  // namespace perigee
