#include "server/auth.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

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

bool KeyRing::admits(const HttpRequest& request) const {
  if (digests_.empty()) return true;
  constexpr std::string_view kScheme = "Bearer ";
  const std::string* value = request.header("Authorization");
  return value != nullptr && value->starts_with(kScheme) && knows(std::string_view(*value).substr(kScheme.size()));
}

}  // namespace perigee
