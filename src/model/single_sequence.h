// SingleSequence: one sequence, alone, with its own pages: the smallest caller of a Model. For tests and offline tools.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "model/model.h"
#include "tensor/arena.h"

namespace perigee {

class SingleSequence {
 public:
  // Room for `capacity` tokens. The pages lie in reverse order in the pool, so that a mix-up of page and block shows.
  SingleSequence(const Model& model, Ops& ops, DType cache_dtype, int64_t capacity) : model_(model), ops_(ops) {
    const int64_t blocks = (capacity + 63) / 64;
    layout_ = model.cache_layout(cache_dtype);
    memory_ = Buffer(static_cast<size_t>(blocks * layout_.page_bytes()));
    pages_.resize(blocks);
    for (int64_t b = 0; b < blocks; ++b) pages_[b] = static_cast<int32_t>(blocks - 1 - b);
  }

  // Runs `tokens` as one step; returns the logits of each of them, [n, vocab].
  std::vector<std::vector<float>> run(const std::vector<int32_t>& tokens, MlaForm form) {
    const int32_t n = static_cast<int32_t>(tokens.size());
    std::vector<int32_t> positions(n), rows(n);
    std::iota(positions.begin(), positions.end(), length_);
    std::iota(rows.begin(), rows.end(), 0);
    const SequenceRows sequence{
        .first_row = 0, .num_tokens = n, .position = length_, .pages = pages_.data(), .form = form};
    const Batch batch{
        .tokens = tokens, .positions = positions, .sequences = std::span(&sequence, 1), .logit_rows = rows};
    ops_.begin_step();
    const Tensor logits = model_.forward(batch, ops_, {.base = memory_.data(), .layout = layout_});
    length_ += n;
    std::vector<std::vector<float>> out;
    for (int64_t r = 0; r < n; ++r) out.emplace_back(logits.row<float>(r), logits.row<float>(r) + logits.cols);
    return out;
  }

  // The most likely token after `tokens`, which are run in the form that the model chooses; ties: the lower id.
  int32_t greedy(const std::vector<int32_t>& tokens) {
    const auto logits = run(tokens, model_.choose_form(static_cast<int64_t>(tokens.size()), length_, false));
    return static_cast<int32_t>(std::max_element(logits.back().begin(), logits.back().end()) - logits.back().begin());
  }

  int32_t length() const { return length_; }

 private:
  const Model& model_;
  Ops& ops_;
  CacheLayout layout_;
  Buffer memory_;
  std::vector<int32_t> pages_;
  int32_t length_ = 0;
};

}  // namespace perigee
