#include "router/json_members.h"

#include <algorithm>
#include <array>

namespace perigee {

namespace {

constexpr size_t kMaxMembers = 256;

constexpr std::array<bool, 256> kMeans = [] {
  std::array<bool, 256> table{};
  for (const char c : std::string_view("\"[]{},")) table[static_cast<unsigned char>(c)] = true;
  return table;
}();

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  void skip_blanks() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }
  bool take(char c) {
    skip_blanks();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  // Past the closing quote of a string whose opening one was taken; false: it does not end. A quote after an odd number
  // of backslashes is one of the string's characters.
  bool skip_string() {
    for (const size_t begin = at_;;) {
      const size_t quote = text_.find('"', at_);
      if (quote == std::string_view::npos) return false;
      size_t backslashes = 0;
      while (quote - backslashes > begin && text_[quote - backslashes - 1] == '\\') ++backslashes;
      at_ = quote + 1;
      if (backslashes % 2 == 0) return true;
    }
  }
  bool read_key(std::string_view& key) {
    if (!take('"')) return false;
    const size_t begin = at_;
    if (!skip_string()) return false;
    key = text_.substr(begin, at_ - 1 - begin);
    return take(':');
  }
  // Up to the comma or brace after it.
  bool read_value(std::string_view& value) {
    skip_blanks();
    const size_t begin = at_;
    for (size_t depth = 0;;) {
      while (at_ < text_.size() && !kMeans[static_cast<unsigned char>(text_[at_])]) ++at_;
      if (at_ == text_.size()) return false;
      const char c = text_[at_];
      if (depth == 0 && (c == ',' || c == '}' || c == ']')) break;
      ++at_;
      if (c == '"' && !skip_string()) return false;
      if (c == '[' || c == '{') ++depth;
      if (c == ']' || c == '}') --depth;
    }
    value = text_.substr(begin, at_ - begin);
    value = value.substr(0, value.find_last_not_of(" \t\r\n") + 1);
    return !value.empty();
  }
  bool at_end() {
    skip_blanks();
    return at_ == text_.size();
  }

 private:
  const std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

std::optional<JsonMembers> JsonMembers::read(std::string_view text) {
  JsonMembers out;
  Scanner scanner(text);
  if (!scanner.take('{')) return std::nullopt;
  if (!scanner.take('}')) {
    do {
      JsonMember member;
      if (out.members_.size() == kMaxMembers) return std::nullopt;
      if (!scanner.read_key(member.key) || !scanner.read_value(member.value)) return std::nullopt;
      out.members_.push_back(member);
    } while (scanner.take(','));
    if (!scanner.take('}')) return std::nullopt;
  }
  if (!scanner.at_end()) return std::nullopt;
  return out;
}

const JsonMember* JsonMembers::find(std::string_view key) const {
  const auto found =
      std::find_if(members_.rbegin(), members_.rend(), [&](const JsonMember& member) { return member.key == key; });
  return found == members_.rend() ? nullptr : &*found;
}

std::string JsonMembers::rewritten(std::initializer_list<std::string_view> without, std::string_view more) const {
  size_t size = more.size() + 2;
  for (const JsonMember& member : members_) size += member.key.size() + member.value.size() + 4;
  std::string out;
  out.reserve(size);
  out += '{';
  for (const JsonMember& member : members_) {
    if (std::find(without.begin(), without.end(), member.key) != without.end()) continue;
    if (out.size() > 1) out += ',';
    out.append("\"").append(member.key).append("\":").append(member.value);
  }
  if (out.size() > 1 && !more.empty()) out += ',';
  out.append(more).append("}");
  return out;
}

}  // namespace perigee
