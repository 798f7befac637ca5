// LeaseTag: shows that a lease which a client names was given by a node with the same secret. A client passes it from
// one node to the other and could write any host into it; without the tag nobody connects there.
#pragma once

#include <string>
#include <string_view>

#include "control/handover.h"

namespace perigee {

// Of everything in `remote` but its tag: HMAC-SHA-256 in 64 hexadecimal digits.
std::string lease_tag(std::string_view secret, const RemotePrefix& remote);
bool has_lease_tag(std::string_view secret, const RemotePrefix& remote);  // in constant time

}  // namespace perigee
