// Token ids back to text, one at a time: characters leave as soon as all their bytes are there.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "text/tokenizer.h"

namespace perigee {

// Bytes that arrive in any cutting, out as valid UTF-8. An incomplete tail is held back; bytes that cannot belong to a
// character become U+FFFD, one for each maximal subpart. The concatenated output does not depend on the cutting.
class Utf8Repair {
 public:
  void push(std::string_view bytes, std::string& out);  // appends to `out`
  void finish(std::string& out);                        // a tail still held becomes U+FFFD; ready for new text

 private:
  std::string held_;  // fewer bytes than a character
};

// The concatenation of all push() results and finish() equals decode() of the same ids.
class Detokenizer {
 public:
  // Keeps a reference to the tokenizer. With `skip_special_tokens`, ids with Tokenizer::is_skipped give no text.
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
      : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

  std::string push(int32_t id);  // an id out of range gives no text
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_tokens_;
  Utf8Repair repair_;
};

std::string decode(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool skip_special_tokens);

}  // namespace perigee
