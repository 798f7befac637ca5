#include "comm/cuda/peer_choose.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(PeerChoose, MailboxesHoldWhatIsSentThroughThem) {
  for (int32_t ranks = 2; ranks <= kMostPeers; ++ranks) {
    EXPECT_LE(one_shot_bytes(ranks), number_box_bytes(ranks));
    EXPECT_LE(one_shot_bytes(ranks) / 2 * 2, mailbox_bytes(ranks));  // a flag beside each 4 bytes
    EXPECT_GE(one_shot_bytes(ranks), size_t{4 * 7168}) << "a token of Kimi K2 always goes in one shot";
    EXPECT_EQ(mailbox_bytes(ranks) % 16, 0);
    EXPECT_EQ(number_box_bytes(ranks) % 16, 0);
    EXPECT_LE(one_shot_bytes(ranks + 1), one_shot_bytes(ranks)) << "the more ranks, the more is sent";
  }
}

TEST(PeerChoose, TheChoiceIsPrinted) {
  EXPECT_NE(peer_choices_text(4, true).find("4 GPUs: peer memory, one-shot up to"), std::string::npos);
  EXPECT_EQ(peer_choices_text(2, false), "collectives of 2 GPUs: through host memory");
  EXPECT_EQ(peer_choices_text(2, false, "they are far apart"),
            "collectives of 2 GPUs: through host memory, because they are far apart");
}

}  // namespace
}  // namespace perigee
