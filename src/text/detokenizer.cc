#include "text/detokenizer.h"

#include "base/utf8.h"

namespace perigee {

void Utf8Repair::push(std::string_view bytes, std::string& out) {
  std::string joined;
  if (!held_.empty()) {
    joined = std::move(held_.append(bytes));
    held_.clear();
    bytes = joined;
  }
  size_t copied = 0;
  for (size_t pos = 0; pos < bytes.size();) {
    const Utf8Char c = utf8_at(bytes, pos);
    pos += c.length;
    if (c.kind == Utf8Kind::kValid) continue;
    out += bytes.substr(copied, pos - c.length - copied);
    if (c.kind == Utf8Kind::kInvalid) out += kReplacement;
    if (c.kind == Utf8Kind::kTruncated) held_ = bytes.substr(pos - c.length);
    copied = pos;
  }
  out += bytes.substr(copied);
}

void Utf8Repair::finish(std::string& out) {
  if (!held_.empty()) out += kReplacement;
  held_.clear();
}

std::string Detokenizer::push(int32_t id) {
  std::string out;
  if (!skip_special_tokens_ || !tokenizer_.is_skipped(id)) repair_.push(tokenizer_.bytes(id), out);
  return out;
}

std::string Detokenizer::finish() {
  std::string out;
  repair_.finish(out);
  return out;
}

std::string decode(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool skip_special_tokens) {
  std::string bytes;
  for (const int32_t id : ids)
    if (!skip_special_tokens || !tokenizer.is_skipped(id)) bytes += tokenizer.bytes(id);
  std::string out;
  Utf8Repair repair;
  repair.push(bytes, out);
  repair.finish(out);
  return out;
}

}  // namespace perigee
