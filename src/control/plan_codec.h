// Plans, masks and results as bytes, so that they can go to another process and be logged and replayed.
//
// A frame is: magic "PGSF", version (u16), kind (u16), length of the rest (u32), then the fields in the order of the
// structs in control/plan.h. Numbers are little-endian with the struct's width, lists begin with a u32 count, a bool is
// a byte. What a shared_ptr points to is written out. Equal values give equal bytes, and each value has one encoding.
//
// A decoder trusts no byte: it allocates no more than the frame's length justifies, and a bad frame is an error that
// names the field. A decoded value is whole (ids lie in StepPlan::tokens, ranges are ordered, decode rows are as many
// as it says, a checkpoint has its boundary); whether its slots and pages exist on this rank is the rank's to check.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "control/plan.h"

namespace perigee {

inline constexpr uint16_t kPlanCodecVersion = 3;
inline constexpr size_t kFrameHeaderBytes = 12;
inline constexpr size_t kMaxFrameBytes = size_t{256} << 20;

enum class FrameKind : uint16_t { kPlan = 1, kMasks = 2, kResult = 3 };

// Replaces the contents of `frame`, whose memory is reused.
void encode(const StepPlan& plan, std::vector<uint8_t>& frame);
void encode(const StepMasks& masks, std::vector<uint8_t>& frame);
void encode(const StepResult& result, std::vector<uint8_t>& frame);

// kBadInput, with the field's path ("rows.position.least").
Result<StepPlan> decode_plan(std::span<const uint8_t> frame);
Result<StepMasks> decode_masks(std::span<const uint8_t> frame);
Result<StepResult> decode_result(std::span<const uint8_t> frame);

}  // namespace perigee
