#include "control/plan_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "base/rng.h"

namespace perigee {
namespace {

using Frame = std::vector<uint8_t>;

// Values of every kind, valid as far as a decoder checks them.
class Draw {
 public:
  explicit Draw(uint64_t seed) : rng_(seed) {}

  StepPlan plan() {
    StepPlan plan{.step = StepId(static_cast<int64_t>(rng_.next() >> 1)), .eager = rng_.chance(0.5)};
    repeat([&] { plan.starts.push_back(start()); });
    repeat([&] { plan.appends.push_back({slot(), number(), place()}); });
    plan.tokens = numbers();
    plan.tokens.resize(plan.tokens.size() + 1);
    repeat([&] { plan.rows.push_back(row(static_cast<int32_t>(plan.tokens.size()))); });
    repeat([&] { plan.checkpoints.push_back(checkpoint_write()); });
    while (plan.num_decode_rows < std::ssize(plan.rows) && rng_.chance(0.8) &&
           plan.rows[static_cast<size_t>(plan.num_decode_rows)].prefill() == nullptr)
      ++plan.num_decode_rows;
    return plan;
  }
  StepMasks masks() {
    StepMasks masks{.step = StepId(number()), .rows = {}};
    repeat([&] {
      RowMask& row = masks.rows.emplace_back(RowMask{.slot = slot(), .words = {}});
      repeat([&] { row.words.push_back(static_cast<uint32_t>(rng_.next())); });
    });
    return masks;
  }
  StepResult result() {
    StepResult result{.step = StepId(number()), .rows = {}};
    repeat([&] { result.rows.push_back(row_result()); });
    if (rng_.chance(0.2)) result.device_lost = std::string("lost \0 here", 11);
    return result;
  }

 private:
  template <typename Make>
  void repeat(Make make) {
    for (int64_t i = rng_.between(0, 4); i > 0; --i) make();
  }
  int32_t number() { return static_cast<int32_t>(rng_.next()); }
  float fraction() { return static_cast<float>(rng_.unit()) * (rng_.chance(0.5) ? -1e10f : 1e-10f); }
  SlotId slot() { return SlotId(number()); }
  SequenceId sequence() { return SequenceId(static_cast<int64_t>(rng_.next())); }
  Placement place() { return {PageId(number()), number()}; }
  std::vector<Placement> places() {
    std::vector<Placement> places;
    repeat([&] { places.push_back(place()); });
    return places;
  }
  std::vector<int32_t> numbers() {
    std::vector<int32_t> numbers;
    repeat([&] { numbers.push_back(number()); });
    return numbers;
  }
  SequenceStart start() {
    SamplingParams sampling{.temperature = fraction(), .top_k = number(), .top_p = fraction(), .min_p = fraction()};
    sampling.presence_penalty = fraction();
    sampling.frequency_penalty = fraction();
    sampling.repetition_penalty = fraction();
    sampling.seed = rng_.next();
    repeat([&] { sampling.logit_bias.emplace_back(number(), fraction()); });
    sampling.max_tokens = number();
    sampling.min_tokens = number();
    sampling.stop_ids = numbers();
    sampling.logprobs = number();
    sampling.prompt_logprobs = number();
    return {.slot = slot(),
            .sequence = sequence(),
            .tokens = std::make_shared<const std::vector<int32_t>>(numbers()),
            .num_prompt_tokens = number(),
            .num_cached_tokens = number(),
            .sampling = std::make_shared<const SamplingParams>(std::move(sampling)),
            .state_pages = places(),
            .checkpoint = places()};
  }
  PlanRow row(int32_t num_tokens) {
    PlanRow row{.slot = slot(), .sequence = sequence(), .masked = rng_.chance(0.5)};
    row.position.least = static_cast<int32_t>(rng_.below(1 << 20));
    row.position.most = row.position.least + static_cast<int32_t>(rng_.below(8));
    const auto offset = static_cast<int32_t>(rng_.below(static_cast<uint64_t>(num_tokens)));
    const RowWork works[] = {Prefill{offset, num_tokens - offset, rng_.chance(0.5), rng_.chance(0.5)}, Decode(),
                             Verify{static_cast<int32_t>(rng_.below(kMaxDrafts + 1))}};
    row.work = works[rng_.below(3)];
    return row;
  }
  // For a boundary that its bounds hold, and no other.
  CheckpointWrite checkpoint_write() {
    const auto boundary = static_cast<int32_t>(rng_.between(1, INT32_MAX / kBlockTokens)) * kBlockTokens;
    const auto before = static_cast<int32_t>(rng_.between(1, kBlockTokens));
    const auto after = static_cast<int32_t>(rng_.between(0, kBlockTokens - 1));
    return {slot(), boundary - before, boundary + after, places()};
  }
  std::vector<TokenLogprobs> logprobs() {
    std::vector<TokenLogprobs> list;
    repeat([&] {
      TokenLogprobs& entry = list.emplace_back();
      entry = {.id = number(), .logprob = fraction(), .rank = number(), .top = {}};
      repeat([&] { entry.top.emplace_back(number(), fraction()); });
    });
    return list;
  }
  RowResult row_result() {
    RowResult row{.slot = slot(), .sequence = sequence()};
    for (int64_t i = rng_.between(0, kMaxDrafts + 1); i > 0; --i) row.ids.push_back(number());
    row.logprobs = logprobs();
    row.prompt_logprobs = logprobs();
    row.checkpoints = numbers();
    row.finite = rng_.chance(0.5);
    row.num_drafts = static_cast<int32_t>(rng_.between(0, kMaxDrafts));
    for (int64_t i = rng_.between(0, kMaxDrafts); i > 0; --i) row.drafts.push_back(number());
    return row;
  }

