#include "server/auth.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <optional>

namespace perigee {

KeyRing::KeyRing(const std::vector<std::string>& keys) {
  for (const std::string& key : keys)
    if (!key.empty()) digests_.push_back(digest(key));
}

KeyRing::Digest KeyRing::digest(std::string_view key) {
  Digest out;
  SHA256(reinterpret_cast<const uint8_t*>(key.data()), key.size(), out.data());
  return out;
}

bool KeyRing::knows(std::string_view key) const {
  const Digest given = digest(key);
  bool known = false;
  for (const Digest& each : digests_) known |= CRYPTO_memcmp(each.data(), given.data(), each.size()) == 0;
  return known;
}

namespace {

// KEY of `Authorization: Bearer KEY`; the scheme's case does not matter (RFC 9110, section 11.1).
std::optional<std::string_view> bearer(const HttpRequest& request) {
  constexpr std::string_view kScheme = "Bearer ";
  const std::string* value = request.header("Authorization");
  if (value == nullptr || !same_ignoring_case(std::string_view(*value).substr(0, kScheme.size()), kScheme))
    return std::nullopt;
  std::string_view key = std::string_view(*value).substr(kScheme.size());
  while (key.starts_with(' ')) key.remove_prefix(1);
  return key;
}

}  // namespace

bool KeyRing::admits(const HttpRequest& request) const {
  if (digests_.empty()) return true;
  const std::optional<std::string_view> key = bearer(request);
  return key && knows(*key);
}

std::string KeyRing::salt(const HttpRequest& request, const std::string& own) const {
  const std::optional<std::string_view> key = bearer(request);
  if (digests_.empty() || !key) return own;
  const Digest id = digest(*key);
  return std::string(id.begin(), id.end()) + own;
}

}  // namespace perigee
