// Must crash within a second: proves that the fuzzers are awake. tools/fuzz fails when it does not.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size >= 3 && std::memcmp(data, "moo", 3) == 0) std::abort();
  return 0;
}
