#include "kv/lease_tag.h"

#include <fmt/core.h>
#include <openssl/crypto.h>

#include "kv/wire.h"

namespace perigee {

std::string lease_tag(std::string_view secret, const RemotePrefix& remote) {
  const std::string text =
      fmt::format("{} {} {} {}", remote.lease.incarnation, remote.lease.number, remote.num_blocks, remote.peer);
  std::string hex;
  for (const uint8_t byte : tag_of(secret, "lease", {reinterpret_cast<const uint8_t*>(text.data()), text.size()}))
    hex += fmt::format("{:02x}", byte);
  return hex;
}

bool has_lease_tag(std::string_view secret, const RemotePrefix& remote) {
  const std::string wanted = lease_tag(secret, remote);
  return remote.tag.size() == wanted.size() && CRYPTO_memcmp(remote.tag.data(), wanted.data(), wanted.size()) == 0;
}

}  // namespace perigee
