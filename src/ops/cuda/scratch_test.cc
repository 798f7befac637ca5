// What a call takes at most, by its rows alone, against what calls of as many rows or fewer take. Without a GPU.
#include <gtest/gtest.h>

#include "ops/cuda/mla/latent_attention.h"
#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/moe/combine.h"
#include "ops/cuda/moe/route.h"

namespace perigee {
namespace {

// `most` holds what `need` asks for, also of fewer rows, and so it grows with them.
template <typename Most, typename Need>
void expect_bound(int64_t max_rows, Most&& most, Need&& need) {
  int64_t needed = 0;
  for (int64_t rows = 1; rows <= max_rows; ++rows) {
    needed = std::max(needed, need(rows));
    ASSERT_GE(most(rows), needed) << rows << " rows";
  }
}

TEST(Scratch, RouterScores) {
  for (const int64_t experts : {2, 8, 64, 128, 160, 256, 384, 1024})
    for (const int64_t hidden : {64, 256, 2048, 2304, 7168})
      for (const bool fixed : {false, true}) {
        SCOPED_TRACE(testing::Message() << experts << " experts, " << hidden << (fixed ? ", fixed" : ""));
        RouterWeight router;
        router.num_experts = experts;
        router.hidden = hidden;
        expect_bound(
            1500, [&](int64_t rows) { return route_most_scratch(rows, router, fixed); },
            [&](int64_t rows) { return route_scratch(rows, router, fixed); });
        EXPECT_EQ(route_most_scratch(40'000, router, fixed), route_scratch(40'000, router, fixed))
            << "no more than that";
      }
}

TEST(Scratch, SplitContexts) {
  for (const int64_t heads : {1, 2, 7, 8, 9, 16, 40, 128, 3000}) {
    SCOPED_TRACE(heads);
    expect_bound(
        1024, [&](int64_t rows) { return latent_attention_most_floats(rows, heads, 64); },
        [&](int64_t rows) { return latent_attention_floats(rows, heads, 64, latent_attention_splits(rows, heads)); });
  }
}

// Outputs of few pairs an expert are f32, those of many bf16.
TEST(Scratch, ExpertOutputs) {
  for (const int64_t first_narrow : {17, 64, 512, 2048})
    expect_bound(
        5000, [&](int64_t pairs) { return 4 * moe_most_parts(pairs, first_narrow); },
        [&](int64_t pairs) { return pairs * (pairs < first_narrow ? 4 : 2); });
  EXPECT_EQ(moe_most_parts(100, INT64_MAX), 100);
}

TEST(Scratch, DecodeWorkspace) {
  for (const int capability : {80, 90, 120})
    for (const int heads : {1, 4, 8, 16, 17, 32, 64, 128})
      for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF8E4M3, LatentFormat::kF8Tiles})
        for (const MlaLists lists : {MlaLists::kBalanced, MlaLists::kFixed}) {
          MlaDecodeShape shape{.heads = heads,
                               .max_pieces = 4160,
                               .format = format,
                               .lists = lists,
                               .multiprocessors = 132,
                               .compute_capability = capability};
          size_t needed = 0;
          for (int size = 1; size <= 256; ++size) {  // sequences and tokens at most
            SCOPED_TRACE(testing::Message() << capability << ", " << heads << " heads, " << size);
            for (const int sequences : {1, size / 2, size - 1, size})
              for (const int longest : {1, 2, 4, 16, size}) {
                if (sequences < 1 || longest > size - sequences + 1) continue;
                shape.max_sequences = sequences, shape.max_tokens = size, shape.max_query = longest;
                needed = std::max(needed, mla_decode_config(shape).workspace_bytes());
              }
            shape.max_sequences = shape.max_tokens = size, shape.max_query = 1;  // as a warm-up may have it
            ASSERT_GE(mla_most_workspace_bytes(shape), needed);
          }
        }
}

}  // namespace
}  // namespace perigee
