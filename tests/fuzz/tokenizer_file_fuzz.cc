// Tokenizer files: INPUT = tiktoken lines, 0xFF, tokenizer_config.json, 0xFF, a text to encode. A first byte '+' puts
// the lines after a good file of the 256 single bytes, so that the fuzzer gets past "a byte is missing".
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "text/test_vocabulary.h"
#include "text/tokenizer.h"

namespace perigee {
namespace {

std::string_view take_part(std::string_view& input) {
  const std::string_view part = input.substr(0, input.find('\xFF'));
  input.remove_prefix(std::min(input.size(), part.size() + 1));
  return part;
}

void check_round_trip(const Tokenizer& tokenizer, std::string_view text) {
  const auto joined = [&](const std::vector<int32_t>& ids) {
    std::string out;
    for (const int32_t id : ids) out += tokenizer.bytes(id);
    return out;
  };
  const auto plain = tokenizer.encode(text, SpecialsIn::kPlainText);
  CHECK(joined(plain) == text);
  CHECK(joined(tokenizer.encode(text, SpecialsIn::kRecognised)) == text);
  if (text.find(kNeutral.substr(0, 1)) != std::string_view::npos) return;
  CHECK(tokenizer.encode_rendered(tokenizer.neutralise(text)) == plain);
}

}  // namespace
}  // namespace perigee

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace perigee;
  static const std::string kSingleBytes = tiktoken_file();
  std::string_view input(reinterpret_cast<const char*>(data), size);
  std::string file;
  if (input.starts_with('+')) {
    input.remove_prefix(1);
    file = kSingleBytes;
  }
  file += take_part(input);
  auto specials = parse_tokenizer_config(take_part(input));
  const auto tokenizer = Tokenizer::create(file, specials.ok() ? std::move(*specials) : std::vector<SpecialToken>{});
  if (tokenizer.ok()) check_round_trip(**tokenizer, input);
  return 0;
}
