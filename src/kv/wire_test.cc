// Frames: what is encoded is decoded, and nothing else.
#include "kv/wire.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/rng.h"

namespace perigee {
namespace {

std::vector<WireMessage> examples() {
  return {Hello{make_nonce()},
          Welcome{make_nonce(), tag_of("secret", "server", {}, {})},
          Proof{tag_of("secret", "client", {}, {})},
          Ready{{.model = "m",
                 .numbers = "bf16",
                 .block_bytes = 5,
                 .state_layers = 2,
                 .state_heads = 3,
                 .state_unit_bytes = 4,
                 .draft = "d",
                 .draft_numbers = "e4m3",
                 .draft_parts = 6,
                 .draft_unit_bytes = 7,
                 .deterministic = true},
                99},
          OpenLease{{7, 8}, 2, {1, 2, -3}},
          ReadUnits{{7, 8}, {UnitGroup::kDraft, 3, 4}},
          ExtendLease{{7, 8}},
          ReleaseLease{{7, 8}},
          Done{},
          Refused{Code::kNotFound, "over"},
          Carry{kCarryCudaIpc, {1, 2, 3}},
          Carried{{4, 5}},
          StageUnits{{7, 8}, {UnitGroup::kState, 3, 4}, 2},
          Staged{{9, 10}, {0, 1}},
          Held{{3, LeaseStage::kWithdrawn, 190, true}},
          AwaitGrowth{5, 6},
          Grown{7}};
}

Result<WireMessage> decoded(std::span<const uint8_t> frame, uint64_t session, size_t max_bytes = kMaxRequestBytes) {
  if (frame.size() < kWireHeaderBytes) return bad_input("short");
  ASSIGN_OR_RETURN(const WireHeader header, decode_header(frame.first<kWireHeaderBytes>(), max_bytes));
  const auto payload = frame.subspan(kWireHeaderBytes);
  if (payload.size() != header.payload_bytes) return bad_input("size");
  RETURN_IF_ERROR(check_digest(header, payload, session));
  return decode_payload(header.type, payload);
}

TEST(Wire, ThereIsAnExampleOfEachMessage) {
  const std::vector<WireMessage> all = examples();
  ASSERT_EQ(all.size(), std::variant_size_v<WireMessage>);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].index(), i);
}

TEST(Wire, RoundTrip) {
  for (const WireMessage& message : examples()) {
    std::vector<uint8_t> frame;
    encode(message, 3, 4, 5, frame);
    const auto again = decoded(frame, 5);
    ASSERT_TRUE(again.ok()) << again.error().message;
    EXPECT_TRUE(*again == message) << message.index();
  }
}

TEST(Wire, EveryDamagedBitAndEveryCutIsSeen) {
  for (const WireMessage& message : examples()) {
    std::vector<uint8_t> frame;
    encode(message, 3, 4, 5, frame);
    for (size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      frame[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      EXPECT_FALSE(decoded(frame, 5).ok()) << "message " << message.index() << " bit " << bit;
      frame[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    }
    EXPECT_FALSE(decoded(frame, 6).ok()) << "of another session";
    for (size_t size = kWireHeaderBytes; size < frame.size(); ++size) {
      const auto payload = std::span(frame).first(size).subspan(kWireHeaderBytes);
      EXPECT_FALSE(decode_payload(static_cast<uint16_t>(message.index()), payload).ok());
    }
  }
}

TEST(Wire, SizesMeetTheirCapsFirst) {
  std::vector<uint8_t> frame;
  encode(OpenLease{{7, 8}, 2, std::vector<int32_t>(100)}, 3, 4, 5, frame);
  EXPECT_EQ(decoded(frame, 5, 64).error().field, "payload_bytes");
  std::vector<uint8_t> payload(20 + 4, 0xff);  // a list of 2^32 - 1 tokens that has none
  EXPECT_EQ(decode_payload(4, payload).error().field, "tokens");
  EXPECT_FALSE(decode_payload(99, {}).ok());
}

TEST(Wire, ALeaseHasNoFewerThanNoBlocks) {
  std::vector<uint8_t> frame;
  encode(Held{{std::numeric_limits<int32_t>::min(), LeaseStage::kWhole}}, 3, 4, 5, frame);
  EXPECT_EQ(decoded(frame, 5).error().field, "num_blocks");
}

TEST(Wire, ALeaseThatHasFailedIsOver) {
  std::vector<uint8_t> frame;
  encode(Held{{3, LeaseStage::kFailed}}, 3, 4, 5, frame);
  EXPECT_EQ(decoded(frame, 5).error().field, "stage");
}

TEST(Wire, ATagIsOfOneSecretUseAndPairOfNonces) {
  const Nonce a = make_nonce(), b = make_nonce();
  EXPECT_NE(a, b);
  const Tag tag = tag_of("secret", "client", a, b);
  EXPECT_TRUE(same_tag(tag, tag_of("secret", "client", a, b)));
  EXPECT_FALSE(same_tag(tag, tag_of("other", "client", a, b)));
  EXPECT_FALSE(same_tag(tag, tag_of("secret", "server", a, b)));
  EXPECT_FALSE(same_tag(tag, tag_of("secret", "client", b, a)));
  EXPECT_NE(session_of("secret", a, b), session_of("secret", a, a));
}

}  // namespace
}  // namespace perigee
