// The tag of a lease shows that a node with the same secret gave it. A client passes the lease from
// one node to the other and could write any host into it; without the tag nobody connects there.
#pragma once

#include <string>
#include <string_view>

#include "control/handover.h"

namespace perigee {

// HMAC-SHA-256 of all fields of `remote` except `tag`, in 64 hexadecimal digits.
std::string lease_tag(std::string_view secret, const RemotePrefix& remote);
bool has_lease_tag(std::string_view secret, const RemotePrefix& remote);  // in constant time

}  // namespace perigee
