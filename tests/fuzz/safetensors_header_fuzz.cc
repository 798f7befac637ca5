// The safetensors header parser: any bytes give an error or entries that cover the data exactly.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "model/safetensors.h"

namespace {

void parse(std::span<const uint8_t> file) {
  const auto header = perigee::parse_safetensors(file);
  if (!header.ok()) {
    CHECK(!header.error().message.empty());
    return;
  }
  uint64_t at = 0;
  for (const perigee::SafetensorsEntry& entry : header->entries) {
    CHECK(entry.begin == at && entry.end >= entry.begin);
    uint64_t bytes = static_cast<uint64_t>(entry.type->bytes);
    for (const int64_t dim : entry.shape) bytes *= static_cast<uint64_t>(dim);
    CHECK(bytes == entry.end - entry.begin);
    at = entry.end;
  }
  CHECK(header->data_begin + at == file.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  parse({data, size});
  // Once more with a header length that is right: byte 0 says how many bytes of data follow the header.
  if (size < 8) return 0;
  std::vector<uint8_t> file(data, data + size);
  const uint64_t rest = size - 8;
  const uint64_t length = rest - std::min<uint64_t>(rest, data[0]);
  std::memcpy(file.data(), &length, sizeof(length));
  parse(file);
  return 0;
}
