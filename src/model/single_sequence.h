// SingleSequence: one sequence, alone, with its own pages: the smallest caller of a Model. For tests and offline tools.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "model/model.h"
#include "ops/place_batch.h"
#include "tensor/tensor.h"

namespace perigee {

class SingleSequence {
 public:
  static constexpr int32_t kRingTokens = 8;

  // Room for `capacity` tokens. The pages lie in reverse order in the pool, so that a mix-up of page and block shows;
  // those of the recurrent state come first, and begin with zeros. Ranks that share a cache take blocks by turns.
  SingleSequence(const Model& model, Ops& ops, LatentFormat format, int64_t capacity) : model_(model), ops_(ops) {
    const CacheLayout layout = model.cache_layout(format);
    const int64_t blocks = (capacity + 63) / 64, pages = blocks + layout.state_pages();
    const int32_t num_ranks = ops.dcp().size();
    for (int32_t b = 0; num_ranks > 1 && b < blocks; ++b) {
      block_owners_.push_back(static_cast<uint8_t>(b % num_ranks));
      if (b % num_ranks == ops.dcp().rank()) blocks_here_.push_back(b);
    }
    memory_ = ops.make_buffer(static_cast<size_t>(pages * layout.page_bytes()));
    ring_ = ops.make_buffer(static_cast<size_t>(layout.ring_slot_bytes(kRingTokens)));
    pool_ = {.base = memory_.data(), .layout = layout, .ring = ring_.data(), .ring_tokens = kRingTokens};
    pages_.resize(static_cast<size_t>(pages));
    for (int64_t p = 0; p < pages; ++p) pages_[static_cast<size_t>(p)] = static_cast<int32_t>(pages - 1 - p);
    const std::vector<uint8_t> zeros(static_cast<size_t>(layout.page_bytes()));
    for (int32_t p = 0; p < layout.state_pages(); ++p)
      ops.copy(memory_.data() + pages_[static_cast<size_t>(p)] * layout.page_bytes(), zeros.data(), zeros.size());
  }

  // Runs `tokens` as one step; returns the logits of each of them, [n, vocab]: on every rank of a group the whole rows.
  std::vector<std::vector<float>> run(const std::vector<int32_t>& tokens, MlaForm form) {
    return run(tokens, form, all_of(tokens));
  }
  // The same with the logits of tokens `rows`, ascending.
  std::vector<std::vector<float>> run(const std::vector<int32_t>& tokens, MlaForm form,
                                      const std::vector<int32_t>& rows) {
    auto logits = step(tokens, form, true, rows);
    committed_ = length_;
    return logits;
  }

  // The same of at most kRingTokens tokens that reject() may take back until the next step (deferred commit, D7).
  std::vector<std::vector<float>> propose(const std::vector<int32_t>& tokens, MlaForm form) {
    const int32_t position = length_;
    auto logits = step(tokens, form, false, all_of(tokens));
    committed_ = position;
    return logits;
  }

  // The newest `count` tokens of propose() never were.
  void reject(int32_t count) {
    CHECK(length_ - count >= committed_, count, " of ", length_ - committed_, " proposed tokens rejected");
    length_ -= count;
  }

  // The most likely token after `tokens`, run as a decode row if it is one, else as a prompt; ties: the lower id.
  int32_t greedy(const std::vector<int32_t>& tokens) {
    const MlaForm form = model_.choose_form(TokenKind::kPrompt, static_cast<int64_t>(tokens.size()), length_);
    const auto logits = tokens.size() == 1 ? propose(tokens, MlaForm::kAbsorbed) : run(tokens, form);
    return static_cast<int32_t>(std::max_element(logits.back().begin(), logits.back().end()) - logits.back().begin());
  }

  int32_t length() const { return length_; }
  const PagePool& pool() const { return pool_; }
  // Of the token at `position`, where every block lies here.
  int32_t page_of(int32_t position) const {
    return pages_[static_cast<size_t>(pool_.layout.state_pages() + position / kRowsOfBlock)];
  }

 private:
  static std::vector<int32_t> all_of(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> rows(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  std::vector<std::vector<float>> step(const std::vector<int32_t>& tokens, MlaForm form, bool commit_all,
                                       const std::vector<int32_t>& rows) {
    const int32_t n = static_cast<int32_t>(tokens.size());
    std::vector<int32_t> positions(n);
    std::iota(positions.begin(), positions.end(), length_);
    const SequenceRows sequence{
        .first_row = 0,
        .num_tokens = n,
        .position = length_,
        .pages = pages_.data() + pool_.layout.state_pages(),
        .shared = {.here = blocks_here_, .owners = block_owners_.empty() ? nullptr : block_owners_.data()},
        .form = form,
        .state_pages = pages_.data(),
        .committed = committed_,
        .commit_all = commit_all};
    const Batch batch{
        .tokens = tokens, .positions = positions, .sequences = std::span(&sequence, 1), .logit_rows = rows};
    ops_.begin_step();
    const PlacedBatch placed(batch, ops_, pool_.layout.state_pages());
    const Tensor logits = model_.forward(placed.batch(), ops_, pool_).logits;
    length_ += n;
    std::vector<std::vector<float>> out;
    std::vector<float> share(static_cast<size_t>(logits.cols));
    for (int64_t r = 0; r < logits.rows; ++r) {
      ops_.copy(share.data(), logits.row<float>(r), share.size() * sizeof(float));
      out.emplace_back(share.size() * static_cast<size_t>(ops_.comm().size()));
      ops_.comm().all_gather(share.data(), share.size() * sizeof(float), out.back().data());
    }
    return out;
  }

  const Model& model_;
  Ops& ops_;
  Buffer memory_, ring_;
  PagePool pool_;
  std::vector<int32_t> pages_;
  std::vector<int32_t> blocks_here_;   // see SharedBlocks
  std::vector<uint8_t> block_owners_;  // none: every block lies here
  int32_t length_ = 0;
  int32_t committed_ = 0;  // of the recurrent state; the tokens after it are in the ring
};

}  // namespace perigee
