#include "main/acceptance.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

constexpr const char* kMetrics =
    "# TYPE vllm:spec_decode_num_drafts_total counter\n"
    "vllm:spec_decode_num_drafts_total{engine=\"0\",model_name=\"tiny\"} 10\n"
    "vllm:spec_decode_num_draft_tokens_total{engine=\"0\"} 30\n"
    "vllm:spec_decode_num_accepted_tokens_total{engine=\"0\"} 12\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"0\"} 8\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"1\"} 4\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"4000000000\"} 4\n"
    "vllm:spec_decode_num_drafts_total\n";

TEST(Acceptance, IsReadFromMetrics) {
  EXPECT_EQ(read_acceptance(kMetrics), (Acceptance{.rows = 10, .drafts = 30, .accepted_at = {8, 4}}));
  EXPECT_EQ(read_acceptance("vllm:num_requests_running{engine=\"0\"} 3\n"), Acceptance());
}

TEST(Acceptance, IsOfWhatCameBetween) {
  const Acceptance before{.rows = 6, .drafts = 18, .accepted_at = {6}}, after = read_acceptance(kMetrics);
  EXPECT_EQ(acceptance_text(before, after),
            "Drafts: 4 rows verified 12 tokens, accepted by place 0.500 1.000, mean length 2.50");
  EXPECT_EQ(acceptance_text(after, after), "");
}

}  // namespace
}  // namespace perigee
