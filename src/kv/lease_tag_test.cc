#include "kv/lease_tag.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(LeaseTag, IsOfEveryField) {
  RemotePrefix remote{.peer = "10.0.0.1:5600", .lease = {77, 3}, .num_blocks = 4};
  EXPECT_FALSE(has_lease_tag("secret", remote));
  remote.tag = lease_tag("secret", remote);
  EXPECT_EQ(remote.tag.size(), 64u);
  EXPECT_TRUE(has_lease_tag("secret", remote));
  EXPECT_FALSE(has_lease_tag("Secret", remote));
  EXPECT_FALSE(has_lease_tag("", remote));
  for (const auto change :
       {+[](RemotePrefix& r) { r.peer = "10.0.0.2:5600"; }, +[](RemotePrefix& r) { ++r.num_blocks; },
        +[](RemotePrefix& r) { ++r.lease.number; }, +[](RemotePrefix& r) { ++r.lease.incarnation; },
        +[](RemotePrefix& r) { r.tag.back() ^= 1; }, +[](RemotePrefix& r) { r.tag.pop_back(); }}) {
    RemotePrefix other = remote;
    change(other);
    EXPECT_FALSE(has_lease_tag("secret", other));
  }
}

}  // namespace
}  // namespace perigee
