// Plans, masks and results from another process: any bytes give an error that names a field, or a value whose encoding
// they are.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "control/plan_codec.h"

namespace {

template <typename T>
void check(const perigee::Result<T>& decoded, std::span<const uint8_t> bytes) {
  if (!decoded.ok()) {
    CHECK(!decoded.error().field.empty() && !decoded.error().message.empty());
    return;
  }
  std::vector<uint8_t> again;
  perigee::encode(*decoded, again);
  CHECK(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end()));
}

void decode(std::span<const uint8_t> bytes) {
  check(perigee::decode_plan(bytes), bytes);
  check(perigee::decode_masks(bytes), bytes);
  check(perigee::decode_result(bytes), bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  decode({data, size});
  // Once more as what follows a header that is right: byte 0 chooses the kind.
  if (size == 0) return 0;
  std::vector<uint8_t> frame;
  switch (data[0] % 3) {
    case 0: perigee::encode(perigee::StepPlan(), frame); break;
    case 1: perigee::encode(perigee::StepMasks(), frame); break;
    default: perigee::encode(perigee::StepResult(), frame);
  }
  frame.resize(perigee::kFrameHeaderBytes);
  frame.insert(frame.end(), data + 1, data + size);
  for (size_t i = 0; i < 4; ++i)
    frame[perigee::kFrameHeaderBytes - 4 + i] = static_cast<uint8_t>((size - 1) >> (8 * i));
  decode(frame);
  return 0;
}
