// No step that a plan may ask for takes more memory than those of the warm-up. Without a GPU.
#include "exec/cuda/warm_up_shapes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"
#include "ops/cuda/kda/kda.h"
#include "ops/cuda/mla/mla_decode.h"

namespace perigee {
namespace {

struct Need {
  int64_t rows = 0, attention = 0, workspace = 0, kda_slots = 0;
};

// As CudaOps::mla_attend cuts a batch: absorbed rows up to the first expanded chunk; from there on all are expanded,
// one after the other, in memory that grows with a chunk's tokens and its context.
Need need_of(const std::vector<SequenceRows>& sequences, int64_t heads, bool recurrent) {
  constexpr int64_t kPiece = 8192, kAbsorbed = 2 * (576 + 512), kJoined = 4 * (128 + 1);
  Need need;
  int64_t absorbed = 0, expanded = 0, prefills = 0;
  int longest = 1;
  size_t count = 0;
  for (; count < sequences.size() && sequences[count].form != MlaForm::kExpanded; ++count) {
    absorbed += sequences[count].num_tokens;
    longest = std::max(longest, sequences[count].num_tokens);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SequenceRows& s = sequences[i];
    const int64_t context = s.position + s.num_tokens;
    need.rows += s.num_tokens;
    prefills += s.commit_all ? 1 : 0;
    if (i < count) continue;
    expanded = std::max(expanded, (context > kPiece ? s.num_tokens * heads * kJoined : 0) +
                                      std::min(context, kPiece) * (2 * 576 + heads * 256 * 2));
  }
  need.attention = absorbed * heads * kAbsorbed + expanded;
  if (absorbed > 0)
    need.workspace = static_cast<int64_t>(mla_most_workspace_bytes({.heads = static_cast<int>(heads),
                                                                    .max_sequences = static_cast<int>(count),
                                                                    .max_tokens = static_cast<int>(absorbed),
                                                                    .max_query = longest,
                                                                    .multiprocessors = 132,
                                                                    .compute_capability = 90}));
  if (recurrent && prefills > 0) need.kda_slots = need.rows / kKdaChunk + prefills * kda_max_chunks(kKdaChunk - 1);
  return need;
}

Need most_of(const StepLimits& limits, int64_t heads) {
  Need most;
  for (const std::vector<SequenceRows>& sequences : warm_up_shapes(limits)) {
    const Need need = need_of(sequences, heads, limits.recurrent);
    most.rows = std::max(most.rows, need.rows);
    most.attention = std::max(most.attention, need.attention);
    most.workspace = std::max(most.workspace, need.workspace);
    most.kda_slots = std::max(most.kda_slots, need.kda_slots);
  }
  return most;
}

// Decode rows, then chunks of any length and form, within the limits.
std::vector<SequenceRows> random_step(const StepLimits& limits, Rng& rng) {
  const auto between = [&](int64_t a, int64_t b) { return static_cast<int32_t>(rng.between(a, b)); };
  std::vector<SequenceRows> sequences;
  const int32_t count = rng.chance(0.3) ? limits.sequences : between(1, limits.sequences);
  const int32_t decodes = rng.chance(0.3) ? 0 : rng.chance(0.3) ? count - 1 : between(0, count);
  int32_t left = limits.tokens - count;  // beyond one each
  for (int32_t i = 0; i < count; ++i) {
    SequenceRows& s = sequences.emplace_back();
    s.num_tokens = 1;
    if (i >= decodes) {
      const int32_t most = std::min(left, limits.sequence_tokens - 1);
      s.num_tokens += rng.chance(0.4) ? most : between(0, most);
      s.form = rng.chance(0.5) ? MlaForm::kExpanded : MlaForm::kAbsorbed;
      s.commit_all = limits.recurrent;
    }
    left -= s.num_tokens - 1;
    s.position =
        rng.chance(0.5) ? limits.sequence_tokens - s.num_tokens : between(0, limits.sequence_tokens - s.num_tokens);
  }
  return sequences;
}

TEST(WarmUpShapes, BoundEveryStep) {
  Rng rng(3);
  for (int trial = 0; trial < 600; ++trial) {
    StepLimits limits;
    limits.sequences = static_cast<int32_t>(rng.chance(0.2) ? 1 : rng.between(1, rng.chance(0.5) ? 16 : 200));
    limits.tokens = static_cast<int32_t>(rng.chance(0.3) ? limits.sequences : rng.between(limits.sequences, 3000));
    limits.sequence_tokens = static_cast<int32_t>(64 * rng.between(1, rng.chance(0.5) ? 20 : 400));
    limits.recurrent = rng.chance(0.5);
    const int64_t heads = int64_t{4} << rng.below(6);
    SCOPED_TRACE(testing::Message() << limits.sequences << " sequences, " << limits.tokens << " tokens of "
                                    << limits.sequence_tokens << ", " << heads << " heads");
    const Need most = most_of(limits, heads);
    for (int step = 0; step < 60; ++step) {
      const Need need = need_of(random_step(limits, rng), heads, limits.recurrent);
      ASSERT_LE(need.rows, most.rows);
      ASSERT_LE(need.attention, most.attention);
      ASSERT_LE(need.workspace, most.workspace);
      ASSERT_LE(need.kda_slots, most.kda_slots);
    }
  }
}

TEST(WarmUpShapes, KeepToTheLimits) {
  for (const StepLimits& limits :
       {StepLimits{1, 1, 64, true}, StepLimits{1, 500, 64, true}, StepLimits{8, 8, 128, false},
        StepLimits{8, 2000, 128, true}, StepLimits{128, 2048, 4096, true}})
    for (const std::vector<SequenceRows>& sequences : warm_up_shapes(limits)) {
      EXPECT_EQ(std::ssize(sequences), limits.sequences);
      int32_t row = 0;
      int64_t context = 0;
      for (const SequenceRows& s : sequences) {
        context += s.position + s.num_tokens;
        EXPECT_EQ(s.first_row, row);
        EXPECT_GE(s.num_tokens, 1);
        EXPECT_GE(s.position, 0);
        EXPECT_LE(s.position + s.num_tokens, limits.sequence_tokens);
        row += s.num_tokens;
      }
      EXPECT_LE(row, limits.tokens);
      EXPECT_LE(context, limits.sequence_tokens + limits.tokens);  // the start must not take minutes
    }
}

}  // namespace
}  // namespace perigee
