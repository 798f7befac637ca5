#include "exec/cuda/warm_up_shapes.h"

#include <algorithm>

namespace perigee {
namespace {

// `rows` rows of `count` sequences, at least one each, the last ones as long as they can be; absorbed.
std::vector<SequenceRows> longest_last(int32_t count, int32_t rows, const StepLimits& limits) {
  std::vector<SequenceRows> sequences(static_cast<size_t>(count));
  int32_t left = rows - count;
  for (auto s = sequences.rbegin(); s != sequences.rend(); ++s) {
    s->num_tokens = 1 + std::clamp(left, 0, limits.sequence_tokens - 1);
    s->commit_all = limits.recurrent && s->num_tokens > 1;
    left -= s->num_tokens - 1;
  }
  return sequences;
}

// The last sequence alone has the longest context: expanded chunks attend one after the other in the same memory, and
// a thousand of them on a million tokens each would take minutes.
void place(std::vector<SequenceRows>& sequences, const StepLimits& limits) {
  int32_t first_row = 0;
  for (SequenceRows& s : sequences) {
    s.first_row = first_row;
    first_row += s.num_tokens;
  }
  sequences.back().position = limits.sequence_tokens - sequences.back().num_tokens;
}

}  // namespace

std::vector<std::vector<SequenceRows>> warm_up_shapes(const StepLimits& limits) {
  const int32_t count = limits.sequences;
  // All rows absorbed.
  std::vector<std::vector<SequenceRows>> shapes = {longest_last(count, limits.tokens, limits)};
  // The longest chunk expanded; and beside one expanded token as many absorbed rows as there can be.
  shapes.push_back(shapes[0]);
  shapes.back().back().form = MlaForm::kExpanded;
  if (count > 1) {
    shapes.push_back(longest_last(count - 1, limits.tokens - 1, limits));
    shapes.back().push_back({.num_tokens = 1, .form = MlaForm::kExpanded, .commit_all = limits.recurrent});
  }
  // As many prefills as there can be.
  std::vector<SequenceRows>& prefills = shapes.emplace_back(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {  // these shares sum up to `tokens`, if there is room
    SequenceRows& s = prefills[static_cast<size_t>(i)];
    s.num_tokens = std::min((limits.tokens + i) / count, limits.sequence_tokens);
    s.form = MlaForm::kExpanded;
    s.commit_all = limits.recurrent;
  }
  for (std::vector<SequenceRows>& sequences : shapes) place(sequences, limits);
  return shapes;
}

}  // namespace perigee
