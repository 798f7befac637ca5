#include "server/spelling.h"

#include <algorithm>
#include <array>
#include <string>

namespace perigee {

namespace {

constexpr size_t kMaxName = 48;  // letters; nobody misspells a longer one into a known one

// Lower case, letters and digits only; at most kMaxName + 1 of them.
std::string letters_of(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c == '_' || c == '-') continue;
    out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (out.size() > kMaxName) break;
  }
  return out;
}

size_t allowed_edits(size_t letters) {
  return letters >= 8 ? 2 : letters >= 4 ? 1 : 0;
}

// Edits between two names of at most kMaxName letters, neighbours that changed places counted once (the distance of
// Damerau and Levenshtein in its restricted form).
size_t edits(std::string_view a, std::string_view b) {
  using Row = std::array<size_t, kMaxName + 1>;
  Row before{}, last{}, now{};
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) now[j] = std::min(now[j], before[j - 2] + 1);
    }
    before = last;
    last = now;
  }
  return last[b.size()];
}

}  // namespace

std::optional<std::string_view> nearest_name(std::string_view given, std::span<const std::string_view> known) {
  const std::string letters = letters_of(given);
  if (letters.size() > kMaxName) return std::nullopt;
  std::optional<std::string_view> nearest;
  size_t fewest = kMaxName;
  for (const std::string_view name : known) {
    const std::string other = letters_of(name);
    const size_t allowed = allowed_edits(std::min(letters.size(), other.size()));
    if (other.size() > letters.size() + allowed || letters.size() > other.size() + allowed) continue;
    const size_t count = edits(letters, other);
    if (count > allowed || count >= fewest) continue;
    nearest = name;
    fewest = count;
  }
  return nearest;
}

}  // namespace perigee
