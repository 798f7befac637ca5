// Test only: small vocabularies with Kimi's special tokens, and the real one where a machine has it.
#pragma once

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace perigee {

inline std::string to_base64(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j) bits = bits << 8 | (i + j < bytes.size() ? static_cast<uint8_t>(bytes[i + j]) : 0u);
    for (size_t j = 0; j < 4; ++j) out += i + j > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * j) & 63];
  }
  return out;
}

// A tiktoken file: the 256 single bytes, then `merges` in order.
inline std::string tiktoken_file(const std::vector<std::string>& merges = {}) {
  std::string out;
  int rank = 0;
  for (int byte = 0; byte < 256; ++byte)
    out += to_base64(std::string(1, static_cast<char>(byte))) + " " + std::to_string(rank++) + "\n";
  for (const std::string& token : merges) out += to_base64(token) + " " + std::to_string(rank++) + "\n";
  return out;
}

// Kimi's named specials; the first has the id `first`.
inline std::vector<SpecialToken> kimi_specials(int32_t first) {
  return {{first + 0, "[BOS]", true},
          {first + 1, "[EOS]", true},
          {first + 2, "<|im_end|>", true},
          {first + 3, "<|im_user|>", true},
          {first + 4, "<|im_assistant|>", true},
          {first + 10, "<|im_system|>", true},
          {first + 11, "<|tool_calls_section_begin|>", false},
          {first + 12, "<|tool_calls_section_end|>", false},
          {first + 13, "<|tool_call_begin|>", false},
          {first + 14, "<|tool_call_argument_begin|>", false},
          {first + 15, "<|tool_call_end|>", false},
          {first + 17, "<|im_middle|>", true},
          {first + 22, "<think>", false},
          {first + 23, "</think>", false},
          {first + 254, "[UNK]", true},
          {first + 255, "[PAD]", true}};
}

inline std::shared_ptr<const Tokenizer> test_tokenizer(const std::vector<std::string>& merges = {}) {
  auto made = Tokenizer::create(tiktoken_file(merges), kimi_specials(static_cast<int32_t>(256 + merges.size())));
  CHECK(made.ok(), made.error().message);
  return *made;
}

// The folder of the real Kimi vocabulary, or "" when this machine has none. Under CI a test fails then, elsewhere it is
// skipped.
inline std::string real_vocabulary_dir() {
  const char* data = std::getenv("PERIGEE_TEST_DATA");
  std::string dir = data == nullptr ? "" : std::string(data) + "/kimi-tokenizer";
  if (!dir.empty() && std::ifstream(dir + "/tiktoken.model").good()) return dir;
  return "";
}

}  // namespace perigee