  Rng rng_;
};

template <typename T>
Frame frame_of(const T& value) {
  Frame frame = {1, 2, 3};  // what it held before is gone
  encode(value, frame);
  return frame;
}

// What a frame that is decoded gives; the kind by the value's type.
Result<StepPlan> decode(const Frame& frame, const StepPlan&) {
  return decode_plan(frame);
}
Result<StepMasks> decode(const Frame& frame, const StepMasks&) {
  return decode_masks(frame);
}
Result<StepResult> decode(const Frame& frame, const StepResult&) {
  return decode_result(frame);
}

template <typename Check>
void for_each_value(int num_seeds, Check check) {
  for (int seed = 0; seed < num_seeds; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(static_cast<uint64_t>(seed));
    check(draw.plan());
    check(draw.masks());
    check(draw.result());
  }
}

TEST(PlanCodec, WhatGoesInComesOut) {
  for_each_value(500, [](const auto& value) {
    const Frame frame = frame_of(value);
    const auto back = decode(frame, value);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_TRUE(*back == value);
    EXPECT_EQ(frame_of(*back), frame);
  });
}

// The pointers' targets count, not the pointers.
TEST(PlanCodec, EqualityIsOfValues) {
  const StepPlan a = Draw(3).plan(), b = Draw(3).plan();
  ASSERT_FALSE(a.starts.empty());
  EXPECT_TRUE(a == b);
  StepPlan c = b;
  SamplingParams sampling = *c.starts[0].sampling;
  ++sampling.seed;
  c.starts[0].sampling = std::make_shared<const SamplingParams>(sampling);
  EXPECT_FALSE(a == c);
}

TEST(PlanCodec, AFrameThatIsCutIsAnError) {
  for_each_value(20, [](const auto& value) {
    const Frame frame = frame_of(value);
    for (size_t size = 0; size < frame.size(); ++size) {
      Frame cut(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(size));
      const auto with_old_length = decode(cut, value);
      ASSERT_FALSE(with_old_length.ok()) << size;
      EXPECT_FALSE(with_old_length.error().field.empty());
      if (size < kFrameHeaderBytes) continue;
      const auto length = static_cast<uint32_t>(size - kFrameHeaderBytes);
      for (size_t i = 0; i < 4; ++i) cut[kFrameHeaderBytes - 4 + i] = static_cast<uint8_t>(length >> (8 * i));
      const auto with_new_length = decode(cut, value);
      ASSERT_FALSE(with_new_length.ok()) << size;
      EXPECT_NE(with_new_length.error().field, "length");
    }
  });
}

// Each byte changed: an error, or another value with exactly that encoding.
TEST(PlanCodec, NoTwoEncodingsOfAValue) {
  for_each_value(10, [](const auto& value) {
    const Frame frame = frame_of(value);
    for (size_t at = 0; at < frame.size(); ++at)
      for (const int change : {1, 0x80, 0xFF}) {
        Frame changed = frame;
        changed[at] = static_cast<uint8_t>(changed[at] ^ change);
        const auto back = decode(changed, value);
        ASSERT_TRUE(back.ok() || back.error().code == Code::kBadInput);
        ASSERT_TRUE(!back.ok() || frame_of(*back) == changed) << at;
      }
  });
}

class PlanCodecErrors : public testing::Test {
 protected:
  PlanCodecErrors() {
    plan_.step = StepId(7);
    plan_.rows = {{.slot = SlotId(1), .sequence = SequenceId(2), .position = {3, 4}, .work = Verify{5}}};
    plan_.tokens = {8, 9};
  }
  // The field that a frame is refused for after these bytes changed.
  std::string field(size_t at, const Frame& bytes) {
    Frame frame = frame_of(plan_);
    std::copy(bytes.begin(), bytes.end(), frame.begin() + static_cast<std::ptrdiff_t>(at));
    const Result<StepPlan> back = decode_plan(frame);
    return back.ok() ? "" : back.error().field;
  }
  static void put(Frame& frame, size_t at, int32_t value) {
    for (size_t i = 0; i < 4; ++i) frame[at + i] = static_cast<uint8_t>(static_cast<uint32_t>(value) >> (8 * i));
  }
  StepPlan plan_;
  static constexpr size_t kStarts = kFrameHeaderBytes + 8, kRows = kStarts + 8, kRow = kRows + 4;
  static constexpr size_t kCheckpoint = kRow + 42;  // of one row of 26 bytes and two ids
};

TEST_F(PlanCodecErrors, NameTheField) {
  EXPECT_EQ(field(0, {0}), "magic");
  EXPECT_EQ(field(4, {kPlanCodecVersion + 1}), "version");
  EXPECT_EQ(field(6, {3}), "kind");
  EXPECT_EQ(field(8, {0}), "length");
  EXPECT_EQ(field(kRow + 12, {5}), "rows.position.most") << "least over most";
  EXPECT_EQ(field(kRow + 15, {0x80}), "rows.position.most") << "a negative position";
  EXPECT_EQ(field(kRow + 20, {3}), "rows.work.alternative");
  EXPECT_EQ(field(kRow + 21, {kMaxDrafts + 1}), "rows.work.num_drafts");
  EXPECT_EQ(field(kRow + 25, {2}), "rows.masked");
  EXPECT_EQ(field(kRow + 25, {0}), "");
}

// Before a byte of memory is taken for them.
TEST_F(PlanCodecErrors, ListsAreBounded) {
  EXPECT_EQ(field(kStarts, {0xFF, 0xFF, 0xFF, 0xFF}), "starts");
  EXPECT_EQ(field(kRows, {0xFF, 0xFF, 0, 0}), "rows") << "within the limit, but not within the frame";
  EXPECT_EQ(field(kRow + 26, {0xFF, 0xFF, 0xFF, 0}), "tokens");
}

TEST_F(PlanCodecErrors, AChunksIdsLieInThePlan) {
  for (const auto& [offset, num_tokens] : {std::pair{0, 3}, {2, 1}, {-1, 2}, {1, INT32_MAX}}) {
    plan_.rows[0].work = Prefill{.tokens_offset = 0, .num_tokens = 2};
    Frame frame = frame_of(plan_);
    put(frame, kRow + 21, offset);
    put(frame, kRow + 25, num_tokens);
    const Result<StepPlan> back = decode_plan(frame);
    ASSERT_FALSE(back.ok());
    EXPECT_EQ(back.error().field, "rows.work.tokens_offset");
  }
}

// A lower bound that is negative would overflow where the boundary is worked out.
TEST_F(PlanCodecErrors, ACheckpointHasOneBoundary) {
  plan_.checkpoints = {{.slot = SlotId(1), .lower = 63, .upper = 64, .pages = {}}};
  const Frame frame = frame_of(plan_);
  for (const auto& [lower, upper] : {std::pair{64, 64},
                                     {0, 63},
                                     {0, 128},
                                     {63, 128},
                                     {-1, 64},
                                     {INT32_MIN, 64},
                                     {INT32_MIN, INT32_MIN},
                                     {64, 63},
                                     {INT32_MAX, INT32_MAX}}) {
    Frame changed = frame;
    put(changed, kCheckpoint + 4, lower);
    put(changed, kCheckpoint + 8, upper);
    const Result<StepPlan> back = decode_plan(changed);
    ASSERT_FALSE(back.ok()) << lower << " to " << upper;
    EXPECT_EQ(back.error().field, "checkpoints.upper");
  }
  EXPECT_TRUE(decode_plan(frame).ok());
}

TEST_F(PlanCodecErrors, DecodeRowsComeFirstAndAreCounted) {
  plan_.num_decode_rows = 1;
  const size_t at = kRow + 42;  // behind ids and checkpoints
  EXPECT_EQ(field(at, {1}), "");
  EXPECT_EQ(field(at, {2}), "num_decode_rows");
  EXPECT_EQ(field(at, {0xFF, 0xFF, 0xFF, 0xFF}), "num_decode_rows");
  plan_.rows = {{.slot = SlotId(1), .sequence = SequenceId(2), .position = {3, 3}, .work = Prefill{.num_tokens = 2}}};
  plan_.num_decode_rows = 0;
  EXPECT_EQ(field(at + 6, {0}), "");
  EXPECT_EQ(field(at + 6, {1}), "num_decode_rows") << "the row is a chunk";
}

TEST(PlanCodec, OddFloatsKeepTheirBits) {
  StepResult result{.step = StepId(0), .rows = {}};
  for (const float value : {-0.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    RowResult row;
    row.logprobs = {{.id = 1, .logprob = value, .rank = 1, .top = {}}};
    result.rows = {row};
    const Frame frame = frame_of(result);
    EXPECT_EQ(frame_of(*decode_result(frame)), frame);
  }
}

// The bytes of a small plan. Where they change, kPlanCodecVersion must, too.
TEST(PlanCodec, TheFormatIsPinned) {
  StepPlan plan{.step = StepId(0x0102030405060708)};
  plan.appends = {{.slot = SlotId(1), .block_index = 2, .place = {PageId(3), 1}}};
  plan.rows = {
      {.slot = SlotId(1), .sequence = SequenceId(-1), .position = {64, 67}, .work = Verify{3}, .masked = true}};
  plan.tokens = {0x11223344};
  plan.num_decode_rows = 1;
  std::string hex;
  for (const uint8_t byte : frame_of(plan)) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    hex += digits;
  }
  EXPECT_EQ(hex,
            "50475346"  // magic
            "0300"
            "0100"      // version, kind
            "4f000000"  // length
            "0807060504030201"
            "00000000"  // starts
            "01000000"
            "01000000"
            "02000000"
            "03000000"
            "01000000"
            "01000000"
            "01000000"
            "ffffffffffffffff"
            "40000000"
            "43000000"
            "02"
            "03000000"
            "01"
            "01000000"
            "44332211"
            "00000000"  // checkpoints
            "01000000"
            "00");
}

}  // namespace
}  // namespace perigee
