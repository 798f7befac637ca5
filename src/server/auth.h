// API keys: kept and compared as SHA-256 digests, in constant time.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/http_types.h"

namespace perigee {

class KeyRing {
 public:
  explicit KeyRing(const std::vector<std::string>& keys);
  bool empty() const { return digests_.empty(); }
  bool knows(std::string_view key) const;
  // The key of `Authorization: Bearer KEY` is known. True when there are no keys.
  bool admits(const HttpRequest& request) const;
  // The salt of the request's part of the prefix cache: what one key computed, or a client chose to keep apart with
  // `own`, shows in nobody else's cached tokens. Without keys it is `own`.
  std::string salt(const HttpRequest& request, const std::string& own) const;

 private:
  using Digest = std::array<uint8_t, 32>;
  static Digest digest(std::string_view key);
  std::vector<Digest> digests_;
};

}  // namespace perigee
