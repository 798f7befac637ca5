// Frames from another node: any bytes give an error that names a field, or a message whose encoding they are.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv/wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace perigee;
  const std::span<const uint8_t> bytes(data, size);
  if (size >= kWireHeaderBytes)
    if (const auto header = decode_header(bytes.first<kWireHeaderBytes>(), kMaxRequestBytes); header.ok())
      (void)check_digest(*header, bytes.subspan(kWireHeaderBytes), 1);
  if (size == 0) return 0;
  const auto message = decode_payload(data[0], bytes.subspan(1));
  if (!message.ok()) {
    CHECK(!message.error().field.empty() && !message.error().message.empty());
    return 0;
  }
  std::vector<uint8_t> again;
  encode(*message, 1, 2, 3, again);
  CHECK(std::equal(again.begin() + kWireHeaderBytes, again.end(), data + 1, data + size));
  return 0;
}
