// Peer: a way to the leases of one other node. TCP's is tcp_peer.h; the one here stays in the process.
//
// It names units, never addresses, and what it brings is either what the lease holds or an error: a peer over a wire
// checks digests and that the lease still stands after the last byte. One caller at a time.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "kv/lease_table.h"

namespace perigee {

class Peer {
 public:
  virtual ~Peer() = default;

  // LeaseTable's words, of the other node's table.
  virtual Result<LeaseHold> open(const LeaseName& lease, std::span<const int32_t> tokens, int32_t num_blocks) = 0;
  virtual Status read(const LeaseName& lease, UnitRange units, std::span<uint8_t> out) = 0;
  // The units' bytes into pages of this node: by read(), where the carrier has no shorter way. After a stop of
  // `dropped` nobody needs them: it may end with an error, once the pieces under way have ended. When it returns no
  // page is written any more.
  virtual Status pull(const LeaseName& lease, UnitRange units, const PageStore& store, const UnitPages& to,
                      const std::stop_token& dropped);
  virtual Result<LeaseHold> extend(const LeaseName& lease) = 0;
  virtual Result<uint64_t> await_growth(uint64_t known, double wait_s) = 0;
  virtual Status release(const LeaseName& lease) = 0;

 private:
  std::vector<uint8_t> staging_;  // of pull()
};

// A way to the node of that name, once both have found that they have the same CacheShape. A stop ends whatever is
// waited for, then and later, with an error.
using Connect =
    std::function<Result<std::unique_ptr<Peer>>(const std::string& peer, const CacheShape& here, std::stop_token stop)>;

Error dropped_import();  // of a pull that ends because it was dropped

// To a table of this process, whatever the peer's name. `table` outlives what it makes.
Connect connect_in_process(LeaseTable& table);

}  // namespace perigee
